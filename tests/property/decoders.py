"""Decoders for `fuzz`: heads, scans, queries, events, files, tokens, templates, settings.

Each target catches the errors that its decoder may raise besides InputError; the function of the
same name in `SEEDS` makes good inputs to begin with.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import struct
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tinkex.errors import APIStatusError, ChatTemplateError, InputError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

_SECRET = b"s" * 32


def _refused(error: APIStatusError) -> None:
    """A refusal must be one of input."""
    assert 400 <= error.status_code < 500, error


@cache
def _folder() -> Path:
    """A folder for decoders that read files; it stays as long as the process."""
    return Path(tempfile.mkdtemp(prefix="tinkex-fuzz-"))


def scans(data: bytes) -> None:
    """What is counted and checked before a body is decoded."""
    from tinkex.wire import json_scan, proto_scan

    json_scan.count_values(data, json_scan.Counts(100, 1000))
    for scan in (
        lambda: proto_scan.count_parts(data, 1 << 16),
        lambda: proto_scan.without_data(data),
    ):
        with suppress(InputError):
            scan()
    proto_scan.check_shapes(data)


def heads(data: bytes) -> None:
    """The ids of a training request, read without its data."""
    from tinkex.wire.json_requests import decode_ids, decode_training_head

    for forward_only in (False, True):
        with suppress(InputError):
            decode_training_head(data, forward_only=forward_only)
    decode_ids(data)


def openai(data: bytes) -> None:
    """Bodies of the routes below /v1."""
    from tinkex.server.openai.requests import ChatRequest, CompletionRequest, read

    for kind in (CompletionRequest, ChatRequest):
        try:
            read(kind, data)
        except APIStatusError as error:
            _refused(error)


def results(data: bytes) -> None:
    """What a client reads as the result of a future of any kind, in JSON and in protobuf."""
    from typing import get_args

    from tinkex.wire.results import PROTOBUF_RESULTS, decode_pending, decode_result
    from tinkex.wire.routes import MEDIA_JSON, MEDIA_PROTOBUF, RequestType

    decode_pending(data)
    for kind in get_args(RequestType):
        for media in (MEDIA_JSON, MEDIA_PROTOBUF) if kind in PROTOBUF_RESULTS else (MEDIA_JSON,):
            with suppress(InputError):
                decode_result(kind, media, data, ["a", "b"])


def events(data: bytes) -> None:
    """What a client reads of a stream: the same events, however the bytes come in pieces."""
    from tinkex.errors import ResultError
    from tinkex.transport.sse import SseEvent, SseParser

    def read(pieces: list[bytes]) -> tuple[list[SseEvent], bool]:
        parser, found = SseParser(max_event_chars=1000), list[SseEvent]()
        try:
            for piece in pieces:
                found += parser.feed(piece)
        except ResultError:
            return found, False
        return found, True

    whole, ended = read([bytes([each]) for each in data])
    for pieces in (_pieces(data, len(data)), [data]):
        some, well = read(pieces)
        # A generator that raises gives none of the events of its last piece.
        assert well == ended, pieces
        assert some == whole if well else whole[: len(some)] == some, pieces


def _pieces(data: bytes, seed: int) -> list[bytes]:
    """The same bytes in pieces of random sizes."""
    rng, found, at = random.Random(seed), [], 0
    while at < len(data):
        size = rng.choice((1, 1, 2, 7, 100, 5000))
        found.append(data[at : at + size])
        at += size
    return found


def queries(data: bytes) -> None:
    """Numbers and times of a query string."""
    from starlette.requests import Request

    from tinkex.server.api.call import Call
    from tinkex.server.api.usage import _day, _hour
    from tinkex.types.bounds import PAGE_ITEMS, PAGE_OFFSET

    scope: dict[str, Any] = {"type": "http", "query_string": data, "headers": [], "path": "/"}
    call = Call(request=Request(scope), parts=cast("Any", None), owner="me")
    for read in (
        lambda: call.number("limit", 1) in range(PAGE_ITEMS + 1),
        lambda: call.number("offset", 1, most=PAGE_OFFSET) in range(PAGE_OFFSET + 1),
        lambda: abs(_hour(call, "starting_on").timestamp()) < 1e12,
        lambda: _day(call.request.query_params.get("day")) is not None,
    ):
        try:
            assert read()
        except APIStatusError as error:
            _refused(error)


def http_heads(data: bytes) -> None:
    """The bytes of a connection in pieces: answers, refusals or its end, and little is held."""
    asyncio.run(_connection(_pieces(data, len(data))))


_HEAD_BYTES = 512
_ANSWERS = {b"100", b"200", b"400", b"414", b"429", b"431"}


class _Wire(asyncio.Transport):
    """The server's end of a connection without a socket."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        # Mutable state.
        self.written = b""
        self.closed = self.paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    abort = close


async def _connection(pieces: list[bytes]) -> None:
    import uvicorn
    from uvicorn.server import ServerState

    from tinkex.serving.connections import ConnectionLimits, Connections
    from tinkex.serving.http_protocol import ServerConnection

    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    asked = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal asked
        asked += 1
        while (await receive()).get("more_body", False):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    limits = ConnectionLimits(connections=4, per_address=4, head_bytes=_HEAD_BYTES, pipelined=2)
    config = uvicorn.Config(app, log_config=None, ws="none", lifespan="off", interface="asgi3")
    config.load()
    all_of_them, wire, fed = Connections(limits), _Wire(), 0
    connection = ServerConnection(
        all_of_them, config=config, server_state=ServerState(), app_state={}
    )
    connection.accepted("127.0.0.1", "open")
    connection.connection_made(wire)
    for piece in pieces:
        if wire.closed:
            break
        connection.data_received(piece)
        fed += len(piece)
        await asyncio.sleep(0)
        assert not wire.paused or asked
        assert 0 <= all_of_them.partial_bytes <= _HEAD_BYTES
        # A head that does not end is refused, however it comes.
        assert asked or wire.written or wire.closed or fed <= 2 * _HEAD_BYTES
    connection.connection_lost(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert all_of_them.partial_bytes == len(all_of_them) == 0
    assert not wire.written or wire.written.startswith(b"HTTP/1.1 ")
    statuses = set(re.findall(rb"HTTP/1\.1 (\d+)", wire.written))
    assert statuses <= _ANSWERS, statuses


def tokens(data: bytes) -> None:
    """Tokens and download links; none of them is ours."""
    from tinkex.server.api import identity

    text = data.decode("latin-1")
    for made in (identity._make_jwt, identity._make_link):
        good = made(_SECRET, {"sub": "me", "exp": 1})
        opened = identity._open_jwt if made is identity._make_jwt else identity._open_link
        assert opened(_SECRET, good) == {"sub": "me", "exp": 1}
        for forged in (
            text,
            f"{text}.{good.rpartition('.')[2]}",
            f"{good.rpartition('.')[0]}.{text}",
        ):
            assert forged == good or opened(_SECRET, forged) is None


def adapter_config(data: bytes) -> None:
    """`adapter_config.json`."""
    from tinkex.adapters.peft_layout import read_config

    read_config(data)


def safetensors_head(data: bytes) -> None:
    """The head of a safetensors file."""
    from tinkex.adapters.tensor_header import LENGTH, head_length, parse_head

    length = head_length(data[: LENGTH.size], len(data))
    rest = data[LENGTH.size :]
    parse_head(rest[:length], len(rest) - length)


def archive(data: bytes) -> None:
    """An uploaded tar."""
    from tests.property.test_import_fuzz import received

    with tempfile.TemporaryDirectory() as folder:
        try:
            asyncio.run(received(data, Path(folder)))
        except APIStatusError as error:
            _refused(error)


def gguf(data: bytes) -> None:
    """A model in one file."""
    from tinkex.engine.models.gguf_file import GgufFile

    path = _folder() / "model.gguf"
    path.write_bytes(data)
    with suppress(ModelError), GgufFile(path) as file:
        for name in file.tensors:
            file.read(name)


def model_folder(data: bytes) -> None:
    """`config.json` of a model, and the files of its tokenizer."""
    from tinkex.engine.models.hf_config import read_config
    from tinkex.engine.models.tokenizer import folder_tokenizer

    folder = _folder()
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        (folder / name).write_bytes(data)
    for read in (lambda: read_config(folder, "x"), lambda: folder_tokenizer(folder)):
        with suppress(ModelError, InputError):
            read()


def chat_template(data: bytes) -> None:
    """A template of a model. A long one takes long to compile, which happens once."""
    from tinkex.chat.template import ChatTemplate
    from tinkex.clock import SystemClock

    text = data[:600].decode("utf-8", "replace")
    messages = [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": "x"}]
    with suppress(ChatTemplateError):
        ChatTemplate(text, "<s>", "</s>").render(
            messages, add_generation_prompt=True, clock=SystemClock()
        )


def retry_headers(data: bytes) -> None:
    """When a client is asked to come back."""
    from tinkex.transport.retry import retry_after_s

    text = data.decode("latin-1")
    for name in ("retry-after", "retry-after-ms"):
        wait_s = retry_after_s({name: text}, 1e9)
        assert wait_s is None or 0 <= wait_s < float("inf"), wait_s


def settings(data: bytes) -> None:
    """A configuration file, and the same text as the value of every setting."""
    from tinkex.serving.host_settings import known, load_settings

    path = _folder() / "tinkex.toml"
    path.write_bytes(data)
    with suppress(InputError):
        load_settings({}, {}, config=path)
    text = data.decode("latin-1")
    for name in known().keys() - {"data_dir"}:  # a folder, which is looked into
        with suppress(InputError):
            load_settings({name: text}, {}, config=None)


def _heads() -> list[bytes]:
    from tests.property import fuzz_seeds

    return [fuzz_seeds._training(forward) for forward in (0, 1)]


def _scans() -> list[bytes]:
    from tests.property import fuzz_seeds

    return [*fuzz_seeds.protobuf(), *_heads()]


def _openai() -> list[bytes]:
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stop": ["a"], "seed": 1}
    text = {"model": "m", "prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2, "stream": True}
    return [json.dumps(chat).encode(), json.dumps(text).encode()]


def _results() -> list[bytes]:
    pending = {
        "type": "try_again",
        "queue_state": "active",
        "progress": {"position": 0, "since": 1.0},
    }
    saved = {"path": "tinker://m/weights/x", "type": "save_weights", "metrics": {"a": "NaN"}}
    from tests.property import fuzz_seeds
    from tinkex.wire.results import ReadyResult, decode_result, encode_value
    from tinkex.wire.routes import MEDIA_JSON, MEDIA_PROTOBUF

    output, sample = fuzz_seeds.protobuf_results()
    found = [output, sample]
    for kind, body in (("ForwardBackward", output), ("Sample", sample)):
        outcome = decode_result(kind, MEDIA_PROTOBUF, body, ["a", "b"])
        assert isinstance(outcome, ReadyResult)
        found.append(encode_value(kind, outcome.value, accept=MEDIA_JSON)[1])
    plain = [json.dumps(each).encode() for each in (pending, saved)]
    return [*found, *plain, b'{"error":"x","category":"user"}', b"{}"]


def _events() -> list[bytes]:
    return [
        b"\xef\xbb\xbfid: 1\nevent: a\ndata: x\ndata: y\n\n: a comment\r\nretry: 10\rdata\r\r",
        b"data: " + b"long " * 150 + b"\n\nid: a\0b\ndata:\xc3\xa9\xff\n\n",
    ]


def _queries() -> list[bytes]:
    return [
        b"limit=5&offset=3&day=2026-01-31&starting_on=2026-01-31T12%3A00%3A00Z",
        b"limit=0010&offset=-1&day=99999-01-01&starting_on=0001-01-01T00:00:00%2B23:59",
        b"limit=%D9%A1&day=2026-W05-1&starting_on=9999-12-31T23:00:00-23:00",
    ]


def _http_heads() -> list[bytes]:
    get = b"GET /a?b=c HTTP/1.1\r\nhost: localhost\r\n\r\n"
    post = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
    chunked = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
    chunked += b"expect: 100-continue\r\n\r\n3\r\nabc\r\n0\r\nx: y\r\n\r\n"
    upgrade = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    long = b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 2000 + b"\r\n\r\n"
    return [get, post, chunked, upgrade, long, get * 20, post + chunked + get, b"\x16\x03\x01" * 90]


def _archive() -> list[bytes]:
    from tests.property.test_import_fuzz import ARCHIVE

    return [ARCHIVE]


def _safetensors() -> list[bytes]:
    from tests.property.test_import_fuzz import SMALL

    return [SMALL]


def _adapter_config() -> list[bytes]:
    from tests.unit.adapters import kit

    return [kit.config(), kit.config(target_modules="all-linear", rank_pattern={"a": 1})]


def _gguf() -> list[bytes]:
    """One tensor of two numbers, one text and one list."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 2)
    head += text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    head += text(b"tokens") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"b")
    head += text(b"t") + struct.pack("<IQIQ", 1, 2, 0, 0)
    return [head + b"\0" * (-len(head) % 32) + struct.pack("<2f", 1.0, 2.0)]


def _model_folder() -> list[bytes]:
    from benchmarks.serving import ONE_MILLION
    from tinkex.engine.models.tokenizer import byte_tokenizer

    return [json.dumps(ONE_MILLION).encode(), byte_tokenizer().json.encode()]


def _templates() -> list[bytes]:
    usual = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    odd = "{% set x = namespace(a=1) %}{{ range(3) | list | tojson }}{{ messages[0].role * 3 }}"
    return [usual.encode(), odd.encode(), b"{{ raise_exception('x') }}{{ strftime_now('%Y') }}"]


SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "scans": _scans,
    "heads": _heads,
    "openai": _openai,
    "results": _results,
    "events": _events,
    "queries": _queries,
    "http_heads": _http_heads,
    "tokens": lambda: [b"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJtZSJ9.c2ln", b"..", b"a.b"],
    "adapter_config": _adapter_config,
    "safetensors_head": _safetensors,
    "archive": _archive,
    "gguf": _gguf,
    "model_folder": _model_folder,
    "chat_template": _templates,
    "retry_headers": lambda: [
        b"3",
        b"1.5",
        b"Wed, 21 Oct 2026 07:28:00 GMT",
        b"-1",
        b"nan",
        b"1e999",
    ],
    "settings": lambda: [
        b'port = 1\nhost = "::1"\nlong_poll_s = 3.5\nbase_models = ["a=b"]\n',
        b"12",
    ],
}
TARGETS: list[Callable[[bytes], None]] = [
    scans,
    heads,
    openai,
    results,
    events,
    queries,
    http_heads,
    tokens,
    adapter_config,
    safetensors_head,
    archive,
    gguf,
    model_folder,
    chat_template,
    retry_headers,
    settings,
]
