"""The view of a run in a pipe: which lines come, and that nothing can break the run."""

from __future__ import annotations

import io
import math
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tinkex.tracking.progress import Progress
from tinkex.tracking.views import doing

if TYPE_CHECKING:
    from collections.abc import Callable


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


def shown(total: int, use: Callable[[Progress, Stopwatch], None], **settings: Any) -> list[str]:
    """The lines that a pipe gets."""
    stream = io.StringIO()
    clock = Stopwatch()
    with Progress(total, "a run", stream=stream, clock=clock, **settings) as progress:
        use(progress, clock)
    return stream.getvalue().splitlines()


def test_a_pipe_gets_a_line_per_step_and_a_summary():
    def run(progress: Progress, clock: Stopwatch) -> None:
        for step, loss in ((1, 3.0), (2, 2.5), (3, 2.0)):
            clock.time += 2.0
            rate = {"learning_rate": 1e-4}
            progress.step(step, {"loss": loss, "tokens": 100, "tokens_per_s": 50.0, **rate})
        progress.note("saved")

    assert shown(4, run) == [
        "step 1/4  loss 3.0000  50 tokens/s  0:06 left  lr 1.00e-04",
        "step 2/4  loss 2.5000  50 tokens/s  0:04 left  lr 1.00e-04",
        "step 3/4  loss 2.0000  50 tokens/s  0:02 left  lr 1.00e-04",
        "saved",
        "3 of 4 steps in 0:06  loss 3.0000 → 2.0000  50 tokens/s",
    ]


def test_a_pipe_gets_a_line_for_what_is_done_before_the_first_step():
    def run(progress: Progress, _: Stopwatch) -> None:
        progress.stage("loading a model")
        progress.stage("computing step 1")
        progress.step(1, {"loss": 3.0})

    assert shown(2, run)[:3] == [
        "Loading a model ...",
        "Computing step 1 ...",
        "step 1/2  loss 3.0000  0:00 left",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_keeps_what_is_being_done_and_a_terminal_clears_it(
    monkeypatch: pytest.MonkeyPatch,
):
    for stream, said in (
        (io.StringIO(), ["Connecting ...\n", "Connecting ...\n"]),
        (Terminal(), ["Connecting ...\r", "Connecting ...\r\r\033[J"]),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with doing("Connecting"):
            assert stream.getvalue() == said[0]
        assert stream.getvalue() == said[1]


def test_saying_what_is_done_to_a_closed_pipe_does_no_harm(monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    done = []
    with doing("Connecting"):
        done.append(1)
    assert done


def test_what_is_counted_may_be_something_else_than_steps():
    def run(progress: Progress, clock: Stopwatch) -> None:
        clock.time += 2.0
        progress.step(1, {"tokens": 10})

    assert shown(2, run, unit="prompt") == [
        "prompt 1/2  5 tokens/s  0:02 left",
        "1 of 2 prompts in 0:02  5 tokens/s",
    ]


def test_many_steps_are_thinned_evenly_but_no_evaluation_is_lost():
    def run(progress: Progress, _: Stopwatch) -> None:
        for step in range(1, 1001):
            progress.step(step, {"loss": 1.0} | ({"eval_loss": 2.0} if step == 333 else {}))

    lines = shown(1000, run)[:-1]
    steps = [int(line.removeprefix("step").partition("/")[0]) for line in lines]
    assert steps == sorted({1, 333, *range(20, 1001, 20)})
    assert "eval loss 2.0000" in lines[steps.index(333)]
    assert "eval loss" not in lines[steps.index(340)]


def test_a_slow_run_is_heard_of_at_least_every_half_minute():
    def run(progress: Progress, clock: Stopwatch) -> None:
        for step in range(1, 10):
            clock.time += 20.0
            progress.step(step, {"loss": 1.0})

    lines = shown(100_000, run)[:-1]
    steps = [int(line.removeprefix("step").partition("/")[0]) for line in lines]
    assert steps == [1, 3, 5, 7, 9]


def test_the_first_step_is_no_measure_for_the_others():
    def run(progress: Progress, clock: Stopwatch) -> None:
        clock.time += 60.0
        progress.step(1, {"loss": 1.0})
        for step in (2, 3):
            clock.time += 1.0
            progress.step(step, {"loss": 1.0})

    assert "0:07 left" in shown(10, run)[2]


def test_a_resumed_run_counts_from_where_it_goes_on():
    def run(progress: Progress, clock: Stopwatch) -> None:
        for step in (41, 42):
            clock.time += 3.0
            progress.step(step, {"loss": 1.0})

    lines = shown(50, run, done=40)
    assert lines[0] == "step 41/50  loss 1.0000  0:27 left"
    assert lines[-1].startswith("2 of 10 steps in 0:06")


def test_a_finished_run_says_so():
    lines = shown(1, lambda progress, _: progress.step(1, {"reward": 0.25, "eval_reward": 0.5}))
    assert lines == [
        "step 1/1  reward 0.2500  eval reward 0.5000",
        "1 step in 0:00  eval reward 0.5000 (step 1)",
    ]


def test_no_line_is_wider_than_eighty_columns():
    def run(progress: Progress, clock: Stopwatch) -> None:
        for step in range(1, 30):
            clock.time += 1e6
            many = {f"metric_{at}": 1e5 * at for at in range(20)}
            progress.step(step, {"loss": -1e200, "eval_loss": math.inf, **many})

    lines = shown(10**12, run)
    assert lines
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("total", [0, -3])
def test_a_run_of_unknown_length_is_shown_without_a_share(total: int):
    lines = shown(total, lambda progress, _: progress.step(7, {"loss": 1.0}))
    assert lines == ["step 7  loss 1.0000", "7 steps in 0:00  loss 1.0000 → 1.0000"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, None, "words", [1.0]])
def test_a_number_that_is_none_is_shown_as_it_is(value: Any):
    lines = shown(2, lambda progress, _: progress.step(1, {"loss": value, "tokens": value}))
    assert lines[0].startswith(("step 1/2  loss nan", "step 1/2  loss inf", "step 1/2  loss -inf"))


def test_control_characters_of_a_note_do_not_reach_the_terminal():
    assert shown(2, lambda progress, _: progress.note("a\033[2Jb\nc")) == ["a [2Jb", "c"]


def test_a_stream_without_unicode_gets_plain_characters():
    raw = io.BytesIO()
    with Progress(1, "läuft", stream=io.TextIOWrapper(raw, "ascii")) as progress:
        progress.step(1, {"loss": 1.0})
        progress.note("gespeichert: 日本")
    text = raw.getvalue().decode("ascii")
    assert "gespeichert: ??" in text
    assert "loss 1.0000 -> 1.0000" in text


class _Gone(io.StringIO):
    """A pipe whose reader leaves after some lines."""

    def __init__(self, lines: int, error: Exception) -> None:
        super().__init__()
        self._left = lines
        self._error = error

    def write(self, text: str) -> int:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return super().write(text)


@pytest.mark.parametrize("lines", [0, 1, 3])
@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(5, "I/O error"), ValueError("closed"), RuntimeError()]
)
def test_a_closed_pipe_ends_the_view_and_not_the_run(lines: int, error: Exception):
    stream = _Gone(lines, error)
    with Progress(9, "a run", stream=stream) as progress:
        for step in range(1, 10):
            progress.step(step, {"loss": 1.0})
            progress.note("saved")
    assert len(stream.getvalue().splitlines()) == lines


def test_a_closed_stream_ends_the_view_and_not_the_run():
    stream = io.StringIO()
    stream.close()
    with Progress(9, "a run", stream=stream) as progress:
        progress.step(1, {"loss": 1.0})
        progress.note("saved")


def test_what_the_run_raises_passes_through():
    with pytest.raises(KeyboardInterrupt), Progress(9, "a run", stream=io.StringIO()):
        raise KeyboardInterrupt
