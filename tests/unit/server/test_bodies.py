"""Bodies from strangers: limits before and after unpacking, and no waiting for ever."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest
from backports import zstd

from tests.patience import PATIENCE_S
from tinkex.types.bounds import PROTOBUF_PARTS, TRAINING_JSON_PARTS
from tinkex.wire.proto_scan import count_parts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tinkex.transport.base import Reply

    from .conftest import Api, Start

pytestmark = pytest.mark.anyio

SESSION = msgspec.json.encode({"tags": [], "user_metadata": {}, "sdk_version": "x"})
ZSTD = {"content-encoding": "zstd"}
PROTOBUF = {"content-type": "application/x-protobuf"}


def detail(reply: Reply) -> str:
    assert int(reply.headers["content-length"]) == len(reply.body)
    return msgspec.json.decode(reply.body)["detail"]


async def send(
    api: Api, receive: Callable[[], Awaitable[dict[str, Any]]], **headers: str
) -> tuple[int, bytes]:
    """One create_session whose body comes from `receive`, as a server reads it from a socket."""
    named = {"x-api-key": api.key, **{k.replace("_", "-"): v for k, v in headers.items()}}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/v1/create_session",
        "raw_path": b"/api/v1/create_session",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "scheme": "http",
        "http_version": "1.1",
    }
    sent: list[Any] = []

    async def out(message: Any) -> None:
        sent.append(message)

    await api.server._inner(scope, receive, out)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])


def pieces(*parts: bytes) -> Callable[[], Awaitable[dict[str, Any]]]:
    """A chunked upload: no Content-Length, several messages."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    receive.left = left  # type: ignore[attr-defined]
    return receive


async def test_a_declared_length_above_the_limit_is_refused_before_anything_is_read(
    start: Start,
) -> None:
    async def never() -> dict[str, Any]:
        raise AssertionError("the body was read")

    async with start(max_small_body_bytes=1000) as api:
        status, body = await send(api, never, content_length="1001")
        assert status == 413
        assert b"1000 bytes" in body


async def test_a_chunked_upload_is_read_up_to_the_limit_and_no_further(start: Start) -> None:
    async with start(max_small_body_bytes=1000) as api:
        status, _ = await send(api, pieces(SESSION[:20], SESSION[20:]))
        assert status == 200
        endless = pieces(*[b"x" * 400] * 100)
        status, _ = await send(api, endless)
        assert status == 413
        assert len(endless.left) == 97  # type: ignore[attr-defined]


async def test_an_upload_that_stalls_is_given_up_and_others_go_on(start: Start) -> None:
    async with start(upload_timeout_s=120.0) as api:
        arrived = iter([{"type": "http.request", "body": b"{", "more_body": True}])

        async def stalled() -> dict[str, Any]:
            for message in arrived:
                return message
            await anyio.Event().wait()
            raise AssertionError

        began = api.clock.now()
        answers: list[tuple[int, bytes]] = []

        async def slow() -> None:
            answers.append(await send(api, stalled))

        async with anyio.create_task_group() as group:
            group.start_soon(slow)
            await api.session()
            assert api.clock.now() - began < 1
        assert answers[0][0] == 408
        assert b"within 120 s" in answers[0][1]
        assert api.clock.now() - began == pytest.approx(120.0)
        assert (await send(api, pieces(SESSION)))[0] == 200


async def test_a_client_that_goes_away_in_the_middle_harms_nobody(api: Api) -> None:
    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    assert (await send(api, gone))[0] == 499
    await api.session()


@pytest.mark.parametrize(
    "encoding", ["gzip", "br", "deflate", "zstd, zstd", "zstd, gzip", "x" * 99]
)
async def test_another_encoding_is_refused_by_name(api: Api, encoding: str) -> None:
    reply = await api.call(
        "POST", "/create_session", SESSION, headers={"content-encoding": encoding}
    )
    assert reply.status == 415
    assert encoding in detail(reply)
    assert "zstd or none" in detail(reply)


def frame(data: bytes, **options: Any) -> bytes:
    return zstd.compress(data, **options)


def without_size(data: bytes) -> bytes:
    """A frame whose header does not say how much it holds."""
    packer = zstd.ZstdCompressor()
    return packer.compress(data[:10]) + packer.compress(data[10:]) + packer.flush()


def with_size(data: bytes, size: int) -> bytes:
    """A frame whose header lies: the size is in the bytes after the descriptor."""
    packed = bytearray(frame(data))
    assert packed[4] >> 6 == 0, "the size is one byte: 0x20 set, flag 0"
    packed[5] = size
    return bytes(packed)


async def test_zstd_bodies_are_read_with_and_without_their_size(api: Api) -> None:
    for packed in (frame(SESSION), without_size(SESSION)):
        reply = await api.call("POST", "/create_session", packed, headers=ZSTD)
        assert reply.status == 200, reply


@pytest.mark.parametrize(
    ("packed", "text"),
    [
        (frame(SESSION)[:-1], "truncated"),
        (frame(SESSION)[:7], "truncated"),
        (b"", "not valid zstd"),
        (b"\x28\xb5\x2f\xfd", "not valid zstd"),
        (frame(SESSION) + frame(SESSION), "continues after its first frame"),
        (frame(SESSION) + b"x", "continues after its first frame"),
        (with_size(SESSION, len(SESSION) - 1), "not valid zstd"),
        (with_size(SESSION, len(SESSION) + 1), "not valid zstd"),
        (SESSION, "not valid zstd"),
        (frame(frame(SESSION)), "not valid JSON"),
        # A window of 2 GiB, asked for in the header of a few bytes.
        (b"\x28\xb5\x2f\xfd\x00\xa8\x01\x00\x00", "not valid zstd"),
        # A skippable frame holds nothing and is no body.
        (b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd", ""),
    ],
)
async def test_a_frame_that_is_not_one_whole_frame_is_refused(
    api: Api, packed: bytes, text: str
) -> None:
    reply = await api.call("POST", "/create_session", packed, headers=ZSTD)
    assert reply.status == 400, reply
    assert text in detail(reply)


@pytest.mark.parametrize("make", [frame, without_size])
async def test_a_body_that_unpacks_to_too_much_is_refused(start: Start, make: Any) -> None:
    async with start(max_small_body_bytes=10_000) as api:
        reply = await api.call("POST", "/create_session", make(b" " * 10_001), headers=ZSTD)
        assert reply.status == 400
        assert "10000 bytes" in detail(reply)


BOMB = """
import resource, sys
from backports import zstd
from tinkex.errors import InputError
from tinkex.wire.compression import decompress

packer = zstd.ZstdCompressor()
zeros = bytes(1 << 20)
bomb = b"".join(packer.compress(zeros) for _ in range(4096)) + packer.flush()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decompress(bomb, 64 << 20)
except InputError as error:
    print(len(bomb), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, error)
"""


def test_a_bomb_of_four_gigabytes_costs_no_more_memory_than_the_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BOMB],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    size, mib, *text = done.stdout.split()
    assert int(size) < 1 << 20
    # The limit once, the decoder's window, and the growth of one buffer.
    assert int(mib) < 3 * 64
    assert "larger" in text


async def test_a_body_of_very_many_tiny_parts_is_refused_before_it_is_decoded(api: Api) -> None:
    model = await api.model()
    empty_datums = b"\x1a\x00" * (PROTOBUF_PARTS + 1)
    reply = await api.call("POST", "/forward_backward", empty_datums, headers=PROTOBUF)
    assert reply.status == 413
    assert "fewer datums" in detail(reply)
    lists = b'{"model_id":"' + model.encode() + b'","seq_id":1,"x":['
    lists += b"[]," * TRAINING_JSON_PARTS + b"[]]}"
    reply = await api.call("POST", "/forward_backward", lists)
    assert reply.status == 413
    assert "lists and objects" in detail(reply)


def test_parts_are_counted_one_level_deep_and_nonsense_is_left_to_the_parser() -> None:
    nested = b"\x1a\x06" + b"\x0a\x00" * 3
    assert count_parts(nested, 3) == 4
    assert count_parts(nested, 9) == 4
    assert count_parts(b"\x08\x01\x11" + bytes(8) + b"\x1d" + bytes(4), 3) == 3
    for odd in (b"", b"\xff", b"\xff" * 40, b"\x1a\xff\xff\xff\xff\x0f", b"\x0b\x0c", b"\x07"):
        assert count_parts(odd, 10) <= 1


async def test_only_training_sampling_and_telemetry_may_be_large(start: Start) -> None:
    async with start(max_small_body_bytes=2000) as api:
        padding = b" " * 3000
        for path, status in {
            "/create_session": 413,
            "/optim_step": 413,
            "/create_custom_loss": 413,
            "/asample": 400,
            "/forward": 400,
            "/forward_backward": 400,
            "/telemetry": 200,
        }.items():
            assert (await api.call("POST", path, b"{}" + padding)).status == status, path
