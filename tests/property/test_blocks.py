"""Cache accounting and batching under any use: blocks never leak, turns are kept, all ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tinkex.engine.sampler.batcher import Batcher
from tinkex.engine.sampler.blocks import BlockPool, block_key, root_key
from tinkex.engine.sampler.sequence import TokenSequence


class Pool(RuleBasedStateMachine):
    """Holders take, share, name and release blocks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, 4)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.keys = [root_key("v")]
        for i in range(5):
            self.keys.append(block_key(self.keys[-1], [i]))

    @rule(count=st.integers(0, 7))
    def take(self, count: int) -> None:
        if count > self.pool.available:
            with pytest.raises(ValueError, match="available"):
                self.pool.take(count)
            return
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert not {block for blocks in self.held for block in blocks} & set(taken)
        for block in taken:
            self.content.pop(block, None)
        self.held.append(taken)

    @rule(length=st.integers(1, 6))
    def share(self, length: int) -> None:
        found = self.pool.find(self.keys[:length])
        # What is found really holds what was named, in order and without gaps.
        assert [self.content[block] for block in found] == self.keys[: len(found)]
        before = self.pool.available
        idle = self.pool.idle_among(found)
        self.pool.share(found)
        assert self.pool.available == before - idle
        self.held.append(found)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from([blocks for blocks in self.held if blocks]))
        block = data.draw(st.sampled_from(blocks))
        key = data.draw(st.sampled_from(self.keys))
        if block not in self.content and key not in self.content.values():
            self.content[block] = key
        self.pool.name(block, key)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks)

    @invariant()
    def the_books_balance(self) -> None:
        self.pool.check(self.held)

    @invariant()
    def everything_unused_is_available(self) -> None:
        used = {block for blocks in self.held for block in blocks}
        assert self.pool.available == self.pool.num_blocks - len(used)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def sequence(
    number: int,
    prompt: list[int],
    new_tokens: int,
    *,
    sample: int = 0,
    version: str = "v",
    reusable: int | None = None,
    cache_salt: str = "",
) -> TokenSequence:
    length = len(prompt) + new_tokens
    return TokenSequence(
        turn=(number + sample, number),
        sample=sample,
        version=version,
        prompt_length=len(prompt),
        max_length=length,
        tokens=list(prompt),
        reusable=length if reusable is None else reusable,
        cache_salt=cache_salt,
    )


def run_pass(batcher: Batcher) -> tuple[list[TokenSequence], int]:
    """Plan, pretend to run, and append a token where one is due; return who finished."""
    pieces = batcher.plan()
    total = sum(len(piece) for piece in pieces)
    assert total <= batcher.max_tokens
    assert len(pieces) <= batcher.max_sequences
    assert len({piece.sequence.turn for piece in pieces}) == len(pieces)
    finished: list[TokenSequence] = []
    for piece in pieces:
        one = piece.sequence
        assert piece.start == one.computed < piece.stop <= len(one.tokens)
        assert len(one.blocks) == batcher.pool.blocks_for(piece.stop)
        batcher.done(piece)
        if piece.reaches_end:
            # Deterministic, and equal for equal beginnings, as greedy sampling is.
            one.tokens.append(sum(one.tokens) % 7)
            if len(one.tokens) == one.max_length:
                finished.append(one)
    for one in finished:
        batcher.remove(one)
    batcher.check()
    return finished, total


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class Batching(RuleBasedStateMachine):
    """Requests come, run and are cancelled in any order, in a pool that is too small for them."""

    def __init__(self) -> None:
        super().__init__()
        self.batcher = Batcher(BlockPool(6, 3), max_tokens=5, max_sequences=4, min_share=1)
        self.alive: list[TokenSequence] = []
        self.number = 0

    @rule(
        prompt=PROMPTS,
        new_tokens=st.integers(1, 7),
        samples=st.integers(1, 3),
        version=st.sampled_from("ab"),
        scored=st.booleans(),
        owner=st.sampled_from("xyz"),
    )
    def submit(
        self,
        prompt: list[int],
        new_tokens: int,
        samples: int,
        version: str,
        scored: bool,
        owner: str,
    ) -> None:
        for k in range(samples):
            one = sequence(
                self.number,
                prompt,
                new_tokens,
                sample=k,
                version=version,
                reusable=0 if scored and k == 0 else None,
                cache_salt=owner,
            )
            self.alive.append(one)
            self.batcher.add(one)
        self.number += 1

    @rule()
    def step(self) -> None:
        first = min(self.alive, key=lambda s: s.turn, default=None)
        before = None if first is None else (len(first.tokens), first.computed)
        started = first is not None and first.running
        finished, total = run_pass(self.batcher)
        for one in finished:
            self.alive.remove(one)
        # Work is done whenever there is any. The first in turn is part of it once it has started;
        # before, it may wait for a block that another computes for both, or for room that those
        # who started before it came will leave.
        assert (total > 0) == (before is not None)
        if first is not None and started:
            assert (len(first.tokens), first.computed) != before

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
        blocks = len(one.blocks)
        available = self.batcher.pool.available
        self.batcher.remove(one)
        assert available <= self.batcher.pool.available <= available + blocks
        assert one.blocks == []

    @invariant()
    def the_books_balance(self) -> None:
        self.batcher.check()
        assert len(self.batcher) == len(self.alive)

    def teardown(self) -> None:
        """Whatever was left in flight ends, and gives everything back."""
        most = 40 * sum(s.max_length for s in self.alive)
        for _ in range(most):
            if not self.alive:
                break
            for one in run_pass(self.batcher)[0]:
                self.alive.remove(one)
        assert not self.alive
        assert self.batcher.pool.available == self.batcher.pool.num_blocks
        assert len(self.batcher) == 0


TestBatching = Batching.TestCase
TestBatching.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(
    jobs=st.lists(st.tuples(PROMPTS, st.integers(1, 8)), min_size=1, max_size=12),
    blocks=st.integers(20, 40),
    size=st.integers(1, 5),
    max_tokens=st.integers(4, 20),
    owners=st.integers(1, 4),
    min_share=st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_tokens_do_not_depend_on_the_batch(
    jobs: list[tuple[list[int], int]],
    blocks: int,
    size: int,
    max_tokens: int,
    owners: int,
    min_share: int,
) -> None:
    batcher = Batcher(
        BlockPool(blocks, size), max_tokens=max_tokens, max_sequences=4, min_share=min_share
    )
    together = [
        sequence(i, prompt, count, cache_salt=str(i % owners))
        for i, (prompt, count) in enumerate(jobs)
    ]
    for one in together:
        batcher.add(one)
    while len(batcher):
        run_pass(batcher)
    for one, (prompt, count) in zip(together, jobs, strict=True):
        expected = list(prompt)
        for _ in range(count):
            expected.append(sum(expected) % 7)
        assert one.tokens == expected


@given(lengths=st.lists(st.integers(1, 10), min_size=2, max_size=15))
@settings(max_examples=50, deadline=None)
def test_requests_of_one_sample_start_in_the_order_they_came(lengths: list[int]) -> None:
    batcher = Batcher(BlockPool(10, 2), max_tokens=3, max_sequences=2)
    for i, length in enumerate(lengths):
        # Different first tokens: nobody waits for another's prefix.
        batcher.add(sequence(i, [100 + i] * length, 3))
    started: list[int] = []
    while len(batcher):
        running = {s.turn[1] for s in batcher if s.running or s.cached is not None}
        started += sorted(running - set(started))
        run_pass(batcher)
    assert started == sorted(started)


@given(samples=st.integers(2, 40), later=st.integers(1, 10))
@settings(max_examples=30, deadline=None)
def test_many_samples_of_one_request_do_not_hold_up_later_requests(
    samples: int, later: int
) -> None:
    """Sample k yields to at most k later requests, and never to more."""
    batcher = Batcher(BlockPool(400, 2), max_tokens=1, max_sequences=1)
    for k in range(samples):
        batcher.add(sequence(0, [1], 1, sample=k))
    for i in range(1, later + 1):
        batcher.add(sequence(i, [1 + i], 1))
    order: list[tuple[int, int]] = []
    while len(batcher):
        order += [(s.turn[1], s.sample) for s in run_pass(batcher)[0]]
    for k in range(samples):
        ahead = order[: order.index((0, k))]
        assert sum(1 for number, _ in ahead if number > 0) <= k
    for i in range(1, later + 1):
        ahead = order[: order.index((i, 0))]
        assert sum(1 for number, _ in ahead if number == 0) <= i + 1


def test_decoding_rows_come_before_a_long_prompt() -> None:
    batcher = Batcher(BlockPool(100, 4), max_tokens=8, max_sequences=4)
    streams = [sequence(i, [i], 50) for i in range(3)]
    for one in streams:
        batcher.add(one)
    run_pass(batcher)
    batcher.add(sequence(3, list(range(200)), 5))
    for _ in range(20):
        before = [len(one.tokens) for one in streams]
        run_pass(batcher)
        assert [len(one.tokens) for one in streams] == [count + 1 for count in before]


def test_only_versions_that_fit_together_run_together_and_all_get_their_turn() -> None:
    asked: list[set[str]] = []

    def fits(versions: set[str]) -> bool:
        asked.append(versions)
        return len(versions) <= 2

    batcher = Batcher(BlockPool(100, 4), max_tokens=50, max_sequences=20, fits=fits)
    waiting = [sequence(i, [i], 4, version=f"v{i % 5}") for i in range(15)]
    for one in waiting:
        batcher.add(one)
    finished: list[TokenSequence] = []
    while len(batcher):
        finished += run_pass(batcher)[0]
        assert len({one.version for one in batcher if one.running}) <= 2
    assert finished == sorted(finished, key=lambda one: one.turn)
    assert len(finished) == 15
    assert all(len(versions) > 1 for versions in asked)  # alone, a version always fits


def test_the_least_recently_used_prefix_is_forgotten_first_and_from_its_end() -> None:
    pool = BlockPool(4, 1)
    keys: dict[str, list[bytes]] = {}
    for name in ("old", "new"):
        first = block_key(root_key(name), [0])
        keys[name] = [first, block_key(first, [1])]
        blocks = pool.take(2)
        for block, key in zip(blocks, keys[name], strict=True):
            pool.name(block, key)
        pool.release(blocks)
    held = pool.take(1)
    assert len(pool.find(keys["old"])) == 1
    assert len(pool.find(keys["new"])) == 2
    pool.share(pool.find(keys["old"]))  # used again: now the other one is older
    held += pool.take(1)
    assert len(pool.find(keys["old"])) == 1
    assert len(pool.find(keys["new"])) == 1


def test_releasing_twice_and_naming_unused_blocks_are_errors() -> None:
    pool = BlockPool(2, 1)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="twice"):
        pool.release(blocks)
    with pytest.raises(ValueError, match="not in use"):
        pool.name(blocks[0], b"key")


def test_keys_cover_the_version_the_salt_and_every_token_before() -> None:
    a, b = sequence(0, [1, 2, 3, 4], 1), sequence(1, [9, 2, 3, 4], 1)
    c = sequence(2, [1, 2, 3, 4], 1, version="w")
    assert len(a.keys(2)) == 2
    assert not set(a.keys(2)) & set(b.keys(2))
    assert not set(a.keys(2)) & set(c.keys(2))
    d, e = (sequence(3, [1, 2, 3, 4], 1, cache_salt=salt) for salt in ("x", "y"))
    assert not set(a.keys(2)) & set(d.keys(2))
    assert not set(d.keys(2)) & set(e.keys(2))


def test_no_version_and_salt_give_the_keys_of_another_pair() -> None:
    pairs = [("ab", ""), ("a", "b"), ("", "ab"), ("2:ab", ""), ("", "2:ab"), ("b", "a")]
    assert len({root_key(*pair) for pair in pairs}) == len(pairs)
    assert root_key("a", "b") == root_key("a", "b")
