"""Records the files of the package that a call passes, in the order in which they are first called.

Three processes take part: a client, a `tinkex serve`, and the engine that it starts.
The client is recorded by a profile function (`flow_client.py`); the other two load `HOOK` before
anything else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.docs.blocks import ROOT
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path
    from types import FrameType

SOURCE = ROOT / "src"
PACKAGE = f"{SOURCE / 'tinkex'}{os.sep}"
# The server's interpreter and the engine's run this first. A thread looks for the file `record`,
# whose text names the recording; it reports the start as `ROLE.NAME.on` and writes the calls to
# `ROLE.NAME.calls` when the name changes.
HOOK = """
import os, signal, sys, threading, time
folder, package = os.environ["FLOWS_FOLDER"], os.environ["FLOWS_PACKAGE"]
role = "server" if "serve" in sys.orig_argv else "engine"
calls, current, profiled = {}, [""], threading.Event()
def watch(frame, event, argument):
    file = frame.f_code.co_filename
    if current[0] and event == "call" and file.startswith(package):
        calls.setdefault(file[len(package):] + " " + frame.f_code.co_qualname)
def write(name, text):
    path = os.path.join(folder, role + "." + name)
    with open(path + ".part", "w") as out:
        out.write(text)
    os.replace(path + ".part", path)
def switch():
    while True:
        time.sleep(0.01)
        try:
            with open(os.path.join(folder, "record")) as file:
                name = file.read()
        except FileNotFoundError:
            name = ""
        if name == current[0]:
            continue
        before, current[0] = current[0], ""
        if before:
            write(before + ".calls", "\\n".join(list(calls)))
        calls.clear()
        current[0] = name
        if name:
            os.kill(os.getpid(), signal.SIGUSR1)
            profiled.wait()
            write(name + ".on", "")
# The main thread is profiled from the first recording on: profiled imports take twice as long.
# Only a signal handler can run there.
def profile(number, frame):
    sys.setprofile(watch)
    profiled.set()
signal.signal(signal.SIGUSR1, profile)
threading.Thread(target=switch, daemon=True).start()
threading.setprofile(watch)
"""


@dataclass
class Trace:
    """The functions that one call passed in one process, in the order of their first calls."""

    calls: list[tuple[str, str]]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.calls))


@dataclass
class Profile:
    """Records the calls of every thread that is started while it is installed."""

    recording: bool = False
    calls: dict[tuple[str, str], None] = field(default_factory=dict[tuple[str, str], None])

    def watch(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if self.recording and event == "call" and code.co_filename.startswith(PACKAGE):
            self.calls.setdefault((code.co_filename[len(PACKAGE) :], code.co_qualname))

    @contextmanager
    def installed(self) -> Generator[None]:
        threading.setprofile(self.watch)
        sys.setprofile(self.watch)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def record(self, call: Callable[[], object]) -> Trace:
        self.calls.clear()
        self.recording = True
        try:
            call()
        finally:
            self.recording = False
        return Trace(list(self.calls))


@dataclass(frozen=True)
class TracedServer:
    """A `tinkex serve` whose process, and whose engine's process, can be recorded."""

    url: str
    folder: Path

    @contextmanager
    def recording(self, name: str) -> Generator[dict[str, Trace]]:
        """Record both processes; the result is filled in when the block ends."""
        traces: dict[str, Trace] = {}
        self._write(name)
        for role in ("server", "engine"):
            _wait_for(self.folder / f"{role}.{name}.on")
        yield traces
        self._write("")
        for role in ("server", "engine"):
            lines = _wait_for(self.folder / f"{role}.{name}.calls").splitlines()
            pairs = (line.partition(" ") for line in lines)
            traces[role] = Trace([(file, function) for file, _, function in pairs])

    def _write(self, name: str) -> None:
        part = self.folder / "record.part"
        part.write_text(name)
        part.replace(self.folder / "record")


@contextmanager
def traced_server(folder: Path) -> Generator[TracedServer]:
    """A server with the tiny model, until the block ends."""
    (folder / "sitecustomize.py").write_text(HOOK)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINKEX_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(SOURCE)])
    environment |= {"FLOWS_FOLDER": str(folder), "FLOWS_PACKAGE": PACKAGE}
    command = [sys.executable, "-m", "tinkex.cli", "serve", "--no-auth", "--port", "0"]
    command += ["--data-dir", str(folder / "data"), "--base-model", "tinkex/tiny"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            yield TracedServer(_url_of(server), folder)
        finally:
            server.terminate()
            server.communicate(timeout=PATIENCE_S)


def _url_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    said = ""
    for line in server.stdout:
        said += line
        for word in line.replace('"', " ").split():
            if word.startswith("http://127.0.0.1:"):
                return word.rstrip(".,")
    raise AssertionError(f"the server ended before it said where it listens:\n{said}")


def _wait_for(path: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)
    return path.read_text()
