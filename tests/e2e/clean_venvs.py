"""Virtual environments with nothing in them but tinkex and what it asks for.

`install` lets pip do it. That takes minutes where torch is wanted, so `link` gives an environment
exactly the packages of a closure, as links to the files of the one that runs the tests.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
LIMIT_S = PATIENCE_S


@dataclass(frozen=True)
class Built:
    """The two files that a release has."""

    wheel: Path
    sdist: Path


def build(folder: Path) -> Built:
    """Build both: the wheel is made from the sdist, so it shows what that holds."""
    run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], folder)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return Built(wheel, sdist)


@dataclass(frozen=True)
class Venv:
    """An environment without pip; packages come from the pip of the one that runs the tests."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Venv:
        venv.create(folder, with_pip=False, symlinks=True)
        (folder / "home").mkdir()
        return cls(folder)

    @property
    def packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def pip(self, *arguments: str) -> str:
        """Run pip on this environment, with the versions that the tests run with."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.folder), "--quiet"]
        return run([*pip, "--disable-pip-version-check", *arguments], self.folder)

    def install(self, *what: str) -> None:
        """Install what is named and what that asks for."""
        self.pip("install", "--constraint", str(ROOT / "constraints.txt"), *what)

    def link(self, names: set[str]) -> None:
        """Give it these packages, as links to ours."""
        ours = Path(str(metadata.distribution("pip").locate_file("")))
        for name in names:
            for file in metadata.files(name) or []:
                place = _linkable(ours, Path(file))
                target = self.packages / place
                if ".." not in place.parts and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.symlink_to(ours / place)

    def python(self, program: str, **env: str) -> str:
        """What a program prints."""
        command = [str(self.folder / "bin" / "python"), "-W", "error", "-c", program]
        return run(command, self.folder, **self._settings(env))

    def tinkex(self, *arguments: str, **env: str) -> str:
        """What the installed command prints."""
        command = [str(self.folder / "bin" / "tinkex"), *arguments]
        return run(command, self.folder, **self._settings(env))

    def _settings(self, more: dict[str, str]) -> dict[str, str]:
        """An empty home, and nothing of the environment that runs the tests."""
        return {"HOME": str(self.folder / "home"), "PATH": "/usr/bin:/bin", **more}


def _linkable(ours: Path, file: Path) -> Path:
    """The file, or the largest folder around it that belongs to its package alone."""
    for folder in reversed(file.parents[:-1]):
        alone = (ours / folder / "__init__.py").exists() or folder.suffix == ".dist-info"
        if alone or folder.suffix == ".libs":
            return folder
    return file


def run(command: list[str], folder: Path, **env: str) -> str:
    """Run it to its end; what it printed is in the message if it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=env or dict(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
