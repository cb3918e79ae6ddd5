"""How long saved bytes lay where, by the hour. Pure: checkpoints and a window in, sums out.

Only checkpoints that still exist are known; what a deleted one took up before is not kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinkex.server.store.records import StoredCheckpoint

HOUR_S = 3600


class Stored(NamedTuple):
    """Gigabyte-hours of one hour, base model and project."""

    hour: int
    base_model: str
    project_id: str | None
    gigabyte_hours: float


def stored_hours(
    checkpoints: Iterable[StoredCheckpoint], start: float, end: float, now: float
) -> list[Stored]:
    """What lay in storage in every hour from `start` to `end`, which are full hours."""
    count = int((end - start) // HOUR_S)
    # Per group: bytes times parts of hours, and by how much what fills whole hours changes.
    groups: dict[tuple[str, str | None], tuple[list[float], list[int]]] = {}
    for checkpoint in checkpoints:
        gone = now if checkpoint.expires_at is None else min(now, checkpoint.expires_at)
        begin_h = (max(checkpoint.created_at, start) - start) / HOUR_S
        end_h = (min(gone, end) - start) / HOUR_S
        if begin_h < end_h:
            key = (checkpoint.base_model, checkpoint.project_id)
            parts, changes = groups.setdefault(key, ([0.0] * count, [0] * (count + 1)))
            _add(parts, changes, checkpoint.size_bytes, begin_h, end_h)
    return [
        Stored(int(start) + hour * HOUR_S, model, project, amount / 1e9)
        for (model, project), (parts, changes) in groups.items()
        for hour, amount in enumerate(_amounts(parts, changes))
        if amount > 0
    ]


def _add(parts: list[float], changes: list[int], size: int, begin_h: float, end_h: float) -> None:
    first, last = int(begin_h), int(end_h)
    if first == last:
        parts[first] += size * (end_h - begin_h)
        return
    parts[first] += size * (first + 1 - begin_h)
    if last < len(parts):
        parts[last] += size * (end_h - last)
    changes[first + 1] += size
    changes[last] -= size


def _amounts(parts: list[float], changes: list[int]) -> list[float]:
    amounts: list[float] = []
    whole = 0
    for part, change in zip(parts, changes, strict=False):
        whole += change
        amounts.append(part + whole)
    return amounts
