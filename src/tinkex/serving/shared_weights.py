"""Whether the nodes of a cluster keep weights at one place: each leaves a mark there when it joins.

A node writes its own mark, and then looks for those of the nodes that joined before it. So it finds
a place that it cannot use, and one that the others do not use, before it is given any work.
"""

from __future__ import annotations

import tempfile
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio.to_thread

from tinkex.engine.checkpoints.remote_files import open_saved
from tinkex.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.clock import Clock
    from tinkex.engine.checkpoints.saved_files import SavedFiles
    from tinkex.server.store.ownership import Membership, Node, Ownership

# A node that joined just before has written its mark within so many leases.
_LEASES: Final = 1.0
_LOOK_AGAIN_S: Final = 0.2
_CACHE_BYTES: Final = 1 << 20


async def check_shared(
    ownership: Ownership, membership: Membership, place: str, lease_s: float, clock: Clock
) -> None:
    """Raise `StorageError` if this node cannot use the place, or if other nodes use another."""
    with tempfile.TemporaryDirectory() as folder:
        # In a thread: the import of an object store's library takes seconds.
        opened = partial(open_saved, Path(folder), place, _CACHE_BYTES)
        files = await anyio.to_thread.run_sync(opened)
        try:
            await anyio.to_thread.run_sync(_leave_mark, files, membership)
            end = clock.now() + _LEASES * lease_s
            while missing := await _missing(files, membership, await ownership.nodes()):
                if clock.now() >= end:
                    raise _not_shared(missing, place)
                await clock.sleep(_LOOK_AGAIN_S)
        finally:
            await anyio.to_thread.run_sync(files.close)


def _leave_mark(files: SavedFiles, membership: Membership) -> None:
    text = membership.node.node_id.encode()
    files.put(_mark(membership, membership.node), lambda path: path.write_bytes(text), len(text))


async def _missing(
    files: SavedFiles, membership: Membership, nodes: Sequence[Node]
) -> Sequence[str]:
    """The names of nodes that joined before this one and have left no mark here."""
    earlier = [
        node
        for node in nodes
        if node.role == "full" and node.serving and node.number < membership.node.number
    ]
    look = partial(_without_mark, files, membership, earlier)
    return await anyio.to_thread.run_sync(look)


def _without_mark(
    files: SavedFiles, membership: Membership, nodes: Sequence[Node]
) -> Sequence[str]:
    missing: list[str] = []
    for node in nodes:
        try:
            with files.open(_mark(membership, node)):
                pass
        except FileNotFoundError:
            missing.append(node.name)
    return missing


def _mark(membership: Membership, node: Node) -> str:
    """The location of a node's mark; other clusters may use the same place."""
    return f"cluster/{sha256(membership.secret).hexdigest()[:16]}/{node.name}"


def _not_shared(names: Sequence[str], place: str) -> StorageError:
    shown = f"{place.partition('://')[0]}://…" if "@" in place else place
    error = StorageError(
        f"Node {names[0]} of this cluster keeps its weights elsewhere: its mark is not at {shown}. "
        "Give all nodes the same `--artifacts`: an object store, or a folder that all of them "
        "mount.",
        shown,
    )
    error.retryable = False
    return error
