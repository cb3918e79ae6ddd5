"""Make the virtual environments the conformance tests compare, below `.venvs/`.

    cookbook   tinker-cookbook with what it needs to be imported, and tinkex's dependencies,
               but not the official client
    official   the official client on top: it sees the packages of `cookbook` and adds its own
    official-0.18.2 and so on: the same for each older version that must be served

and unpack the cookbook's source, whose tests are run, next to them. Takes a minute or two and
1.6 GB, nearly all of it torch. What is already there is kept.

    python tests/conformance/make_venvs.py [FOLDER]
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY))
from tools.set_up import diagnosis, run  # noqa: E402 - a script of ours, not a package

NEEDED_BYTES = 2 * 10**9
OFFICIAL = "tinker==0.36.0"
# Versions at which something on the wire changed.
OLDER = ("0.18.2", "0.22.7", "0.24.1", "0.25.0", "0.29.1", "0.33.1")
COOKBOOK = "tinker-cookbook==0.5.8"
TORCH = "torch==2.13.0"
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


def own_needs() -> list[str]:
    """What tinkex itself and its fake server depend on."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["server"]]


def pip(venv: Path, *arguments: str) -> None:
    command = [str(venv / "bin" / "python"), "-m", "pip", "--quiet", *arguments]
    command.append("--disable-pip-version-check")
    status, said = run(command)
    if status != 0:
        sys.exit(
            f"{said.strip()}\n\n{diagnosis(said, NEEDED_BYTES) or 'pip failed; run make again.'}"
        )


def create(venv: Path) -> Path:
    """An environment for this version of Python; returns its folder of packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = venv / "lib" / version / "site-packages"
    if not (packages / "pip").exists():
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    return packages


def make_cookbook(root: Path) -> Path:
    venv = root / "cookbook"
    packages = create(venv)
    # First and alone: it decides for everything that follows which build of torch is there.
    pip(venv, "install", TORCH)
    pip(venv, "install", *COOKBOOK_NEEDS, *own_needs())
    pip(venv, "install", "--no-deps", *WITHOUT_DEPENDENCIES)
    return packages


def make_official(venv: Path, package: str, below: Path) -> None:
    packages = create(venv)
    (packages / "cookbook.pth").write_text(f"{below}\n")
    # The cookbook asks for a newer client than most of these; they run without it.
    pip(venv, "install", "--no-warn-conflicts", package)


def unpack_source(root: Path) -> None:
    """The cookbook's source package; the built one has no tests in it."""
    name = COOKBOOK.split("==")[0]
    download = ["download", "--no-deps", "--no-binary", name, "--dest", str(root), COOKBOOK]
    pip(root / "cookbook", *download)
    (archive,) = root.glob("tinker_cookbook-*.tar.gz")
    shutil.rmtree(root / "cookbook-source", ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(root, filter="data")
    (root / archive.name.removesuffix(".tar.gz")).rename(root / "cookbook-source")
    archive.unlink()


def main(arguments: list[str]) -> int:
    root = Path(arguments[0] if arguments else REPOSITORY / ".venvs").resolve()
    clients = [OFFICIAL, *OLDER]
    wanted = [*clients, TORCH, *COOKBOOK_NEEDS, *own_needs(), *WITHOUT_DEPENDENCIES, sys.version]
    stamp = hashlib.sha256(json.dumps([*wanted, str(root)]).encode()).hexdigest()
    done = root / "conformance.stamp"
    if done.exists() and done.read_text() == stamp:
        return 0
    root.mkdir(parents=True, exist_ok=True)
    packages = make_cookbook(root)
    make_official(root / "official", OFFICIAL, packages)
    for version in OLDER:
        make_official(root / f"official-{version}", f"tinker=={version}", packages)
    unpack_source(root)
    done.write_text(stamp)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
