"""Samples in memory are bounded and their cursors go on counting."""

from __future__ import annotations

from tests.contracts.store_suite import DONE, sample
from tinkex.server.store.sample_memory import SampleMemory


def ended(samples: SampleMemory, seq: int, at: float = 1.0) -> None:
    samples.submit(sample(seq))
    assert samples.finish(sample(seq).op_id, DONE, at)


def test_only_the_newest_finished_samples_are_known() -> None:
    samples = SampleMemory(most_finished=3)
    samples.submit(sample(99))
    for seq in range(5):
        ended(samples, seq)
    assert list(samples.finished_ids()) == [f"s:sample:0:{seq}" for seq in (2, 3, 4)]
    assert samples.get("s:sample:0:0") is None
    assert samples.get("s:sample:0:99") is not None
    assert samples.result_bytes == 3 * len(b"result")


def test_a_cursor_counts_what_is_forgotten() -> None:
    samples = SampleMemory(most_finished=2)
    for seq in range(3):
        ended(samples, seq)
    found, cursor = samples.completions("s:sample:0", 0, 0)
    assert ([op.seq_id for op in found], cursor) == ([1, 2], 3)
    ended(samples, 3)
    found, cursor = samples.completions("s:sample:0", 0, cursor)
    assert ([op.seq_id for op in found], cursor) == ([3], 4)


def test_a_client_that_comes_back_after_it_was_forgotten_misses_nothing() -> None:
    samples = SampleMemory()
    for seq in range(3):
        ended(samples, seq, at=1.0)
    _, cursor = samples.completions("s:sample:0", 0, 0)
    assert samples.forget_before(2.0) == 3
    assert len(samples._ended) == 0
    ended(samples, 3, at=3.0)
    found, later = samples.completions("s:sample:0", 0, cursor)
    assert ([op.seq_id for op in found], later) == ([3], cursor + 1)
    assert samples.completions("s:sample:0", 0, later) == ([], later)


def test_old_samples_lose_their_results_first_and_then_themselves() -> None:
    samples = SampleMemory()
    for seq in range(3):
        ended(samples, seq, at=float(seq))
    assert samples.drop_results_before(2.0) == 2
    assert samples.drop_results_before(2.0) == 0
    assert samples.result_bytes == len(b"result")
    assert samples.forget_before(1.5) == 2
    assert list(samples.finished_ids()) == ["s:sample:0:2"]


def test_a_restart_forgets_all_of_them() -> None:
    samples = SampleMemory()
    ended(samples, 1)
    samples.submit(sample(2))
    assert sorted(samples.clear()) == ["s:sample:0:1", "s:sample:0:2"]
    assert samples.pending() == []
    assert samples.result_bytes == 0
