"""The progress of a run: a live view on a terminal, plain lines in a pipe.

The training loop calls `step` and `note`. An error in showing them (a closed pipe, a terminal of
two columns, a value that is not a number) ends the view, never the run.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Self

from tinkex.clock import SystemClock
from tinkex.tracking.layout import cut, summary
from tinkex.tracking.state import RunState
from tinkex.tracking.views import PLAIN_WIDTH, open_view, speaks_unicode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TextIO

    from tinkex.clock import Clock
    from tinkex.tracking.views import LiveView, PlainView

logger = logging.getLogger(__name__)

_LONGEST_NOTE = 1000


class Progress:
    """Use it as `with Progress(300, "sft SmolLM2") as progress:`; then `progress.step(1, {...})`.

    `total` is the number of steps (0: unknown), `done` the number of steps before a resumed run,
    `unit` the name of a step, `stream` standard error by default. `chart` adds a plot below where
    there is space.
    """

    def __init__(
        self,
        total: int,
        title: str,
        *,
        done: int = 0,
        unit: str = "step",
        stream: TextIO | None = None,
        clock: Clock | None = None,
        chart: bool = False,
    ) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock or SystemClock()
        self._chart = chart
        self._state = RunState(total, title, done, self._clock.now(), unit=unit)
        # Mutable: None outside the context, and once the view has failed.
        self._view: LiveView | PlainView | None = None

    def __enter__(self) -> Self:
        self._guard(self._open)
        return self

    def __exit__(self, *_: object) -> None:
        self._guard(self._close)
        self._view = None

    def stage(self, text: str) -> None:
        """Show the current activity until the first step."""

        def show() -> None:
            self._state.stage = text
            if self._view is not None:
                self._view.stage(text)
                self._draw()

        self._guard(show)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show the metrics of a step; names as in `metrics.jsonl`."""

        def show() -> None:
            self._state.add(step, values, self._clock.now())
            self._draw()

        self._guard(show)

    def note(self, text: str) -> None:
        """Print a line that stays, such as where a checkpoint was saved."""

        def show() -> None:
            if self._view is not None:
                for line in text.splitlines():
                    self._view.line(cut(line, _LONGEST_NOTE))
                self._draw()

        self._guard(show)

    def _open(self) -> None:
        self._view = open_view(self._stream, chart=self._chart)
        self._draw()

    def _draw(self) -> None:
        if self._view is not None:
            self._view.draw(self._state, self._clock.now())

    def _close(self) -> None:
        if self._view is None:
            return
        self._view.close()
        if self._state.measured:
            unicode = speaks_unicode(self._stream)
            self._view.line(summary(self._state, PLAIN_WIDTH, unicode=unicode))

    def _guard(self, show: Callable[[], None]) -> None:
        try:
            show()
        except Exception:  # no error of the view may end the run
            self._view = None
            logger.debug("The view of the run is gone", exc_info=True)
