"""The PyTorch engine on this machine: `Engine` over a trainer and a sampler per base model."""

from tinkex.engine.local.engine import LocalEngine
from tinkex.engine.local_settings import LocalSettings

__all__ = ["LocalEngine", "LocalSettings"]
