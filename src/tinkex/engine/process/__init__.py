"""The engine in a process of its own; importing this never imports torch."""

from tinkex.engine.local_settings import LocalSettings
from tinkex.engine.process.process_engine import ProcessEngine
from tinkex.engine.process.spec import EngineSpec, ModelSource, ProcessSettings

__all__ = ["EngineSpec", "LocalSettings", "ModelSource", "ProcessEngine", "ProcessSettings"]
