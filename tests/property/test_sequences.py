"""Faults in combination: generated sequences agree with a small model of what must happen."""

from __future__ import annotations

import pytest

from tests.property.sequences import Expected, Sequence, Trial, expected, run
from tinkex.errors import ConflictError, InternalServerError, ServerSilentError

pytestmark = [pytest.mark.req("S22"), pytest.mark.req("S25")]

# What the search found before, each as a sequence of its own.
STORIES = [
    # Accepted in the moment in which it was cancelled: the feed kept its completion.
    Sequence("sample", (), ("503", "lost"), cancel_after_s=0.0, feed=True),
    # On the wire when it was cancelled: its place was not free yet.
    Sequence("sample", ("slow", "429"), ("failed user",), cancel_after_s=2.0),
    # The pause for want of credit was counted against the deadline for submitting.
    Sequence("training", ("reply lost", "402", "503"), (), submit_s=3.0),
    # So was being told to slow down.
    Sequence("training", ("429", "429", "503", "429"), (), submit_s=3.0),
]


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_generated_sequences_end_as_the_model_says(first: int) -> None:
    run(first, 100)


@pytest.mark.parametrize("story", STORIES, ids=str)
def test_what_was_found_once_is_mended(story: Sequence) -> None:
    Trial(feed=story.feed).run([story])


def test_the_model_counts_conflicts_apart_from_other_failures() -> None:
    mixed = Sequence("sample", ("503", "409", "503", "409"), ())
    assert [(end.error, end.offsets) for end in expected(mixed)] == [(None, (0, 0, 0, 0, 0))]
    thrice = Sequence("sample", ("409", "409", "409"), ())
    assert [(end.error, end.offsets) for end in expected(thrice)] == [(ConflictError, (0, 0, 0))]


def test_the_model_follows_both_where_a_deadline_falls_into_a_random_wait() -> None:
    # The second wait is clipped at the deadline only if the first was long.
    trouble = Sequence("training", ("503", "503", "503"), (), submit_s=1.0)
    assert {end.error for end in expected(trouble)} == {None, InternalServerError}
    late = Sequence("training", ("slow",), (), total_s=4.0)
    assert [(end.error, end.between) for end in expected(late)] == [(ServerSilentError, (4.0, 4.0))]


def test_a_wrong_client_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.property.sequences.expected", lambda _: [Expected(None, (0, 1))])
    with pytest.raises(AssertionError, match="numbers"):
        Trial(feed=False).run([Sequence("sample", (), ())])
