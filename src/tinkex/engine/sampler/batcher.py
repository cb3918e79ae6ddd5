"""Which sequences run next, and how many of their tokens.

Each pass takes the sequences that decode first, so that running streams never wait for a
long prompt, and fills the rest of its token budget with prompts, in pieces where needed. Owners
with prompts share that budget equally, so that no owner waits for the long prompts of another; the
prompts of one owner are computed in turn, because sharing would delay the first and speed up none.

When blocks run out, the running sequence with the last turn is preempted and recomputed later. The
running sequence with the first turn always makes progress, and a sequence that starts before a
waiting one with an earlier turn leaves room for that one, so every sequence ends. No tensors.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tinkex.engine.sampler.blocks import BlockPool
    from tinkex.engine.sampler.sequence import TokenSequence

_turn = attrgetter("turn")

# Smaller pieces would not use the device well: every piece reads all of its sequence's cache.
_MIN_SHARE = 64

Start = Literal["started", "waits", "no room"]


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

    `fits` tells whether the weights of some versions fit on the device together. An owner's share
    of a pass is never less than `min_share` tokens, unless it wants less; when there are too many
    owners, the first in turn has a share, and those that want least have the others.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_tokens: int,
        max_sequences: int,
        min_share: int = _MIN_SHARE,
        fits: Callable[[set[str]], bool] | None = None,
    ) -> None:
        if not 1 <= max_sequences <= max_tokens:
            # Otherwise the decoding sequences could use up every pass and no prompt would move.
            raise ValueError(f"a pass of {max_tokens} tokens cannot hold {max_sequences} sequences")
        self.pool = pool
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self._min_share = min_share
        self._fits = fits
        self.preemptions = 0
        # All mutable state: the sequences by turn, those that wait by owner, and the sequence that
        # is computing each block.
        self._running: list[TokenSequence] = []
        self._waiting: dict[str, list[TokenSequence]] = {}
        self._filling: dict[bytes, TokenSequence] = {}

    def __len__(self) -> int:
        return len(self._running) + sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[TokenSequence]:
        yield from self._running
        for queue in self._waiting.values():
            yield from queue

    def add(self, sequence: TokenSequence) -> None:
        """Add a sequence; the caller has checked that it fits into the empty pool."""
        insort(self._waiting.setdefault(sequence.owner, []), sequence, key=_turn)

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
        for sequence in decoding:  # not by `_advance`: this is done for each token of each sequence
            if budget == 0 or not sequence.running:  # it may just have been preempted
                continue
            start = sequence.computed
            if start + 1 > len(sequence.blocks) * self.pool.block_size:
                self._make_room(sequence, start + 1, pieces)
            if sequence.running:
                pieces[sequence] = Piece(sequence, start, start + 1)
                budget -= 1
        shared = self._share(prefilling, budget, pieces)
        if shared < budget:  # it may have started some
            prefilling = [one for one in self._running if one.pending > 1]
        budget = shared
        for sequence in prefilling:  # all of it with one owner, or what no share could use: in turn
            budget -= self._advance(sequence, budget, pieces)
        self._admit(budget, pieces)
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
        elif sequence in self._waiting.get(sequence.owner, ()):
            self._leave_queue(sequence)

    def check(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        self.pool.check(sequence.blocks for sequence in self._running)
        assert sorted(self._running, key=_turn) == self._running
        for owner, queue in self._waiting.items():
            assert all(not s.blocks and s.computed == 0 and not s.running for s in queue)
            assert all(s.owner == owner for s in queue)
            assert queue
            assert sorted(queue, key=_turn) == queue
        assert all(sequence.running for sequence in self._running)
        assert all(owner.running for owner in self._filling.values())

    def _advance(
        self, sequence: TokenSequence, most: int, pieces: dict[TokenSequence, Piece]
    ) -> int:
        """Add up to `most` tokens of a running sequence to the pass; return how many."""
        planned = pieces.get(sequence)
        start = sequence.computed if planned is None else planned.stop
        stop = min(len(sequence.tokens), start + most)
        if stop == start or not sequence.running:  # it may just have been preempted
            return 0
        if stop > len(sequence.blocks) * self.pool.block_size:
            self._make_room(sequence, stop, pieces)
        if not sequence.running:
            return 0
        pieces[sequence] = Piece(sequence, sequence.computed, stop)
        return stop - start

    def _share(
        self, prefilling: list[TokenSequence], budget: int, pieces: dict[TokenSequence, Piece]
    ) -> int:
        """Split a budget between the owners that have prompts, if several; return what is left.

        Owners that want little come first, and what they leave is split between the others: so all
        get the same, or all they want. Something is kept for the oldest prompt meanwhile.
        """
        queues = self._queues(prefilling) if budget else {}
        if len(queues) < 2:
            return budget
        wants = {owner: _wanted(queue, budget) for owner, queue in queues.items()}
        oldest = min(prefilling or [queue[0] for queue in queues.values()], key=_turn).owner
        kept = min(wants[oldest], self._min_share)
        first = self._first_waiting()
        owners = sorted(queues, key=lambda owner: (wants[owner], queues[owner][0].turn))
        for place, owner in enumerate(owners):
            kept = 0 if owner == oldest else kept
            share = max(budget // (len(owners) - place), self._min_share)
            share = min(share, wants[owner], budget - kept)
            if share < min(wants[owner], self._min_share) and owner != oldest:
                break  # too little for the others, too, which want more
            for sequence in queues[owner]:
                if share <= 0:
                    break
                if not sequence.running:
                    if self._start(sequence, first) != "started":
                        continue
                    first = self._first_waiting() if sequence is first else first
                count = self._advance(sequence, share, pieces)
                share -= count
                budget -= count
        return budget

    def _queues(self, prefilling: list[TokenSequence]) -> dict[str, list[TokenSequence]]:
        """What each owner could compute next, in its order; empty if there is one owner at most."""
        waiting = self._waiting if len(self._running) < self.max_sequences else {}
        owners = waiting.keys() | {sequence.owner for sequence in prefilling}
        if len(owners) < 2:
            return {}
        queues: dict[str, list[TokenSequence]] = {owner: [] for owner in owners}
        for sequence in prefilling:
            queues[sequence.owner].append(sequence)
        for owner, queue in waiting.items():
            queues[owner] += queue
        return queues

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
        self.add(sequence)

    def _stop(self, sequence: TokenSequence) -> None:
        self._running.remove(sequence)
        sequence.running = False
        for key in sequence.keys(self.pool.block_size):
            if self._filling.get(key) is sequence:
                del self._filling[key]
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

    def _admit(self, budget: int, pieces: dict[TokenSequence, Piece]) -> None:
        """Start waiting sequences in turn, until one does not fit."""
        if budget == 0 or len(self._running) >= self.max_sequences:
            return
        # Copied, because starting a sequence removes it from its queue.
        for sequence in heapq.merge(*map(list, self._waiting.values()), key=_turn):
            started = self._start(sequence)
            if started == "no room":
                return
            if started == "started":
                budget -= self._advance(sequence, budget, pieces)
                if budget == 0:
                    return

    def _start(self, sequence: TokenSequence, first: TokenSequence | None = None) -> Start:
        """Let a waiting sequence run, unless it must wait for blocks of another, or for room.

        `first` is the waiting sequence with the first turn while shares are given out; after that,
        sequences start in turn.
        """
        if self._must_wait(sequence):
            return "waits"
        found = self._shared_prefix(sequence)
        if sequence.waits_for is not None:
            return "waits"
        overtaken = [] if first is None or first is sequence else [first]
        blocks = 0 if first is None else self._missing_blocks()
        if not self._has_room(sequence, found, blocks, overtaken):
            return "no room"
        self._run(sequence, found)
        return "started"

    def _must_wait(self, sequence: TokenSequence) -> bool:
        return sequence.waits_for in self._filling or sequence.held_back

    def _first_waiting(self) -> TokenSequence | None:
        """The waiting sequence with the first turn of those that need nothing but room."""
        found = (
            next((one for one in queue if not self._must_wait(one)), None)
            for queue in self._waiting.values()
        )
        return min((one for one in found if one is not None), key=_turn, default=None)

    def _missing_blocks(self) -> int:
        """Blocks that the prompts of running sequences will take when the next shares come."""
        lengths = ((self.pool.blocks_for(len(s.tokens)), len(s.blocks)) for s in self._running)
        return sum(max(wanted - held, 0) for wanted, held in lengths)

    def _has_room(
        self,
        sequence: TokenSequence,
        found: list[int],
        blocks: int,
        overtaken: list[TokenSequence],
    ) -> bool:
        """Whether a sequence fits now beside `blocks` more and one that it overtakes.

        Otherwise it would be preempted, or the overtaken one would never start.
        """
        if len(self._running) + len(overtaken) >= self.max_sequences:
            return False
        if not self._weights_fit({sequence.version, *(one.version for one in overtaken)}):
            return False
        blocks += sum(self._needs(one, self._shared_prefix(one)) for one in overtaken)
        return blocks + self._needs(sequence, found) <= self.pool.available

    def _weights_fit(self, versions: set[str]) -> bool:
        """Whether the weights of versions fit with the running ones; a single one always fits."""
        if self._fits is None:
            return True
        running = {sequence.version for sequence in self._running}
        together = running | versions
        return len(together) == 1 or together == running or self._fits(together)

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

    def _leave_queue(self, sequence: TokenSequence) -> None:
        queue = self._waiting[sequence.owner]
        queue.remove(sequence)
        if not queue:
            del self._waiting[sequence.owner]

    def _run(self, sequence: TokenSequence, found: list[int]) -> None:
        self._leave_queue(sequence)
        insort(self._running, sequence, key=_turn)
        sequence.running = True
        self.pool.share(found)
        sequence.blocks = list(found)
        sequence.computed = len(found) * self.pool.block_size
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, sequence.prompt_length)
        for key in sequence.keys(self.pool.block_size)[len(found) :]:
            self._filling.setdefault(key, sequence)


def _wanted(queue: Sequence[TokenSequence], most: int) -> int:
    """How many tokens of these are to be computed; `most` stands for more."""
    wanted = 0
    for sequence in queue:
        wanted += sequence.pending
        if wanted >= most:
            return most
    return wanted
