"""Where the loop's news goes: to the run's folder, to whoever watches, and on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.loops.run_folder import Checkpoint, RunFolder
    from tinkex.tracking.sinks import Sink


class Display(Protocol):
    """Shows a run to a person; `tinkex.tracking.progress.Progress` is the usual one."""

    def stage(self, text: str) -> None: ...

    def step(self, step: int, values: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...


class Writer:
    """Writes down what the loop tells, in the order that makes it safe to be killed."""

    def __init__(self, place: RunFolder, sinks: Sink, display: Display) -> None:
        self._place = place
        self._sinks = sinks
        self._display = display

    def stage(self, text: str) -> None:
        """What is being done now."""
        self._display.stage(text)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """A step's numbers; step 0 is the evaluation of what has not been trained yet."""
        self._sinks.record(step, values)
        if step > 0:
            self._display.step(step, values)
        else:
            told = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            self.note(f"before training: {told}")

    def saved(self, checkpoint: Checkpoint) -> None:
        """A save, of which every step has been told before."""
        self._place.add(checkpoint)
        self.note(f"saved after step {checkpoint.step}")

    def note(self, text: str) -> None:
        """A line for people."""
        self._display.note(text)
