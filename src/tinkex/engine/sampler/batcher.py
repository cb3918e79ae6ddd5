"""Which sequences run next, and how many of their tokens.

Each pass takes the sequences that decode first, so that running streams never wait for a
long prompt, and fills the rest of its token budget with prompts, in pieces where needed.
When blocks run out, the running sequence with the last turn is preempted and recomputed later. The
running sequence with the first turn always makes progress, and no sequence starts before a waiting
one with an earlier turn, so every sequence ends. No tensors.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tinkex.engine.sampler.blocks import BlockPool
    from tinkex.engine.sampler.sequence import TokenSequence

_turn = attrgetter("turn")


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens `start` to `stop` of one sequence, for one pass."""

    sequence: TokenSequence
    start: int
    stop: int

    @property
    def reaches_end(self) -> bool:
        """Whether the last row of the piece predicts the next token."""
        return self.stop == len(self.sequence.tokens)

    def __len__(self) -> int:
        return self.stop - self.start


class Batcher:
    """Continuous batching over one pool of blocks.

    `fits` tells whether the weights of some versions fit on the device together.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_tokens: int,
        max_sequences: int,
        fits: Callable[[set[str]], bool] | None = None,
    ) -> None:
        if not 1 <= max_sequences <= max_tokens:
            # Otherwise the decoding sequences could use up every pass and no prompt would move.
            raise ValueError(f"a pass of {max_tokens} tokens cannot hold {max_sequences} sequences")
        self.pool = pool
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self._fits = fits
        self.preemptions = 0
        # All mutable state: both lists by turn, and the sequence that is computing each block.
        self._running: list[TokenSequence] = []
        self._waiting: list[TokenSequence] = []
        self._filling: dict[bytes, TokenSequence] = {}

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)

    def __iter__(self) -> Iterator[TokenSequence]:
        yield from self._running
        yield from self._waiting

    def add(self, sequence: TokenSequence) -> None:
        """Add a sequence; the caller has checked that it fits into the empty pool."""
        insort(self._waiting, sequence, key=_turn)

    def plan(self) -> list[Piece]:
        """Choose the next pass and give its sequences the blocks they need.

        Report each piece with `done` afterwards, or drop its sequence with `remove`.
        """
        pieces: dict[TokenSequence, Piece] = {}
        budget = self.max_tokens
        decoding: list[TokenSequence] = []
        prefilling: list[TokenSequence] = []
        for sequence in self._running:
            (decoding if sequence.pending == 1 else prefilling).append(sequence)
        for sequence in decoding + prefilling:
            if budget == 0 or not sequence.running:  # it may just have been preempted
                continue
            start = sequence.computed
            stop = start + min(sequence.pending, budget)
            if stop > len(sequence.blocks) * self.pool.block_size:
                self._make_room(sequence, stop, pieces)
            if sequence.running:
                pieces[sequence] = Piece(sequence, start, stop)
                budget -= stop - start
        self._admit(pieces, budget)
        return list(pieces.values())

    def ahead(self, sequences: Sequence[TokenSequence]) -> list[Piece] | None:
        """The pieces after the next token of each of these sequences; all have been `done`.

        Allocates their blocks; None where there are too few.
        """
        size = self.pool.block_size
        full = [s for s in sequences if s.computed == len(s.blocks) * size]
        if len(full) > self.pool.available:
            return None
        for sequence in full:
            sequence.blocks += self.pool.take(1)
        return [Piece(s, s.computed, s.computed + 1) for s in sequences]

    def done(self, piece: Piece) -> None:
        """Record that a piece's keys and values are in the cache; full blocks become shareable."""
        sequence = piece.sequence
        size = self.pool.block_size
        if sequence.computed // size == piece.stop // size:
            sequence.computed = piece.stop  # no block became full
            return
        keys = sequence.keys(size)
        for i in range(sequence.computed // size, piece.stop // size):
            self.pool.name(sequence.blocks[i], keys[i])
            if self._filling.get(keys[i]) is sequence:
                del self._filling[keys[i]]
        sequence.computed = piece.stop

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a finished or cancelled sequence and free its blocks."""
        if sequence.running:
            self._stop(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def check(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        self.pool.check(sequence.blocks for sequence in self._running)
        assert all(not s.blocks and s.computed == 0 and not s.running for s in self._waiting)
        assert sorted(self._running, key=_turn) == self._running
        assert sorted(self._waiting, key=_turn) == self._waiting
        assert all(sequence.running for sequence in self._running)
        assert all(owner.running for owner in self._filling.values())

    def _make_room(
        self, sequence: TokenSequence, tokens: int, pieces: dict[TokenSequence, Piece]
    ) -> None:
        """Give `sequence` blocks for its first `tokens`.

        Preempts the sequences with the last turns, if necessary this one.
        """
        missing = self.pool.blocks_for(tokens) - len(sequence.blocks)
        while missing > self.pool.available:
            victim = self._running[-1]
            pieces.pop(victim, None)
            self._preempt(victim)
            if victim is sequence:
                return
        sequence.blocks += self.pool.take(missing)

    def _preempt(self, sequence: TokenSequence) -> None:
        self.preemptions += 1
        self._stop(sequence)
        insort(self._waiting, sequence, key=_turn)

    def _stop(self, sequence: TokenSequence) -> None:
        self._running.remove(sequence)
        sequence.running = False
        for key in sequence.keys(self.pool.block_size):
            if self._filling.get(key) is sequence:
                del self._filling[key]
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

    def _admit(self, pieces: dict[TokenSequence, Piece], budget: int) -> None:
        """Start waiting sequences in turn, until one does not fit."""
        # Copied, because starting a sequence removes it from the list; empty when none can start.
        waiting = list(self._waiting) if budget and len(self._running) < self.max_sequences else ()
        for sequence in waiting:
            if budget == 0 or len(self._running) >= self.max_sequences:
                return
            if sequence.waits_for in self._filling or sequence.held_back:
                continue
            if not self._has_room(sequence.version):
                return
            found = self._shared_prefix(sequence)
            if sequence.waits_for is not None:
                continue
            # Running sequences have their blocks already, unless the budget was used up.
            if self._needs(sequence, found) > self.pool.available:
                return
            self._start(sequence, found)
            count = min(sequence.pending, budget)
            stop = sequence.computed + count
            sequence.blocks += self.pool.take(self.pool.blocks_for(stop) - len(sequence.blocks))
            pieces[sequence] = Piece(sequence, sequence.computed, stop)
            budget -= count

    def _has_room(self, version: str) -> bool:
        """Whether the weights of a version fit with the running ones; a single one always fits."""
        if self._fits is None:
            return True
        running = {sequence.version for sequence in self._running}
        return not running or version in running or self._fits(running | {version})

    def _shared_prefix(self, sequence: TokenSequence) -> list[int]:
        """The cached prefix; sets `waits_for` when another sequence computes the next block."""
        # At least one token is left to compute: its row predicts the next.
        most = min(sequence.reusable, len(sequence.tokens) - 1) // self.pool.block_size
        keys = sequence.keys(self.pool.block_size)[:most]
        found = self.pool.find(keys)
        following = keys[len(found)] if len(found) < most else None
        sequence.waits_for = following if following in self._filling else None
        return found

    def _needs(self, sequence: TokenSequence, found: list[int]) -> int:
        """Blocks that its tokens so far, and one more, would take from the pool."""
        tokens = min(len(sequence.tokens) + 1, sequence.cache_length)
        return self.pool.blocks_for(tokens) - len(found) + self.pool.idle_among(found)

    def _start(self, sequence: TokenSequence, found: list[int]) -> None:
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=_turn)
        sequence.running = True
        self.pool.share(found)
        sequence.blocks = list(found)
        sequence.computed = len(found) * self.pool.block_size
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, sequence.prompt_length)
        for key in sequence.keys(self.pool.block_size)[len(found) :]:
            self._filling.setdefault(key, sequence)
