"""Where the comparison runs: interpreters, versions, hardware."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.client_cost.processes import ROOT, MeasureError, Sdk, checked

OFFICIAL_VERSION = "0.36.0"
PACKAGES = ("numpy", "protobuf", "pydantic", "msgspec", "orjson", "httpx", "pyqwest", "aiohttp")


def official_python(given: str | None) -> str:
    """The interpreter with the official SDK, in a new virtual environment when none is given."""
    if given:
        return given
    folder = ROOT / ".venvs" / f"official-{OFFICIAL_VERSION}"
    python = folder / "bin" / "python"
    # Looking for the package and not for the folder: an interrupted installation is repeated.
    if not any(folder.glob(f"lib/*/site-packages/tinker-{OFFICIAL_VERSION}.dist-info")):
        print(f"making {folder.relative_to(ROOT)}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        wanted = f"tinker=={OFFICIAL_VERSION}"
        subprocess.run([str(python), "-m", "pip", "install", "-q", wanted], check=True)
    return str(python)


def both_sides(given: str | None, only: str | None) -> list[Sdk]:
    """The SDKs to measure, the official one first."""
    sides: list[Sdk] = []
    if only != "tinkex":
        sides.append(Sdk("official", "tinker", official_python(given)))
    if only != "official":
        sides.append(Sdk("tinkex", "tinkex", sys.executable, str(ROOT / "src")))
    return sides


def versions(sdk: Sdk) -> dict[str, str]:
    """Python and the packages that matter for cost, as this side has them."""
    code = (
        "import platform, sys\n"
        "from importlib.metadata import PackageNotFoundError, version\n"
        "print('python', platform.python_version())\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(name, version(name))\n"
        "    except PackageNotFoundError: pass\n"
    )
    listed = checked(
        sdk.argv("-c", code, sdk.module, *PACKAGES), {"PATH": os.environ["PATH"]}
    ).splitlines()
    found = dict(line.split() for line in listed)
    if sdk.label == "official" and found.get("tinker") != OFFICIAL_VERSION:
        raise MeasureError(f"{sdk.python} has tinker {found.get('tinker')}, not {OFFICIAL_VERSION}")
    return found


def hardware() -> dict[str, object]:
    """The machine, as far as it can be told without help."""
    return {
        "cpu": cpu_name(),
        "vectors": vectors(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def machine() -> str:
    """The hardware in one line, for below a table."""
    return f"{cores()} cores of {cpu_name()} ({vectors()})"


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's name, or its architecture."""
    return _cpu_info("model name") or platform.machine()


def vectors() -> str:
    """The widest vector instructions: engine figures differ with them more than with the name."""
    flags = _cpu_info("flags").split()
    if "avx512f" in flags:
        return "AVX-512"
    return "AVX2" if "avx2" in flags else platform.machine()


def _cpu_info(name: str) -> str:
    """What Linux says about the first processor; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def commit() -> str | None:
    """The commit measured, marked when the tree has changes."""
    argv = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
