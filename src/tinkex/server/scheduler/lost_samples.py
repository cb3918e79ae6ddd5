"""Samples that a restart lost, for clients that wait for many samples with one request.

Such a client asks for what has ended since a cursor, so it would wait for ever for a lost sample.
Therefore one small record per block of numbers says how far back unfinished samples reach. After a
restart, everything from there to the end of the last block is reported as ended: retrieving it
returns 410, and the client sends it again. Reporting too much does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from tinkex.server.store.ownership import claim_key

if TYPE_CHECKING:
    from tinkex.clock import Clock
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import Operation, StoredSampler

BLOCK = 256
# A copy of a sampling client numbers its requests in a block of its own.
CLONE_BLOCK = 1_000_000_000
_PER_S = 1 << 20


@dataclass(slots=True)
class _Client:
    """One copy of a sampling client, as far as this start of the server knows it."""

    blocks: set[int] = field(default_factory=set[int])
    new_blocks: set[int] = field(default_factory=set[int])
    unfinished: set[int] = field(default_factory=set[int])
    beginning: dict[int, anyio.Event] = field(default_factory=dict[int, anyio.Event])


class LostSamples:
    """Remembers which numbers were in use, and numbers completions anew with every start."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        # Cursors of this start begin here. Those of an earlier one are smaller, or beyond today if
        # the date was set back since: there are fewer than `_PER_S` completions in a second.
        self._first_cursor = int(clock.wall()) * _PER_S
        # Mutable state: what is known of the copies of every sampling client; and where cursors
        # begin for the keys that this node has taken over.
        self._clients: dict[str, dict[int, _Client]] = {}
        self._first_cursors: dict[str, int] = {}

    def __len__(self) -> int:
        """How many samplers are known."""
        return len(self._clients)

    def take_over(self, key: str, at: float) -> None:
        """Number the completions of a key's samplers anew from a time on: it has a new owner."""
        self._first_cursors[key] = int(at * _PER_S)

    def hand_over(self, key: str) -> None:
        """Another node owns a key."""
        self._first_cursors.pop(key, None)

    def _first(self, sampler: StoredSampler) -> int:
        return self._first_cursors.get(claim_key(sampler), self._first_cursor)

    def position(self, cursor: int, sampler: StoredSampler) -> int:
        """How many completions a client has seen since the start."""
        return cursor - self._first(sampler) if self._is_recent(cursor, sampler) else 0

    def cursor(self, position: int, sampler: StoredSampler) -> int:
        """The cursor that the client gets for it."""
        return self._first(sampler) + position

    async def begin(self, op: Operation) -> None:
        """Record the block of a sample's number; called before the sample is accepted."""
        block = op.seq_id // BLOCK
        client = self._client(op.sampler_id or "", op.clone)
        while block not in client.blocks:
            beginning = client.beginning.get(block)
            if beginning is None:
                await self._begin(client, block, op)
            else:
                await beginning.wait()

    async def _begin(self, client: _Client, block: int, op: Operation) -> None:
        """Write the record once for the many samples that begin a block together."""
        begun = client.beginning[block] = anyio.Event()
        try:
            key = _key(op.sampler_id or "", block)
            if await self._store.recall(op.owner, key) is None:
                client.new_blocks.add(block)
                # From the block's first number on: requests overtake each other.
                low = min((block * BLOCK, *client.unfinished))
                await self._store.remember(op.owner, key, str(low), session_id=op.session_id)
            client.blocks.add(block)
        finally:
            del client.beginning[block]
            begun.set()

    def began(self, op: Operation) -> None:
        """A sample was accepted."""
        self._client(op.sampler_id or "", op.clone).unfinished.add(op.seq_id)

    def ended(self, op: Operation) -> None:
        """A sample has its outcome."""
        client = self._clients.get(op.sampler_id or "", {}).get(op.clone)
        if client is not None:
            client.unfinished.discard(op.seq_id)

    def forget(self, sampler_id: str) -> None:
        """A sampler's session is over."""
        self._clients.pop(sampler_id, None)

    async def since(self, cursor: int, sampler: StoredSampler, clone: int) -> list[str]:
        """The requests that a client may still wait for and that nothing runs.

        None for a client with a cursor of this start: it got them before.
        """
        if self._is_recent(cursor, sampler):
            return []
        # Asking leaves nothing behind: anybody may ask, for any copy, also after the session's end.
        client = self._clients.get(sampler.sampler_id, {}).get(clone) or _Client()
        first = clone * CLONE_BLOCK // BLOCK
        last = await self._last_block(sampler, first, client.new_blocks)
        if last is None:
            return []
        # The one before as well: requests overtake each other.
        lows = [await self._low(sampler, block) for block in (last, max(last - 1, first))]
        numbers = set(range(min(lows), (last + 1) * BLOCK)) - client.unfinished
        return [f"{sampler.sampler_id}:{number}" for number in sorted(numbers)]

    def _is_recent(self, cursor: int, sampler: StoredSampler) -> bool:
        """Whether a cursor is one of this start, or of this owner."""
        return self._first(sampler) <= cursor <= (int(self._clock.wall()) + 1) * _PER_S

    def _client(self, sampler_id: str, clone: int) -> _Client:
        return self._clients.setdefault(sampler_id, {}).setdefault(clone, _Client())

    async def _low(self, sampler: StoredSampler, block: int) -> int:
        low = await self._store.recall(sampler.owner, _key(sampler.sampler_id, block))
        return block * BLOCK if low is None else int(low)

    async def _last_block(self, sampler: StoredSampler, first: int, new: set[int]) -> int | None:
        """The last block that was begun before this start; blocks are begun in order."""

        async def begun(block: int) -> bool:
            if block in new:
                return False
            key = _key(sampler.sampler_id, block)
            return await self._store.recall(sampler.owner, key) is not None

        if not await begun(first):
            return None
        low, step = first, 1
        while await begun(low + step):
            low, step = low + step, step * 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if await begun(middle) else (low, middle)
        return low


def _key(sampler_id: str, block: int) -> str:
    return f"samples:{sampler_id}:{block}"
