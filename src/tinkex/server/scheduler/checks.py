"""What a save or a load refuses, each with what to do instead."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tinkex.errors import RequestFailedError
from tinkex.server.scheduler.quota import is_live

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.server.store.records import StoredCheckpoint

MIN_TTL_S = 3600
MAX_TTL_S = 10 * 365 * 24 * 3600

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,127}")


def failure(message: str) -> RequestFailedError:
    """The caller's own mistake, found while running."""
    return RequestFailedError(message, None, "user")


def check_name(name: str) -> None:
    """Refuse checkpoint names that could not be a path's last part."""
    if not _NAME.fullmatch(name):
        raise failure(
            f"checkpoint name {name!r} is not possible: use up to 128 letters, digits, "
            "dots, dashes and underscores, starting with a letter or digit"
        )


def check_ttl(ttl_seconds: int | None) -> None:
    """Refuse lifetimes outside an hour to ten years."""
    if ttl_seconds is not None and not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise failure(
            f"ttl_seconds must lie between {MIN_TTL_S} (an hour) and {MAX_TTL_S} (ten years), "
            f"not {ttl_seconds}; leave it out to keep the checkpoint"
        )


def is_readable(checkpoint: StoredCheckpoint, owners: Sequence[str], now: float) -> bool:
    """Whether a checkpoint is there for these owners: published or theirs, and not expired."""
    return (checkpoint.public or checkpoint.owner in owners) and is_live(checkpoint, now)


def check_sampleable(checkpoint: StoredCheckpoint) -> None:
    """Refuse what is encrypted: who may read its files is decided by their key."""
    if checkpoint.age_recipients is not None:
        raise failure(
            f"{checkpoint.path} is an encrypted export, which is only downloaded; sample from what "
            "save_weights_for_sampler returned"
        )


def check_loadable(checkpoint: StoredCheckpoint, *, optimizer: bool) -> None:
    """Refuse what cannot be trained from, naming the call that makes what can."""
    if checkpoint.kind == "external_weights":
        raise failure(f"{checkpoint.path} is an export; train from what save_state returned")
    if optimizer and not checkpoint.has_optimizer:
        raise failure(
            f"{checkpoint.path} has no optimizer state; load it without the optimizer, or save "
            "with save_state"
        )
