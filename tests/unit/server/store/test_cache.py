"""A cache never holds more than it may."""

from __future__ import annotations

from tinkex.server.store.sql.state import Cache


def test_the_value_that_was_used_longest_ago_goes_first() -> None:
    cache: Cache[int] = Cache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert [key for key, _ in cache.items()] == ["a", "c"]
    assert cache.get("b") is None


def test_values_together_stay_within_their_bytes() -> None:
    cache: Cache[bytes] = Cache(100, most_bytes=10, size=len)
    cache.put("a", b"12345")
    cache.put("b", b"12345")
    cache.put("a", b"123456")
    assert [key for key, _ in cache.items()] == ["a"]
    cache.put("too large", b"x" * 11)
    assert list(cache.items()) == []
    cache.put("c", b"1234567890")
    assert cache.get("c") == b"1234567890"


def test_a_discarded_value_makes_room() -> None:
    cache: Cache[bytes] = Cache(100, most_bytes=10, size=len)
    cache.put("a", b"1234567890")
    cache.discard("a")
    cache.discard("never there")
    cache.put("b", b"1234567890")
    assert cache.get("b") is not None
