"""Server-sent events, cut anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import ClosedError, ResultError
from tinkex.transport.sse import SseEvent, SseParser, SseStream

pytestmark = [pytest.mark.anyio, pytest.mark.req("S31")]


def parse(*chunks: bytes) -> list[SseEvent]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_ending_separates_lines_and_events(end: bytes):
    lines = [b"event: a", b"data: 1", b"data: 2", b"", b"data: 3", b"", b""]
    assert parse(end.join(lines)) == [SseEvent("1\n2", "a"), SseEvent("3")]


def test_comments_and_unknown_fields_are_skipped():
    assert parse(b": hello\nfoo: bar\ndata: x\n:\n\n") == [SseEvent("x")]


def test_only_one_space_after_the_colon_is_dropped():
    assert parse(b"data:  x\n\ndata:y\n\ndata\n\n") == [SseEvent(" x"), SseEvent("y"), SseEvent("")]


def test_ids_stay_until_changed_and_ignore_null():
    events = parse(b"id: 1\ndata: a\n\ndata: b\n\nid: x\0y\ndata: c\n\nid\ndata: d\n\n")
    assert [event.id for event in events] == ["1", "1", "1", ""]


def test_retry_is_a_number_of_milliseconds_or_ignored():
    events = parse(b"retry: 50\ndata: a\n\nretry: soon\ndata: b\n\nretry: \xd9\xa3\ndata: c\n\n")
    assert [event.retry_ms for event in events] == [50, 50, 50]


def test_a_leading_bom_is_ignored_and_a_later_one_is_data():
    assert parse(b"\xef\xbb\xbfdata: x\n\ndata: \xef\xbb\xbfy\n\n") == [
        SseEvent("x"),
        SseEvent("\ufeffy"),
    ]


def test_events_without_data_are_not_events_and_forget_their_name():
    assert parse(b"event: a\n\ndata: x\n\n") == [SseEvent("x")]


def test_an_unfinished_event_is_dropped():
    assert parse(b"data: x\n\ndata: y\n") == [SseEvent("x")]


def test_invalid_utf8_is_replaced():
    assert parse(b"data: \xff\n\n") == [SseEvent("\ufffd")]


def test_an_event_without_end_is_refused():
    parser = SseParser(max_event_chars=100)
    for _ in range(7):
        assert list(parser.feed(b"data: xxxxxxxx\n")) == []
    with pytest.raises(ResultError, match="100"):
        list(parser.feed(b"data: xxxxxxxx\n"))
    with pytest.raises(ResultError):
        list(SseParser(max_event_chars=100).feed(b"x" * 101))


def test_endless_keep_alive_comments_are_no_event():
    parser = SseParser(max_event_chars=100)
    for _ in range(50):
        assert list(parser.feed(b": ping ping\n")) == []


STREAM = (
    b"\xef\xbb\xbf: hi\r\nevent: token\r\nid: 7\r\ndata: \xc3\xa9\r\ndata: two\r\n\r\n"
    b"retry: 10\rdata: cr\r\rdata: lf\n\ndata: tail\n\n"
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_any_split_across_chunks_gives_the_same_events(cuts: list[int]):
    edges = [0, *sorted(cuts), len(STREAM)]
    chunks = [STREAM[a:b] for a, b in itertools.pairwise(edges)]
    assert parse(*chunks) == parse(STREAM)
    assert [event.data for event in parse(*chunks)] == ["é\ntwo", "cr", "lf", "tail"]


def test_byte_by_byte_is_the_same_too():
    assert parse(*(STREAM[i : i + 1] for i in range(len(STREAM)))) == parse(STREAM)


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_parser(data: bytes):
    parse(data)


async def test_a_stream_is_consumed_once_and_says_so():
    async def chunks():
        yield b"data: a\n"
        yield b"\ndata: b\n\n"

    stream = SseStream(chunks())
    assert [event.data async for event in stream] == ["a", "b"]
    with pytest.raises(ClosedError, match="already consumed"):
        async for _ in stream:
            pass
