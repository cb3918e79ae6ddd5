"""Memory budgets, computed once when the engine starts.

They come from the settings, or are a fraction of the machine's memory: of what is free on a CUDA
device after loading the base models, or of all memory on a CPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from tinkex.engine.local_settings import LocalSettings

_MIB: Final = 2**20
# The rest is for the sampler's passes, the allocator and other processes.
_CUDA_CACHES: Final = 0.3
_CUDA_PASS: Final = 0.6
_CUDA_ADAPTERS: Final = 0.25
_CPU_PASS: Final = 0.4
_CPU_ADAPTERS: Final = 0.25
_CUDA_HOST: Final = 0.5
_CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes of each model's KV cache, a training pass, adapters on the device, and parked ones.

    Adapters are those in training, snapshots, and the copies of both that sampling reads.
    """

    cache_bytes: int
    pass_bytes: int
    adapter_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Batch sizes: large enough to keep the device busy, small enough to stay fair."""

    sequences: int
    sample_tokens: int
    logit_rows: int
    logits_bytes: int


_ON_CPU: Final = Sizes(sequences=64, sample_tokens=512, logit_rows=64, logits_bytes=64 * _MIB)
_ON_CUDA: Final = Sizes(sequences=256, sample_tokens=8192, logit_rows=512, logits_bytes=1280 * _MIB)


def sizes(settings: LocalSettings, device: torch.device) -> Sizes:
    """Defaults for the device, overridden by the settings."""
    found = _ON_CUDA if device.type == "cuda" else _ON_CPU
    return replace(found, sequences=_either(settings.max_sequences, found.sequences))


def budgets(settings: LocalSettings, device: torch.device, models: int) -> Budgets:
    """The budgets of an engine with `models` base models, whose caches are not allocated yet."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        cache_bytes = _either(settings.cache_bytes, int(free * _CUDA_CACHES) // models)
        found = _on_cuda(free - models * cache_bytes, machine_bytes())
    else:
        cache_bytes = _either(settings.cache_bytes, 1024 * _MIB)
        found = _on_cpu(machine_bytes())
    return Budgets(
        cache_bytes=cache_bytes,
        pass_bytes=_either(settings.memory_bytes, found.pass_bytes),
        adapter_bytes=_either(settings.adapter_bytes, found.adapter_bytes),
        host_bytes=_either(settings.host_bytes, found.host_bytes),
    )


def machine_bytes() -> int:
    """The memory of this machine, or of the container when that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *filter(None, map(_limit, _CGROUP_LIMITS))])


def _on_cuda(free: int, host: int) -> Budgets:
    return Budgets(
        cache_bytes=0,
        pass_bytes=max(int(free * _CUDA_PASS), 0),
        adapter_bytes=max(int(free * _CUDA_ADAPTERS), 0),
        host_bytes=int(host * _CUDA_HOST),
    )


def _on_cpu(host: int) -> Budgets:
    return Budgets(
        cache_bytes=0,
        pass_bytes=int(host * _CPU_PASS),
        adapter_bytes=int(host * _CPU_ADAPTERS),
        host_bytes=0,  # the device is the host: parked adapters go to disk
    )


def _either(wanted: int | None, found: int) -> int:
    return found if wanted is None else wanted


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit
