"""Base URLs: one spelling, one way to join, one kind of key."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex import urls
from tinkex.errors import InputError


@pytest.mark.req("S29")
@pytest.mark.parametrize(
    ("given_url", "normal"),
    [
        ("http://h:1/base", "http://h:1/base"),
        ("http://h:1/base///", "http://h:1/base"),
        ("HTTP://Example.COM/", "http://example.com"),
        ("https://example.com:443", "https://example.com"),
        ("http://example.com:80/x/", "http://example.com/x"),
        ("http://example.com:443", "http://example.com:443"),
        ("http://example.com.", "http://example.com"),
        (" http://localhost:8000 ", "http://localhost:8000"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("http://[2001:DB8::1]", "http://[2001:db8::1]"),
        ("https://bücher.example/", "https://xn--bcher-kva.example"),
        ("https://h/A%20b", "https://h/A%20b"),
        ("https://h/é", "https://h/%C3%A9"),
    ],
)
def test_every_spelling_of_a_server_becomes_one(given_url: str, normal: str):
    assert urls.normalise(given_url) == normal
    assert urls.normalise(normal) == normal


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("ftp://h", "http://"),
        ("h:8000", "http://"),
        ("", "http://"),
        ("unix:/tmp/x", "http://"),
        ("http://", "host"),
        ("http://h:0", "port"),
        ("http://h:99999", "not a URL"),
        ("http://h:abc", "not a URL"),
        ("http://[::1", "not a URL"),
        ("http://user:hunter2@h", "TINKER_API_KEY"),
        ("http://h/?a=1", "query"),
        ("http://h/#x", "fragment"),
        ("http://h?", "query"),
        ("http://h/a/../b", "`..`"),
        ("http://h/a b", "spaces"),
        ("http://h%41/", "host name"),
        ("http://a b/", "host name"),
    ],
)
def test_a_base_url_that_cannot_work_is_refused_and_named(bad: str, says: str):
    with pytest.raises(InputError, match="TINKER_BASE_URL") as caught:
        urls.parse(bad, setting="TINKER_BASE_URL")
    assert says in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.req("S29")
def test_paths_are_appended_to_the_base_path_and_never_replace_it():
    assert urls.join("http://h:1/base", "/api/v1/asample") == "http://h:1/base/api/v1/asample"
    assert urls.join("http://h:1/", "/api/v1/x", "a=1") == "http://h:1/api/v1/x?a=1"


def test_pools_are_shared_per_origin_and_limits_per_base_url_and_key():
    assert urls.parse("http://h/a").origin == urls.parse("http://H:80/b").origin
    assert urls.parse("http://h").origin != urls.parse("https://h").origin
    one = urls.limiter_key("http://h/a/", "tml-1")
    assert one == urls.limiter_key("http://H:80/a", "tml-1")
    assert one != urls.limiter_key("http://h/b", "tml-1")
    assert one != urls.limiter_key("http://h/a", "tml-2")
    assert "tml-1" not in str(one)


def test_query_strings_follow_the_protocol():
    query = urls.encode_query(
        {
            "limit": 20,
            "all": True,
            "off": False,
            "none": None,
            "empty": "",
            "nothing": [],
            "ids": ["a", 2, None],
            "nested": {"b": {"c": 1}},
            "day": dt.date(2026, 7, 1),
            "text": "a b&c=d/é",
        }
    )
    assert query == (
        "limit=20&all=true&off=false&ids=a%2C2&nested[b][c]=1&day=2026-07-01"
        "&text=a%20b%26c%3Dd%2F%C3%A9"
    )


@given(st.text(max_size=40))
def test_any_text_is_normalised_or_refused_but_never_crashes(text: str):
    try:
        normal = urls.normalise(text)
    except InputError:
        return
    assert urls.normalise(normal) == normal
    assert normal.isascii()
