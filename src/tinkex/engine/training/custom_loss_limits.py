"""How much work one uploaded loss may be, counted rather than timed.

A count is the same on every machine and in every repetition, so a run that is replayed after a
crash is refused exactly where it was refused before. One unit is about a nanosecond of one core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from torch import Tensor

from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_WORK: Final = 2**32
"""Units of work for all data of one operation, forward and backward pass together."""
STEP_WORK: Final = 2**14
"""What a node costs however small its values are: checking its size and calling torch."""
MAX_VALUES: Final = 20_000
"""How many JSON values the arguments of one graph may have."""

_SLOW: Final = {"sort": 16, "topk": 16, "median": 16, "cummax": 4, "cummin": 4, "lgamma": 16}


class EvaluationCost:
    """What the evaluations of one operation have cost so far."""

    def __init__(self) -> None:
        # Mutable state: units spent.
        self.spent = 0

    def spend(self, target: str, values: Sequence[Any]) -> None:
        """Count one call by the size of what goes in or comes out."""
        weight = _SLOW.get(target.rpartition(".")[2], 1)
        self.spent += STEP_WORK + weight * sum(tensor.numel() for tensor in tensors(values))
        if self.spent > MAX_WORK:
            raise InputError(
                f"is too much work: it passed {MAX_WORK} operations on single numbers; use fewer "
                "nodes or smaller values, or send less data per call"
            )


class Values:
    """Counts the JSON values of a graph's arguments."""

    def __init__(self) -> None:
        # Mutable state: how many there were.
        self._count = 0

    def add(self, value: Any, path: str) -> None:
        """Count a value and everything in it."""
        todo = [value]
        while todo:
            item = todo.pop()
            self._count += 1
            if self._count > MAX_VALUES:
                raise InputError(f"a graph's arguments may have {MAX_VALUES} values", path)
            if isinstance(item, list):
                todo += cast("list[Any]", item)[: MAX_VALUES + 1]
            elif isinstance(item, dict):
                todo += cast("dict[str, Any]", item).values()


def tensors(values: Sequence[Any]) -> list[Tensor]:
    """All tensors in values, lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors(cast("list[Any]", value))
    return found
