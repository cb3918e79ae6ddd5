"""What `tinkex demo` shows while it works, on a terminal and in a pipe."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from tinkex.cli.demo import DemoProgress

if TYPE_CHECKING:
    import pytest


class Stopwatch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here waits")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def demonstrate(stream: io.StringIO, *, steps: int = 32, first: int = 1) -> str:
    clock = Stopwatch()
    with DemoProgress(steps, stream=stream, clock=clock) as progress:
        progress.phase("Asking …")
        progress.stage("Asking: 1 answered")
        progress.phase("Training …")
        for step in range(first, steps + 1):
            clock.time += 2.0
            progress.step(step, {"loss": 4.0 - step / 16, "tokens": 100.0})
            progress.note(f"saved after step {step}")
    return stream.getvalue()


def test_a_pipe_gets_each_phase_and_four_steps():
    lines = demonstrate(io.StringIO()).splitlines()
    assert lines[:3] == [
        "Asking …",
        "Training …",
        "step  8/32  loss 3.5000  50 tokens/s  0:48 left",
    ]
    assert [line[:10] for line in lines[3:]] == ["step 16/32", "step 24/32", "step 32/32"]


def test_a_terminal_gets_one_line_that_is_gone_in_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    written = demonstrate(Terminal())
    assert "\n" not in written
    shown = written.split("\r\033[K")
    assert shown[0] == shown[-1] == ""
    assert max(map(len, shown)) < 80
    assert "Asking: 1 answered" in shown
    assert shown[-2].startswith("Training ━━━")
    assert "16/32  50%  loss 3.0000  0:32 left" in shown[3 + 16]
    assert "saved" not in written


def test_a_narrow_terminal_is_not_wrapped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "30")
    assert max(map(len, demonstrate(Terminal()).split("\r\033[K"))) < 30


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "dumb")
    written = demonstrate(Terminal())
    assert "\033" not in written
    assert written.count("\n") == 6


def test_the_time_left_of_a_resumed_run_counts_its_own_steps_only():
    lines = demonstrate(io.StringIO(), first=24).splitlines()
    assert lines[2].startswith("step 24/32")
    assert "0:16 left" in lines[2]


def test_a_closed_pipe_does_not_end_the_demo():
    demonstrate(ClosedPipe())
