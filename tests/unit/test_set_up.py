"""Setting up for `make`: what goes wrong is said in words, with what to do about it."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import stat
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "set_up.py"

# What pip says, cut to the lines that matter.
NO_NETWORK = """WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by
'NewConnectionError('<pip._vendor.urllib3.connection.HTTPSConnection object at 0x7f>: Failed to
establish a new connection: [Errno -3] Temporary failure in name resolution')': /simple/torch/
ERROR: Could not find a version that satisfies the requirement torch (from versions: none)
ERROR: No matching distribution found for torch"""
NO_SPACE = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
NO_WHEEL = "ERROR: No matching distribution found for torch==2.13.0 (from versions: 2.1, 2.2)"
NO_PIN = "The user requested (constraint) torch==2.13.0\nERROR: ResolutionImpossible: for help"
NO_TRUST = "SSLError(SSLCertVerificationError(1, 'self-signed certificate'))': Max retries exceeded"
NO_RIGHT = "ERROR: [Errno 13] Permission denied: '/repo/.venv/lib'"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("set_up_tool", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("said", "what", "todo"),
    [
        (NO_NETWORK, "registry cannot be reached", "Check the network"),
        (NO_SPACE, "disk is full", "2.0 GB"),
        (NO_PIN, "has not all the versions", "pip config list"),
        (NO_WHEEL, "no version for this Python", "make PYTHON=python3.12"),
        (NO_TRUST, "certificate is not trusted", "global.cert"),
        (NO_RIGHT, "cannot be written", "run make again"),
    ],
)
def test_what_pip_says_is_turned_into_what_to_do(tool: ModuleType, said: str, what: str, todo: str):
    told = tool.diagnosis(said, 2 * 10**9)
    assert what in told
    assert todo in told


def test_words_that_nobody_knows_are_shown_as_they_are(tool: ModuleType):
    assert tool.diagnosis("ERROR: something new", 10**9) is None


def test_an_old_python_is_refused_with_the_way_to_name_another(tool: ModuleType):
    with pytest.raises(tool.SetUpError, match=r"make PYTHON=python3\.11"):
        tool.check_python((3, 10))
    tool.check_python((3, 11))


def test_a_small_disk_is_refused_before_anything_is_fetched(tool: ModuleType):
    with pytest.raises(tool.SetUpError, match=r"1\.0 GB are free, and 2\.0 GB are needed"):
        tool.check_room(10**9, tool.PURPOSES["demo"])


def test_the_extras_that_are_installed_exist(tool: ModuleType):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for purpose in tool.PURPOSES.values():
        assert set(purpose.extras.split(",")) <= extras.keys()


def test_a_misspelt_purpose_is_a_misuse():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), ".venv", "nonsense"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "usage" in done.stderr


# -- how far it is ---------------------------------------------------------------------------------


def test_progress_names_what_is_fetched_and_counts_what_is_installed(
    tool: ModuleType, tmp_path: Path
):
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "pip-23.dist-info").mkdir(parents=True)
    progress = tool.Progress("1/3 torch", tmp_path, shown=False)
    progress.take("Collecting torch (from -c constraints.txt (line 1))\n")
    assert progress.text() == "looking for torch"
    progress.take("  Downloading torch-2.13.0-cp311.whl (110.0 MB)\n")
    assert progress.text() == "fetching torch-2.13.0-cp311.whl (110.0 MB)"
    progress.take("Installing collected packages: mpmath, sympy, torch\n")
    assert progress.text() == "installing package 0 of 3"
    (packages / "mpmath-1.dist-info").mkdir()
    assert progress.text() == "installing package 1 of 3"
    assert progress.summary().startswith("3 packages installed in ")


def test_without_a_terminal_there_is_a_line_now_and_then(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    told = TextWithEvent("fetching torch")
    monkeypatch.setattr(tool.sys, "stderr", told)
    monkeypatch.setattr(tool.Progress, "EVERY_S", 0.001)
    with tool.Progress("1/3 torch", tmp_path, shown=False) as progress:
        progress.take("Downloading torch (110.0 MB)")
        assert told.seen.wait(PATIENCE_S)
    assert re.search(r"  1/3 torch \(\d+ s\): fetching torch \(110\.0 MB\)\n", told.getvalue())
    assert "\033" not in told.getvalue()


class TextWithEvent(io.StringIO):
    """Says when a text was written to it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.seen = text, threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.text in text:
            self.seen.set()
        return count


# -- with a pip that does what a test wants --------------------------------------------------------


def fake_environment(folder: Path, script: str) -> Path:
    """An environment whose Python is a shell script."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return folder


def set_up(venv: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(venv), "demo"],
        capture_output=True,
        text=True,
        check=False,
        cwd=venv.parent,
        env={"PATH": os.environ["PATH"], "HOME": str(venv.parent)},
    )


def fails_with(text: str) -> str:
    return f'case "$*" in *--version*) exit 0;; esac; echo "{text}"; exit 1'


def test_an_environment_that_works_is_filled_step_by_step_and_marked_whole(
    tool: ModuleType, tmp_path: Path
):
    venv = fake_environment(tmp_path / "venv", f'echo "$*" >> {tmp_path}/calls')
    done = set_up(venv)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()[1:]
    assert [call.split()[-1] for call in calls[:1]] == ["torch"]
    assert calls[1].endswith(f"--editable {ROOT}[engine,server,cli,plots,tokenizers]")
    assert calls[2].endswith(f"--no-deps {tool.MODEL}")
    assert all(f"--constraint {ROOT}/constraints.txt" in call for call in calls)
    assert not (venv / tool.BEGUN).exists()


def test_without_a_network_the_environment_is_kept_and_the_next_step_told(
    tool: ModuleType, tmp_path: Path
):
    venv = fake_environment(tmp_path / "venv", fails_with("Failed to establish a new connection"))
    done = set_up(venv)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("What was downloaded is kept.")
    assert "Traceback" not in done.stderr
    assert not (venv / tool.BEGUN).exists()


@pytest.mark.parametrize(
    ("script", "word"),
    [
        (fails_with("No space left on device"), "Make room"),
        ('case "$*" in *--version*) exit 0;; esac; kill -9 $$', "killed (signal 9)"),
    ],
)
def test_what_may_be_half_installed_is_begun_anew(
    tool: ModuleType, tmp_path: Path, script: str, word: str
):
    venv = fake_environment(tmp_path / "venv", script)
    done = set_up(venv)
    assert done.returncode == 1
    assert word in done.stderr
    assert (venv / tool.BEGUN).exists()


# -- make ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/usr/bin/make").exists(), reason="needs make")
@pytest.mark.parametrize(
    ("python", "word"),
    [
        ("no-such-python", "There is no no-such-python here"),
        ("./old-python", "tinkex needs Python 3.11 or newer"),
    ],
)
def test_make_says_which_python_it_needs(tmp_path: Path, python: str, word: str):
    old = tmp_path / "old-python"
    # A Python that takes itself for an older one.
    old.write_text(
        f'#!/bin/sh\nshift\nexec {sys.executable} -c "import sys; sys.version_info = (3, 9)\n$1"\n'
    )
    old.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "set_up.py").write_bytes(SCRIPT.read_bytes())
    done = subprocess.run(
        ["make", f"PYTHON={python}", "demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert word in done.stdout + done.stderr
    assert not (tmp_path / ".venv").exists()
