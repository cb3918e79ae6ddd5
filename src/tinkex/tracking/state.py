"""The state of a run: its latest metrics, its speed and the remaining time."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# The speed is measured over the last steps, which predict the next ones best.
_RECENT = 32
_TOKENS_PER_S = "tokens_per_s"


class RunState:
    """What the views show. All times are seconds of one clock; `unit` is the name of a step."""

    def __init__(
        self, total: int, title: str, done: int, now: float, *, unit: str = "step"
    ) -> None:
        self.total = max(total, 0)
        self.title = title
        self.unit = unit
        # Mutable: the current step, the newest value of each metric with its step, all rows, and
        # the activity before the first step.
        self.stage = "starting"
        self.step = self.started_at = max(done, 0)
        self.latest: dict[str, tuple[int, float]] = {}
        self.measured: list[dict[str, float]] = []
        self._begun = self._now = now
        self._tokens = 0.0
        self._marks = deque([(now, self.step, 0.0)], maxlen=_RECENT)

    def add(self, step: int, values: Mapping[str, float], now: float) -> None:
        """Add the metrics of a step."""
        numbers = {name: _number(value) for name, value in values.items()}
        self.step, self._now = step, now
        self.latest.update({name: (step, value) for name, value in numbers.items()})
        if self.measured and step <= self.measured[-1]["step"]:  # resumed from an earlier step
            self.measured = [row for row in self.measured if row["step"] < step]
        self.measured.append({"step": float(step), **numbers})
        self._tokens += numbers.get("tokens", 0.0)
        self._marks.append((now, step, self._tokens))

    def value(self, name: str) -> float | None:
        """The newest value of a metric."""
        return self.latest[name][1] if name in self.latest else None

    @property
    def share(self) -> float:
        """The completed share, from 0 to 1."""
        return min(max(self.step / self.total, 0.0), 1.0) if self.total else 0.0

    @property
    def is_last(self) -> bool:
        """Whether the last step is done."""
        return self.total > 0 and self.step >= self.total

    @property
    def elapsed_s(self) -> float:
        """From the beginning to the latest step."""
        return self._now - self._begun

    @property
    def left_s(self) -> float | None:
        """The remaining time at the speed of the last steps."""
        seconds, steps, _ = self._recently()
        if steps <= 0 or not self.total:
            return None
        return max(self.total - self.step, 0) * seconds / steps

    @property
    def tokens_per_s(self) -> float | None:
        """Over the last steps: results arrive in groups, so the speed of one step means little."""
        seconds, _, tokens = self._recently()
        known = tokens > 0 and math.isfinite(tokens) and seconds > 0
        return tokens / seconds if known else self.value(_TOKENS_PER_S)

    @property
    def mean_tokens_per_s(self) -> float | None:
        """Over the whole run."""
        known = self._tokens > 0 and math.isfinite(self._tokens) and self.elapsed_s > 0
        return self._tokens / self.elapsed_s if known else None

    def _recently(self) -> tuple[float, int, float]:
        """Seconds, steps and tokens of the last steps."""
        # Without the first step, which also loads, compiles and warms up.
        first = self._marks[1 if len(self._marks) > 2 else 0]
        last = self._marks[-1]
        return last[0] - first[0], last[1] - first[1], last[2] - first[2]


def _number(value: object) -> float:
    """The value as a float; NaN for anything else."""
    try:
        return float(value)  # pyright: ignore[reportArgumentType] - anything with __float__, or refused
    except (TypeError, ValueError, OverflowError):
        return math.nan
