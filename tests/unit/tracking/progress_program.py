"""A run that only shows itself: one step for each line of standard input.

`note` is a note, `stage` what is done before the first step.

python progress_program.py TOTAL [--without-rich] [--chart] [--ignore-hangup]
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys

from tinkex.tracking.progress import Progress

if "--without-rich" in sys.argv:
    sys.modules["rich"] = sys.modules["rich.console"] = None  # pyright: ignore[reportArgumentType] - what a missing package looks like

if "--ignore-hangup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


class _EverySecond:
    """A clock on which every look takes a second, so that every step is drawn."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 1.0
        return self._now

    def wall(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here waits")


def main(total: int) -> None:
    """Every fifth step is evaluated; the seventh has no number."""
    chart = "--chart" in sys.argv
    with Progress(total, "sft a model", clock=_EverySecond(), chart=chart) as progress:
        step = 0
        for line in sys.stdin:
            if line.strip() == "note":
                progress.note(f"saved tinker://run/weights/step-{step}")
                continue
            if line.strip() == "stage":
                progress.stage("loading a model")
                continue
            if line.strip() == "print":
                sys.stderr.write("somebody else has something to say\n")
                continue
            step += 1
            values = {"loss": math.nan if step == 7 else 3.0 / step, "tokens": 512}
            progress.step(step, values | ({"eval_loss": 0.5} if step % 5 == 0 else {}))
    with contextlib.suppress(OSError):  # nobody may be there any more to hear it
        sys.stderr.write(f"the run made {step} steps\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
