"""How many bytes of checkpoints a tenant may keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.errors import RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinkex.server.store.records import CheckpointKind, Model, StoredCheckpoint

_NAMED = 3


def check_room(
    checkpoints: Iterable[StoredCheckpoint],
    most: int,
    now: float,
    size_bytes: int,
    *,
    replaces: str = "",
) -> None:
    """Refuse to keep `size_bytes` more than fit a tenant with these checkpoints.

    Names what could be deleted.
    """
    kept = [c for c in checkpoints if is_live(c, now)]
    used = sum(c.size_bytes for c in kept if c.path != replaces)
    if used + size_bytes <= most and used < most:
        return
    largest = sorted(kept, key=lambda c: (-c.size_bytes, c.created_at))[:_NAMED]
    named = ", ".join(f"{c.path} ({c.size_bytes} bytes)" for c in largest)
    step = f"delete what you do not need, the largest first: {named}"
    raise RequestFailedError(
        f"your checkpoints take up {used} of the {most} bytes a tenant may keep here "
        f"(max_stored_bytes), so {max(most - used, 0)} more would fit; "
        f"{step if largest else 'ask whoever runs this server for more room'}",
        None,
        "user",
    )


def expected_size(
    checkpoints: Iterable[StoredCheckpoint], model: Model, kind: CheckpointKind
) -> int:
    """What a checkpoint of a model will take: as much as the newest one like it, if any."""
    shape = (kind, model.base_model, model.lora)
    return next((c.size_bytes for c in checkpoints if (c.kind, c.base_model, c.lora) == shape), 0)


def is_live(checkpoint: StoredCheckpoint, now: float) -> bool:
    """Whether a checkpoint has not expired."""
    return checkpoint.expires_at is None or checkpoint.expires_at > now
