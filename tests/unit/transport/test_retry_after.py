"""Retry-After, one test per form."""

from __future__ import annotations

from email.utils import formatdate

import pytest

from tinkex.transport.retry import retry_after_s

NOW = 1_750_000_000.0
pytestmark = pytest.mark.req("S14")


def hint(**headers: str) -> float | None:
    return retry_after_s({name.replace("_", "-"): value for name, value in headers.items()}, NOW)


def test_milliseconds():
    assert hint(retry_after_ms="1500") == 1.5


def test_fractional_milliseconds():
    assert hint(retry_after_ms="0.5") == 0.0005


def test_whole_seconds():
    assert hint(retry_after="3") == 3.0


def test_fractional_seconds():
    assert hint(retry_after="0.25") == 0.25


def test_an_http_date():
    assert hint(retry_after=formatdate(NOW + 20, usegmt=True)) == 20.0


def test_milliseconds_beat_seconds():
    assert hint(retry_after_ms="200", retry_after="30") == 0.2


def test_milliseconds_beat_a_date():
    assert hint(retry_after_ms="200", retry_after=formatdate(NOW + 20, usegmt=True)) == 0.2


def test_malformed_milliseconds_leave_the_seconds():
    assert hint(retry_after_ms="soon", retry_after="4") == 4.0


def test_negative_milliseconds_leave_the_seconds():
    assert hint(retry_after_ms="-5", retry_after="4") == 4.0


def test_no_header():
    assert hint() is None


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "-inf", "1e999", "0x10", "12 s", "\0"])
def test_malformed_text_is_no_hint(text: str):
    assert hint(retry_after=text) is None
    assert hint(retry_after_ms=text) is None


@pytest.mark.parametrize("text", ["0", "-1", "-0.5"])
def test_zero_and_negative_are_no_hint(text: str):
    assert hint(retry_after=text) is None


def test_a_date_in_the_past_is_no_hint():
    assert hint(retry_after=formatdate(NOW - 20, usegmt=True)) is None


@pytest.mark.parametrize(
    "text", ["Wed, 99 Foo 2026 99:99:99 GMT", "Mon, 01 Jan 99999 00:00:00 GMT", "Wed,", ","]
)
def test_a_malformed_date_is_no_hint(text: str):
    assert hint(retry_after=text) is None


@pytest.mark.parametrize("text", ["61", "86400", "1e300"])
def test_absurd_seconds_are_cut_to_a_minute(text: str):
    assert hint(retry_after=text) == 60.0


def test_absurd_milliseconds_are_cut_to_a_minute():
    assert hint(retry_after_ms="1e12") == 60.0


def test_a_date_far_away_is_cut_to_a_minute():
    assert hint(retry_after=formatdate(NOW + 1e6, usegmt=True)) == 60.0
