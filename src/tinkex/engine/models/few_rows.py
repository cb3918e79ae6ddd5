"""Products of few rows with a small weight, by numpy, in the bits that torch gives them.

For such sizes numpy's library takes half the time of torch's, because it reads the weight where
it lies instead of bringing it into another order first. Nobody promises that two libraries agree
to the last bit. Both add up in the order of the inputs, torch's a number of them at a time; so
the ways in which it was seen to do that are tried, and without one that gives all bits of a trial
there is no product here.

Shapes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    Floats = NDArray[np.float32]

MOST: Final = 10**6
"""Up to so many multiplications numpy's library is the quicker one."""
_USUAL: Final = 192
"""How many inputs torch's library adds up at a time if there are many; few are cut in half."""
_TRIAL_ROWS: Final = (4, 8, 32)


class FewRows:
    """`x @ W.T`, adding up `step` inputs at a time."""

    def __init__(self, weight_IO: Floats, step: int) -> None:
        self._weight_IO = weight_IO
        self._cuts = [slice(start, start + step) for start in range(0, len(weight_IO), step)]

    @classmethod
    def of(cls, weight_OI: Tensor) -> Self | None:
        """The product with a float32 weight on the CPU, if there is one that gives torch's bits."""
        weight_IO = np.ascontiguousarray(weight_OI.numpy().T)
        inputs = len(weight_IO)
        for step in (inputs, -(-inputs // 2), _USUAL):
            found = cls(weight_IO, step)
            if found._agrees(weight_OI):
                return found
        return None

    def suits(self, rows: int) -> bool:
        """Whether it is the quicker way for so many rows."""
        return rows * self._weight_IO.size <= MOST

    def __call__(self, x_RI: Floats) -> Floats:
        """The product in fresh memory."""
        if len(self._cuts) == 1:
            return x_RI.dot(self._weight_IO)
        y_RO = np.empty((len(x_RI), self._weight_IO.shape[1]), np.float32)
        self.bound(x_RI, y_RO)()
        return y_RO

    def bound(self, x_RI: Floats, y_RO: Floats) -> Callable[[], object]:
        """What writes the product with whatever is in `x` to `y` when it is called."""
        parts = [(x_RI[:, cut], self._weight_IO[cut]) for cut in self._cuts]
        first = partial(np.dot, *parts[0], y_RO)
        if len(parts) == 1:
            return first
        more_RO = np.empty_like(y_RO)

        def product() -> None:
            first()
            for x_RS, weight_SO in parts[1:]:
                np.dot(x_RS, weight_SO, more_RO)
                np.add(y_RO, more_RO, y_RO)

        return product

    def _agrees(self, weight_OI: Tensor) -> bool:
        generator = torch.Generator().manual_seed(0)
        for rows in _TRIAL_ROWS:
            x_RI = torch.randn(rows, weight_OI.shape[1], generator=generator)
            expected_RO = torch.mm(x_RI, weight_OI.T).numpy()
            if not np.array_equal(self(x_RI.numpy()), expected_RO):
                return False
        return True
