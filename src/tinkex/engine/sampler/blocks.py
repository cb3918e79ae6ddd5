"""Which blocks of the key/value cache are free, in use, or kept for the next prompt.

A block holds the keys and values of `block_size` consecutive tokens. A full block may be named by a
hash of the weights' version, the request's salt and every token up to its end. Sequences with the
same prefix share named blocks, which stay in the cache after their last user until the space is
needed (LRU). Only full blocks are named, so a shared block is never written again and nothing is
copied. No tensors here.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_KEY_BYTES = 16


def root_key(version: str, salt: str = "") -> bytes:
    """The parent key of the first block, for one version of the weights and one salt."""
    # With the length of the version, so that no other pair gives the same text.
    named = f"{len(version)}:{version}{salt}"
    return blake2b(named.encode(), digest_size=_KEY_BYTES).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full block, given the name of the one before it.

    A digest rather than Python's `hash`: a collision would hand one tenant another's text.
    """
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=_KEY_BYTES).digest()


class BlockPool:
    """Reference counts over a fixed number of blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"no room in {num_blocks} blocks of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # All mutable state. Every block is in exactly one place: unnamed and unused in
        # `_free`, named and unused in `_idle` (oldest first), or used with `_users` > 0.
        self._users = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """How many blocks `take` could hand out now."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """The number of blocks for a number of tokens."""
        return -(-tokens // self.block_size)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `keys`; changes nothing."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks `share` would take from `available`."""
        return sum(1 for block in blocks if self._users[block] == 0)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to blocks that `find` returned."""
        for block in blocks:
            if self._users[block] == 0:
                del self._idle[block]
            self._users[block] += 1

    def take(self, count: int) -> list[int]:
        """Allocate `count` unnamed blocks, evicting idle ones if necessary."""
        if count > self.available:
            raise ValueError(f"{count} blocks were asked for, {self.available} are available")
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._users[block] = 1
        return taken

    def name(self, block: int, key: bytes) -> None:
        """Name a full block; of two blocks with equal content the first keeps the name."""
        if self._users[block] == 0:
            raise ValueError(f"block {block} is not in use")
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a user from blocks, given in token order."""
        # In reverse, so that the end of a prefix is evicted before its beginning.
        for block in reversed(blocks):
            if self._users[block] == 0:
                raise ValueError(f"block {block} was released twice")
            self._users[block] -= 1
            if self._users[block] == 0:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._by_key[key]
        self._keys[block] = None
        return block

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless `held` lists exactly the users of every block."""
        users = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                users[block] += 1
        assert users == self._users, "reference counts differ from the actual users"
        free, idle = set(self._free), set(self._idle)
        used = {block for block, count in enumerate(users) if count}
        assert len(free) == len(self._free), "a block is free twice"
        places = len(free) + len(idle) + len(used)
        assert places == len(free | idle | used), "a block is in two places"
        assert places == self.num_blocks, "a block leaked"
        named = {block: key for block, key in enumerate(self._keys) if key is not None}
        assert {key: block for block, key in named.items()} == self._by_key, "names disagree"
        assert idle <= named.keys(), "an idle block has no name"
        assert not free & named.keys(), "a free block still has a name"
