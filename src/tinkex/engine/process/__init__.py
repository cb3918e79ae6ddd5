"""The engine in a process of its own; importing this never imports torch."""

from tinkex.engine.process.engine import ProcessEngine
from tinkex.engine.process.spec import EngineSpec, ModelSource, ProcessSettings
from tinkex.engine.settings import LocalSettings

__all__ = ["EngineSpec", "LocalSettings", "ModelSource", "ProcessEngine", "ProcessSettings"]
