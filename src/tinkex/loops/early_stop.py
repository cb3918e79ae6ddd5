"""When evaluations stop getting better."""

from __future__ import annotations

import math


class Patience:
    """Watches one number of every evaluation; without a limit it only knows which was best."""

    def __init__(self, limit: int | None, *, higher_is_better: bool) -> None:
        self.limit = limit
        self._sign = -1.0 if higher_is_better else 1.0
        # Mutable state: the best evaluation, and how many have come since.
        self.best_step: int | None = None
        self._best = math.inf
        self._since = 0

    def see(self, step: int, value: float) -> bool:
        """Take in an evaluation; says whether it is the best so far."""
        if self._sign * value < self._best:
            self._best, self.best_step, self._since = self._sign * value, step, 0
            return True
        self._since += 1
        return False

    @property
    def exhausted(self) -> bool:
        """Whether as many evaluations as are allowed were no better than the best."""
        return self.limit is not None and self._since >= self.limit
