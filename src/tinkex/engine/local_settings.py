"""How much of a machine an engine may use; plain values, read before torch is there.

Apart from `local/`, so that the process that starts an engine can name its settings without
importing what computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """How much of the machine the engine may use."""

    cache_bytes: int | None = None
    """Room of the key/value cache of each base model; None is 1 GiB on a CPU, and a part of what
    is free on a CUDA device."""
    max_pass_tokens: int = 8192
    """Most tokens of a training pass; operations are cut by it, so it decides their last bits."""
    shared_pass_tokens: int = 2048
    """The same while samples run, so that no stream waits long; cuts nothing further."""
    max_sequences: int | None = None
    """Most sequences that are sampled at the same time; None is 64 on a CPU, 256 on CUDA."""
    memory_bytes: int | None = None
    """What a training pass may take; None is a part of what the machine has, measured once."""
    adapter_bytes: int | None = None
    """What adapters, snapshots and their copies may take on the device; None likewise.

    Beyond it, those not used for longest are parked, or dropped where they can be made again.
    """
    host_bytes: int | None = None
    """What parked ones may take in host memory before they go to disk; None likewise."""
    parking_folder: Path | None = None
    """Where they go; None is the folder of the engine."""
    artifact_cache_bytes: int = 8 << 30
    """What copies of saved adapters may take on disk where the adapters themselves lie at a URL."""
    strict: bool = True
    """Whether training and sampling give the same bits whatever else is in the batch.

    On a CPU they always do; a CUDA device is a little faster without.
    """
