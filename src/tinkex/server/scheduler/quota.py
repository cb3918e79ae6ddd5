"""How many bytes of checkpoints a tenant may keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.errors import RequestFailedError

if TYPE_CHECKING:
    from tinkex.server.store.base import Store
    from tinkex.server.store.records import CheckpointKind, Model, StoredCheckpoint

_NAMED = 3


async def check_room(
    store: Store, owner: str, most: int, now: float, size_bytes: int, *, replaces: str = ""
) -> None:
    """Refuse to keep `size_bytes` more than fit, naming what could be deleted."""
    kept = [c for c in await store.checkpoints(owner=owner) if is_live(c, now)]
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


async def expected_size(store: Store, model: Model, kind: CheckpointKind) -> int:
    """What a checkpoint of a model will take: as much as the last one like it, if any."""
    kept = await store.checkpoints(owner=model.owner)
    shape = (kind, model.base_model, model.lora)
    return next((c.size_bytes for c in kept if (c.kind, c.base_model, c.lora) == shape), 0)


def is_live(checkpoint: StoredCheckpoint, now: float) -> bool:
    """Whether a checkpoint has not expired."""
    return checkpoint.expires_at is None or checkpoint.expires_at > now
