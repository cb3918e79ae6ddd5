"""How often something may happen: a bucket per name that fills up again by itself."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tinkex.clock import Clock

_MOST_NAMES = 4096


class Throttle:
    """Allows `per_s` on average and `burst` at once, for each name apart."""

    def __init__(self, clock: Clock, *, per_s: float, burst: float) -> None:
        self._clock = clock
        self._per_s = per_s
        self._burst = burst
        # Mutable state: (what is left, at which time) per name, longest unused first. A name that
        # is forgotten starts with a full bucket, which only helps it.
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, name: Hashable) -> float:
        """Take one; returns 0, or after how many seconds to try again."""
        now = self._clock.now()
        left, since = self._left.get(name, (self._burst, now))
        left = min(left + (now - since) * self._per_s, self._burst)
        wait_s = 0.0 if left >= 1 else (1 - left) / self._per_s if self._per_s > 0 else math.inf
        self._left[name] = (left if wait_s else left - 1, now)
        self._left.move_to_end(name)
        while len(self._left) > _MOST_NAMES:
            self._left.popitem(last=False)
        return wait_s
