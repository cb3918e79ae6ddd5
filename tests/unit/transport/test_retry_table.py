"""The retry truth table, row by row."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.docs.blocks import page_named
from tests.docs.retry_table import retry_table
from tinkex.transport.retry import AttemptOutcome, Decision, RetryLimits, RetryProgress, decide

CLASSES = ("full", "submit", "none", "sample", "poll")
HTTP_RETRIED = {408, 409, 429, *range(500, 600)}


def status(code: int, **headers: str) -> AttemptOutcome:
    return AttemptOutcome(
        "status", code, {name.replace("_", "-"): text for name, text in headers.items()}
    )


@pytest.mark.req("S13")
@pytest.mark.parametrize("code", range(300, 600))
@pytest.mark.parametrize("kind", ["full", "submit"])
def test_every_status_is_the_callers_error_or_retried_as_the_table_says(code: int, kind: str):
    decision = decide(status(code), kind)
    if code == 402 and kind == "full":
        assert decision == Decision(5.0, "status 402", billing=True)
    else:
        assert decision.retry is (code in HTTP_RETRIED)


@pytest.mark.req("S15")
@pytest.mark.parametrize("code", [400, 401, 402, 403, 404, 408, 409, 410, 422, 429, 500, 503])
def test_class_none_is_never_retried(code: int):
    assert not decide(status(code, x_should_retry="true"), "none").retry
    for outcome in ("connection", "timeout"):
        assert not decide(AttemptOutcome(outcome), "none").retry


@pytest.mark.req("S13")
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("code", [301, 400, 401, 403, 404, 405, 422, 451])
def test_a_callers_error_is_never_retried_by_any_class(kind: str, code: int):
    assert not decide(status(code), kind).retry


@pytest.mark.req("S13")
@pytest.mark.parametrize("kind", CLASSES)
def test_category_user_bad_answers_and_missing_credentials_are_never_retried(kind: str):
    assert not decide(AttemptOutcome("failed", category="user"), kind).retry
    assert not decide(AttemptOutcome("bad_response"), kind).retry
    assert not decide(AttemptOutcome("credential"), kind).retry


@pytest.mark.req("S13")
@pytest.mark.parametrize("category", ["server", "unknown", "something new"])
def test_a_server_failure_is_sent_again_as_a_new_sample_within_limits(category: str):
    outcome = AttemptOutcome("failed", category=category)
    assert decide(outcome, "sample").retry
    assert not decide(outcome, "sample", RetryProgress(retries=2)).retry
    assert not decide(outcome, "full").retry


@pytest.mark.req("S13")
@pytest.mark.parametrize("kind", ["full", "submit", "sample", "poll"])
@pytest.mark.parametrize("lost", ["connection", "timeout"])
def test_lost_connections_are_retried_with_backoff(kind: str, lost: str):
    waits = [decide(AttemptOutcome(lost), kind, RetryProgress(n)).wait_s for n in range(4)]
    assert waits == [0.5, 1.0, 2.0, 4.0]


def test_a_lost_result_is_sent_for_again_and_a_410_to_anything_else_is_an_error():
    for kind, tries in (("sample", 10), ("full", 4), ("submit", 4)):
        answers = [
            decide(AttemptOutcome("lost"), kind, RetryProgress(n)).retry for n in range(tries)
        ]
        assert answers == [True] * (tries - 1) + [False]
    for kind in ("none", "poll"):
        assert not decide(AttemptOutcome("lost"), kind).retry
    for kind in CLASSES:
        assert not decide(status(410), kind).retry


@pytest.mark.req("S17")
def test_a_408_without_a_queue_state_is_polled_again_soon_until_the_deadline_not_a_count():
    assert decide(status(408), "poll", RetryProgress(retries=10_000, elapsed_s=299)).wait_s == 1.0
    assert not decide(status(408), "poll", RetryProgress(elapsed_s=300)).retry


def test_a_conflict_is_looked_at_three_times_only():
    answers = [decide(status(409), "full", RetryProgress(n)).retry for n in range(4)]
    assert answers == [True, True, False, False]


def test_submit_makes_eleven_attempts_at_most():
    answers = [decide(status(503), "submit", RetryProgress(n)).retry for n in range(12)]
    assert answers == [True] * 10 + [False] * 2


def test_the_last_attempt_is_made_when_the_budget_ends():
    late = RetryProgress(retries=9, elapsed_s=299.0)
    assert decide(status(503), "full", late).wait_s == 1.0
    assert not decide(status(503), "full", RetryProgress(9, 300.0)).retry
    assert not decide(status(503), "full", limits=RetryLimits(budget_s=0.0)).retry


def test_a_billing_pause_has_its_own_limit_and_uses_up_no_other():
    limits = RetryLimits(budget_s=300.0, billing_s=3600.0)
    waited = RetryProgress(retries=100, elapsed_s=3000.0, billing_s=3000.0)
    assert decide(status(402), "full", waited, limits).wait_s == 5.0
    assert decide(status(503), "full", waited, limits).retry
    assert not decide(status(402), "full", RetryProgress(0, 3600.0, 3596.0), limits).retry
    assert not decide(status(402), "submit").retry


@pytest.mark.parametrize("kind", ["full", "submit"])
def test_x_should_retry_overrides_the_status_for_http_level_retries(kind: str):
    assert decide(status(404, x_should_retry="true"), kind).retry
    assert decide(status(302, x_should_retry="TRUE"), kind).retry
    assert not decide(status(503, x_should_retry="false"), kind).retry
    assert decide(status(503, x_should_retry="perhaps"), kind).retry


def test_x_should_retry_means_nothing_to_other_loops():
    for kind in ("sample", "poll"):
        assert decide(status(503, x_should_retry="false"), kind).retry
        assert not decide(status(404, x_should_retry="true"), kind).retry


@pytest.mark.req("S14")
def test_without_a_hint_the_wait_doubles_with_jitter_up_to_a_cap():
    waits = [decide(status(429), "full", RetryProgress(n)).wait_s for n in range(8)]
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30]
    short = decide(status(429), "full", RetryProgress(3), jitter=1.0).wait_s
    assert short == pytest.approx(3.0)
    assert decide(status(500), "sample", RetryProgress(20)).wait_s == 10.0


@pytest.mark.req("S14")
def test_the_servers_hint_is_used_for_429_and_5xx():
    for code in (429, 500, 503):
        assert decide(status(code, retry_after="7"), "full", jitter=0.9).wait_s == 7.0
    assert decide(status(408, retry_after="7"), "full").wait_s == 0.5


def test_the_printed_table_has_a_row_per_event_and_a_column_per_class():
    lines = retry_table().splitlines()
    assert lines[0] == "| event | `full` | `submit` | `none` | `sample` | `poll` |"
    assert len(lines) == 2 + 15
    assert all(line.count("|") == 7 for line in lines)
    (billing,) = [line for line in lines if line.startswith("| 402")]
    assert billing == "| 402 | pause 5 s | raise | raise | pause 5 s | pause 5 s |"


def test_the_printed_table_says_what_the_function_does():
    rows = {row.split(" | ")[0][2:]: row.split(" | ")[1:] for row in retry_table().splitlines()}
    outcomes = {
        "408 (of a poll: without a queue state)": status(408),
        "409": status(409),
        "410": status(410),
        "429": status(429),
    }
    outcomes |= {"5xx": status(502), "402": status(402), "any other 4xx or 3xx": status(404)}
    for (event, outcome), (column, kind) in itertools.product(outcomes.items(), enumerate(CLASSES)):
        printed = rows[event][column].removesuffix(" |")
        assert (printed == "raise") is not decide(outcome, kind).retry, (event, kind)


@given(
    st.sampled_from(CLASSES),
    st.integers(100, 599),
    st.integers(0, 100_000),
    st.floats(0, 1e9),
    st.floats(0, 1, exclude_max=True),
    st.dictionaries(
        st.sampled_from(["retry-after", "retry-after-ms", "x-should-retry"]), st.text(max_size=30)
    ),
)
def test_no_input_makes_it_crash_or_wait_longer_than_a_minute(
    kind, code, retries, elapsed_s, jitter, headers
):
    decision = decide(
        AttemptOutcome("status", code, headers),
        kind,
        RetryProgress(retries, elapsed_s),
        jitter=jitter,
    )
    assert decision.wait_s is None or 0 <= decision.wait_s <= 60


@pytest.mark.req("S13")
def test_the_docs_show_the_table_the_function_prints():
    page = page_named("retries.md").read_text()
    shown = page.split("<!-- retry table: begin -->\n")[1].split("<!-- retry table: end -->")[0]
    assert shown == retry_table()
