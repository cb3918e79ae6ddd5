"""Make the virtual environments the conformance tests compare, below `.venvs/`.

    cookbook   tinker-cookbook with what it needs to be imported, but not the official client: it
               sees the packages of `.venv`, tinkex among them, and adds those it wants otherwise
    official   the official client on top: it sees the packages of `cookbook` and adds its own
    official-0.18.2   the same for the oldest client that must be served
    official-0.22.7 and so on: the same for each one between, with `--all`

With `--all` the cookbook's source, whose tests are run, is unpacked next to them. What is already
there is kept.

    python tests/conformance/make_venvs.py [--all]
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY))
from tools.set_up import diagnosis, run_pip, tell  # noqa: E402 - a script of ours, not a package

NEEDED_BYTES = 10**9
OFFICIAL = "tinker==0.36.0"
OLDEST = "0.18.2"
# Versions at which something on the wire changed.
BETWEEN = ("0.22.7", "0.24.1", "0.25.0", "0.29.1", "0.33.1")
COOKBOOK = "tinker-cookbook==0.5.8"
# What the cookbook declares, without the official client, and three small extras that let
# twenty more of its modules be imported.
COOKBOOK_NEEDS = (
    "aiohttp>=3.9",
    "anyio>=4",
    "blobfile>=3",
    "chz>=0.4",
    "cloudpickle>=3",
    "datasets>=2.14",
    "huggingface-hub>=0.20",
    "math-verify>=0.5",
    "modal>=1.5.1",
    "numpy",
    "pillow>=10",
    "pydantic>=2",
    "pylatexenc>=2",
    "pyrage>=1.4",
    "pytest>=8",
    "pytest-asyncio>=0.23",
    "pytest-timeout>=2",
    "rich>=13",
    "safetensors>=0.4",
    "sympy>=1.12",
    "termcolor>=2",
    "tiktoken>=0.12",
    "tqdm>=4.60",
    "transformers==5.5.4",
)
# These declare the official client, so their dependencies are named above instead.
WITHOUT_DEPENDENCIES = (COOKBOOK, "tml-renderers>=0.0.1")


def pip(venv: Path, label: str, *arguments: str) -> None:
    status, said = run_pip(venv, label, *arguments)
    if status != 0:
        sys.exit(
            f"{said.strip()}\n\n{diagnosis(said, NEEDED_BYTES) or 'pip failed; run make again.'}"
        )


def create(venv: Path) -> Path:
    """An environment for this version of Python; returns its folder of packages."""
    packages = site_packages(venv)
    if not (packages / "pip").exists():
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    return packages


def site_packages(venv: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return venv / "lib" / version / "site-packages"


def make_cookbook(root: Path) -> Path:
    venv = root / "cookbook"
    packages = create(venv)
    # Behind its own packages on the path: torch is there once.
    (packages / "tinkex.pth").write_text(f"{site_packages(REPOSITORY / '.venv')}\n")
    pip(venv, "what the cookbook needs", "install", "--no-warn-conflicts", *COOKBOOK_NEEDS)
    pip(venv, "the cookbook", "install", "--no-deps", *WITHOUT_DEPENDENCIES)
    return packages


def make_official(venv: Path, package: str, below: Path) -> None:
    packages = create(venv)
    # Folders of a .pth file are not searched for further ones, so both are named.
    (packages / "cookbook.pth").write_text(f"{below}\n{site_packages(REPOSITORY / '.venv')}\n")
    # The cookbook asks for a newer client than most of these; they run without it.
    pip(venv, package, "install", "--no-warn-conflicts", package)


def unpack_source(root: Path) -> None:
    """The cookbook's source package; the built one has no tests in it."""
    name = COOKBOOK.split("==")[0]
    download = ["download", "--no-deps", "--no-binary", name, "--dest", str(root), COOKBOOK]
    pip(root / "cookbook", "the cookbook's source", *download)
    (archive,) = root.glob("tinker_cookbook-*.tar.gz")
    shutil.rmtree(root / "cookbook-source", ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(root, filter="data")
    (root / archive.name.removesuffix(".tar.gz")).rename(root / "cookbook-source")
    archive.unlink()


def main(arguments: list[str]) -> int:
    root = REPOSITORY / ".venvs"
    older = (OLDEST, *BETWEEN) if "--all" in arguments else (OLDEST,)
    wanted = [OFFICIAL, *older, *COOKBOOK_NEEDS, *WITHOUT_DEPENDENCIES, sys.version, str(root)]
    stamp = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()
    done = root / ("all.stamp" if "--all" in arguments else "conformance.stamp")
    if done.exists() and done.read_text() == stamp:
        done.touch()
        return 0
    tell(f"Setting up the official clients in {root.name}: takes a minute or two the first time.")
    root.mkdir(parents=True, exist_ok=True)
    packages = make_cookbook(root)
    make_official(root / "official", OFFICIAL, packages)
    for version in older:
        make_official(root / f"official-{version}", f"tinker=={version}", packages)
    if "--all" in arguments:
        unpack_source(root)
    done.write_text(stamp)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
