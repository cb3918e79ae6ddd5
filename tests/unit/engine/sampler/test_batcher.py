"""How the tokens of a pass are shared between tenants whose prompts are computed in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tinkex.engine.sampler.batcher import Batcher
from tinkex.engine.sampler.blocks import BlockPool
from tinkex.engine.sampler.sequence import TokenSequence

if TYPE_CHECKING:
    from collections.abc import Callable

BUDGET = 100


def batcher(
    *,
    blocks: int = 10_000,
    max_tokens: int = BUDGET,
    max_sequences: int = 20,
    min_share: int = 10,
    fits: Callable[[set[str]], bool] | None = None,
) -> Batcher:
    return Batcher(
        BlockPool(blocks, 4),
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        min_share=min_share,
        fits=fits,
    )


class Arrivals:
    """Makes sequences in the order they come; no two share a prefix."""

    def __init__(self) -> None:
        self.number = 0

    def next(
        self, owner: str, prompt: int, *, new_tokens: int = 2, version: str = "v"
    ) -> TokenSequence:
        self.number += 1
        return TokenSequence(
            turn=(self.number, self.number),
            sample=0,
            version=version,
            prompt_length=prompt,
            max_length=prompt + new_tokens,
            tokens=[self.number] * prompt,
            reusable=0,
            cache_salt=owner,
        )


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals()


def run(target: Batcher) -> dict[TokenSequence, int]:
    """One pass; returns how many tokens each sequence got."""
    pieces = target.plan()
    for piece in pieces:
        target.done(piece)
        one = piece.sequence
        if piece.reaches_end:
            one.tokens.append(0)
            if len(one.tokens) == one.max_length:
                target.remove(one)
    target.check()
    return {piece.sequence: len(piece) for piece in pieces}


def begun(target: Batcher, *sequences: TokenSequence) -> None:
    for one in sequences:
        target.add(one)
    run(target)


def test_a_short_prompt_does_not_wait_for_another_tenants_long_one(arrivals: Arrivals) -> None:
    target, long = batcher(), arrivals.next("a", 5000)
    begun(target, long)
    short = arrivals.next("b", 30)
    target.add(short)
    assert run(target) == {short: 30, long: BUDGET - 30}


def test_nor_for_all_the_long_ones_that_came_before_it(arrivals: Arrivals) -> None:
    target = batcher()
    long = [arrivals.next("a", 5000) for _ in range(10)]
    begun(target, *long)
    short = arrivals.next("b", 30)
    target.add(short)
    assert run(target) == {short: 30, long[0]: BUDGET - 30}


def test_two_long_prompts_of_two_tenants_share_every_pass(arrivals: Arrivals) -> None:
    target = batcher()
    first, second = arrivals.next("a", 1000), arrivals.next("b", 1000)
    begun(target, first)
    target.add(second)
    for _ in range(5):
        assert run(target) == {first: BUDGET // 2, second: BUDGET // 2}


def test_prompts_of_one_tenant_are_computed_one_after_the_other(arrivals: Arrivals) -> None:
    """Sharing passes between them would delay the first and speed up none."""
    target = batcher()
    first, second = arrivals.next("a", 250), arrivals.next("a", 250)
    begun(target, first, second)
    assert run(target) == {first: BUDGET}
    assert run(target) == {first: 50, second: 50}


def test_what_one_share_leaves_is_used_by_the_others(arrivals: Arrivals) -> None:
    target = batcher()
    begun(target, arrivals.next("a", 5000))
    small = [arrivals.next(owner, 12) for owner in "bcd"]
    large = arrivals.next("e", 5000)
    for one in (*small, large):
        target.add(one)
    got = run(target)
    assert [got[one] for one in small] == [12, 12, 12]
    assert got[large] == (BUDGET - 36) // 2
    assert sum(got.values()) == BUDGET


def test_a_share_is_never_too_small_to_be_worth_a_pass(arrivals: Arrivals) -> None:
    """With more tenants than shares, the first in turn has one, and the shortest prompts."""
    target = batcher(min_share=40)
    oldest = arrivals.next("a", 5000)
    begun(target, oldest)
    others = [arrivals.next(owner, length) for owner, length in (("b", 900), ("c", 60), ("d", 700))]
    for one in others:
        target.add(one)
    assert run(target) == {oldest: 60, others[1]: 40}


def test_the_oldest_long_prompt_ends_however_many_short_ones_come(arrivals: Arrivals) -> None:
    target, long = batcher(), arrivals.next("long", 1000)
    begun(target, long)
    # A tenth of each pass at least, which is the smallest share.
    for _ in range(900 // 10):
        for owner in "abcdefgh":
            target.add(arrivals.next(owner, 90))
        run(target)
    assert len(long.tokens) > long.prompt_length


def test_decoding_sequences_come_first_and_leave_a_token_for_the_oldest_prompt(
    arrivals: Arrivals,
) -> None:
    target = batcher(max_tokens=4, max_sequences=4, min_share=2)
    streams = [arrivals.next("a", 1, new_tokens=50) for _ in range(2)]
    begun(target, *streams)
    first, second = arrivals.next("b", 40), arrivals.next("c", 40)
    begun(target, first)
    target.add(second)
    for _ in range(4):
        got = run(target)
        assert [got[one] for one in streams] == [1, 1]
        assert got[first] == 2


def test_nobody_overtakes_into_blocks_that_the_first_in_turn_needs(arrivals: Arrivals) -> None:
    # 100 blocks of 4: the first takes 60, the next would take 30 more, ten are left for others.
    target = batcher(blocks=100)
    begun(target, arrivals.next("a", 230), arrivals.next("a", 118))
    fits, too_large = arrivals.next("b", 30), arrivals.next("c", 42)
    target.add(too_large)
    target.add(fits)
    got = run(target)
    assert fits in got
    assert too_large not in got
    assert target.preemptions == 0


def test_nobody_overtakes_one_that_has_no_room(arrivals: Arrivals) -> None:
    """Otherwise those that need little room could keep it away from one that needs much."""
    target = batcher(blocks=100)
    begun(target, arrivals.next("a", 230), arrivals.next("a", 300))
    short = arrivals.next("b", 30)
    target.add(short)
    assert short not in run(target)


def test_the_last_place_belongs_to_the_first_in_turn(arrivals: Arrivals) -> None:
    target = batcher(max_sequences=2)
    first, second = arrivals.next("a", 150), arrivals.next("a", 500)
    begun(target, first, second)
    short = arrivals.next("b", 30)
    target.add(short)
    assert run(target) == {first: 50, second: 50}
    assert short not in run(target)


def test_versions_that_do_not_fit_beside_the_first_in_turn_do_not_overtake(
    arrivals: Arrivals,
) -> None:
    target = batcher(fits=lambda versions: len(versions) <= 2)
    first = arrivals.next("a", 5000, version="one")
    begun(target, first, arrivals.next("a", 500, version="two"))
    third, known = arrivals.next("b", 20, version="three"), arrivals.next("c", 20, version="one")
    target.add(third)
    target.add(known)
    assert run(target) == {known: 20, first: BUDGET - 20}


@pytest.mark.parametrize("owners", ["aaaa", "abab", "abcd"])
def test_the_same_passes_compute_the_same_prompts_whoever_owns_them(
    arrivals: Arrivals, owners: str
) -> None:
    """Sharing takes no more passes: each is full until the last."""
    target = batcher()
    for owner, length in zip(owners, (700, 90, 410, 300), strict=True):
        target.add(arrivals.next(owner, length, new_tokens=1))
    totals = []
    while len(target):
        totals.append(sum(run(target).values()))
    assert totals == [BUDGET] * 15
