"""A small HTTP server that answers every route of the protocol and writes down what it was asked.

It needs the standard library only, so that it runs under any client's interpreter, and it
shares no code with tinkex: the few protobuf messages it speaks are packed by hand below.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

RUN = "session-1:train:0"
WHEN = "2026-01-02T03:04:05Z"
RECORDED_HEADERS = (
    "accept",
    "content-type",
    "content-encoding",
    "x-api-key",
    "x-idempotency-key",
    "x-scenario",
    "x-sdk-method",
    "x-tinker-request-iteration",
    "x-tinker-request-type",
    "x-tinker-sampling-backpressure",
    "x-tinker-weights-access-token",
)
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


# --- protobuf by hand -------------------------------------------------------------------------


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def packed(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def integer(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The (field number, value) pairs of one message; bytes for anything with a length."""
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = read_varint(data, at)
        elif kind == 2:
            size, at = read_varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            size = 8 if kind == 1 else 4
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def floats(values: Iterable[float]) -> bytes:
    return b"".join(struct.pack("<f", value) for value in values)


def int32s(values: Iterable[int]) -> bytes:
    return b"".join(struct.pack("<i", value) for value in values)


def int64s(values: Iterable[int]) -> bytes:
    return b"".join(struct.pack("<q", value) for value in values)


def shape_of(number: int, shape: list[int]) -> bytes:
    return packed(number, b"".join(varint(size) for size in shape)) if shape else b""


def target_shape(datum: bytes) -> list[int]:
    """The dense shape of a datum's `target_tokens`, `[1]` where it has none."""
    for number, entry in fields(datum):
        if number != 2:
            continue
        pair = dict(fields(entry))
        if pair[1] != b"target_tokens":
            continue
        tensor = dict(fields(pair.get(2, b"")))
        if 4 in tensor:
            shape, at = [], 0
            while at < len(tensor[4]):
                size, at = read_varint(tensor[4], at)
                shape.append(size)
            return shape
        return [len(tensor.get(1, b"")) // 8]
    return [1]


def forward_backward_output(request: bytes) -> bytes:
    """One record per datum, log-probabilities -1, and the loss metrics the clients fold."""
    out = packed(1, b"ArrayRecord")
    tokens = 0
    for number, datum in fields(request):
        if number != 3:
            continue
        shape = target_shape(datum)
        count = 1
        for size in shape:
            count *= size
        tokens += count
        data = floats([-1.0] * count)
        tensor = packed(1, data) + packed(2, int64s([0, len(data)])) + integer(3, 1)
        tensor += shape_of(4, shape[1:])
        entry = packed(1, b"logprobs") + packed(2, tensor)
        out += packed(2, packed(2, entry) + integer(3, 1))
    for name, value in {"loss:sum": float(tokens), "clipped:mean": 0.25}.items():
        out += packed(3, packed(1, name.encode()) + b"\x11" + struct.pack("<d", value))
    return out


def sample_response(request: dict[str, Any]) -> bytes:
    """Two tokens per sample, and every extra that the request asks for."""
    prompt = sum(len(chunk.get("tokens", [0])) for chunk in request["prompt"]["chunks"])
    topk_sampled = request.get("topk_sample_logprobs", 0)
    out = b""
    for index in range(request["num_samples"]):
        sequence = integer(1, 1) + packed(2, int32s([7 + index, 8]))
        sequence += packed(3, floats([-0.5, -0.25]))
        if topk_sampled:
            sequence += packed(4, topk(2, topk_sampled))
        out += packed(1, sequence)
    if request.get("prompt_logprobs"):
        skipped = prompt - request.get("prompt_logprobs_last_n", prompt - 1)
        out += packed(2, floats([float("nan")] * skipped + [-1.5] * (prompt - skipped)))
    if k := request.get("topk_prompt_logprobs", 0):
        out += packed(3, topk(prompt, k))
    out += integer(4, 3)
    if target := request.get("target_prompt_logprobs"):
        out += packed(5, like(target))
    if k := request.get("prompt_alt_tokens_k", 0):
        cells = (prompt - 1) * k
        tokens = packed(1, int64s(range(cells))) + integer(3, 2) + shape_of(4, [prompt - 1, k])
        logprobs = packed(1, floats([-2.0] * cells)) + integer(3, 1) + shape_of(4, [prompt - 1, k])
        out += packed(6, packed(1, tokens) + packed(2, logprobs))
    return out


def topk(length: int, k: int) -> bytes:
    ids = int32s(range(length * k))
    values = floats([-float(cell) for cell in range(length * k)])
    return packed(1, ids) + packed(2, values) + integer(3, k) + integer(4, length)


def like(tensor: dict[str, Any]) -> bytes:
    """A float32 tensor of the same shape and layout, -0.75 in every stored cell."""
    values = floats([-0.75] * len(tensor["data"]))
    if "sparse_crow_indices" in tensor:
        csr = packed(1, values) + packed(2, int64s(tensor["sparse_crow_indices"]))
        body = packed(2, csr + packed(3, int64s(tensor["sparse_col_indices"])))
    else:
        body = packed(1, values)
    return body + integer(3, 1) + shape_of(4, tensor["shape"])


# --- plain replies ----------------------------------------------------------------------------

CHECKPOINT = {
    "checkpoint_id": "weights/a",
    "checkpoint_type": "training",
    "time": WHEN,
    "tinker_path": f"tinker://{RUN}/weights/a",
    "size_bytes": 10,
    "public": False,
}
TRAINING_RUN = {
    "training_run_id": RUN,
    "base_model": "tinkex/tiny",
    "model_owner": "owner",
    "is_lora": True,
    "lora_rank": 8,
    "last_request_time": WHEN,
    "last_checkpoint": CHECKPOINT,
}
CURSOR = {"offset": 0, "limit": 20, "total_count": 1}
SEARCH_HIT = {
    "session_id": "session-1",
    "created_at": WHEN,
    "owner": "owner",
    "project_id": "project",
    "checkpoints_count": 2,
    "status": {"type": "client_finished", "reason": {"type": "success"}},
}
BILLING = {
    "data": [
        {
            "bucket_start": WHEN,
            "bucket_end": WHEN,
            "event_info": {"type": "sampling_prefill", "cached": True, "token_count": 3},
        }
    ],
    "sessions": {"session-1": {"user_metadata": {"a": "b"}}},
}
STORAGE = {"data": [{"checkpoint_count": 1, "size_bytes": 2, "size_gigabytes": 0.5}]}
WEIGHTS_INFO = {"base_model": "tinkex/tiny", "is_lora": True, "lora_rank": 8, "train_mlp": False}
CAPABILITIES = {"supported_models": [{"model_name": "tinkex/tiny", "max_context_length": 4096}]}
# Unsigned; clients read the claims and never check who made it. It expires in 2100.
CLAIMS = {"sub": "user:1", "org_id": "org-1", "email": "", "iss": "passport-x", "exp": 4102444800}
JWT = ".".join(
    base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")
    for part in ({"alg": "none"}, CLAIMS, {})
)
INFO = {
    "model_data": {"arch": "llama", "model_name": "tinkex/tiny", "tokenizer_id": "org/tok:1"},
    "model_id": RUN,
    "is_lora": True,
    "lora_rank": 8,
    "model_name": "tinkex/tiny",
}
RESULTS: dict[str, dict[str, Any]] = {
    "optim_step": {"metrics": {"grad_norm": 0.5}},
    "load_weights": {"path": f"tinker://{RUN}/weights/a"},
    "create_custom_loss": {"loss_id": "loss-1"},
}
REPLIES: dict[str, dict[str, Any]] = {
    "POST auth/token": {"jwt": JWT},
    "POST session_heartbeat": {},
    "POST telemetry": {"status": "accepted"},
    "POST get_info": INFO,
    "POST weights_info": WEIGHTS_INFO,
    "POST copy_weights": {"tinker_path": "tinker://copy/weights/a"},
    "POST join_sampling_session": {"client_counter": 4},
    "POST cancel_future": {},
    "GET get_server_capabilities": CAPABILITIES,
    "GET healthz": {"status": "ok"},
    "GET training_runs": {"training_runs": [TRAINING_RUN], "cursor": CURSOR},
    "GET training_runs/{run}": TRAINING_RUN,
    "GET training_runs/{run}/checkpoints": {"checkpoints": [CHECKPOINT]},
    "GET checkpoints": {"checkpoints": [CHECKPOINT], "cursor": CURSOR},
    "GET training_runs/{run}/checkpoints/{ckpt}/external_weights_urls": {
        "urls": {"adapter_config.json": "http://127.0.0.1:9/a"},
        "expires": WHEN,
    },
    "GET sessions": {"sessions": ["session-1"]},
    "GET sessions/{id}": {"training_run_ids": [RUN], "sampler_ids": ["session-1:sample:0"]},
    "GET sessions/{id}/trace_export": {"status": "ready", "url": "http://127.0.0.1:9/t"},
    "POST sessions/search": {
        "sessions": [SEARCH_HIT],
        "next_cursor": {"last_created_at": WHEN, "last_session_id": "session-1"},
    },
    "GET audit": {"entries": [{"timestamp": WHEN, "event": "checkpoint.created"}]},
    "GET billing/usage/events": BILLING,
    "GET billing/usage/checkpoints/current": STORAGE,
}
TEMPLATES = tuple(
    (re.compile(pattern + "$"), template)
    for pattern, template in (
        (r"sessions/search", "sessions/search"),
        (r"training_runs/[^/]+/checkpoints/[^/]+/[^/]+/external_weights_urls",
         "training_runs/{run}/checkpoints/{ckpt}/external_weights_urls"),
        (r"training_runs/[^/]+/checkpoints", "training_runs/{run}/checkpoints"),
        (r"training_runs/[^/]+", "training_runs/{run}"),
        (r"sessions/[^/]+/trace_export", "sessions/{id}/trace_export"),
        (r"sessions/[^/]+", "sessions/{id}"),
        (r"samplers/[^/]+", "samplers/{id}"),
    )
)  # fmt: skip
NO_BODY = re.compile(r"(sessions/[^/]+/(finish|project)|training_runs/.*/(publish|ttl))$")


def name_of(path: str, body: Any, raw: bytes) -> str:
    """A request id made of the keys that name a request for ever, whatever order they come in."""
    if path == "forward_backward":
        message = dict(fields(raw))
        return f"{path}/{message[1].decode()}/{message[2]}"
    owner = body.get("model_id") or body.get("sampling_session_id") or body["session_id"]
    numbers = ("seq_id", "model_seq_id", "custom_loss_seq_id")
    return f"{path}/{owner}/{next(body[name] for name in numbers if name in body)}"


@dataclass
class Recorder:
    """What was asked (`requests`) and what is still owed (`_pending`), behind one lock."""

    config: dict[str, Any] = field(default_factory=dict)
    dynamic: dict[str, Any] = field(default_factory=dict)
    polls: tuple[dict[str, Any], ...] = ()
    hold_samples: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)
    _pending: dict[str, tuple[str, bytes, list[dict[str, Any]]]] = field(default_factory=dict)
    _sampled: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _changed: threading.Condition = field(init=False)

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self._lock)

    def answer(self, entry: dict[str, Any], raw: bytes) -> tuple[str, bytes]:
        """The media type and body for one request, which is recorded first."""
        with self._changed:
            self.requests.append(entry)
            self._changed.notify_all()
            media, body = self._reply(entry, raw)
        return media, body if isinstance(body, bytes) else json.dumps(body).encode()

    def wait_for(self, path: str, count: int = 1, timeout_s: float = 240) -> None:
        """Block until `path` was asked for `count` times."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: sum(r["path"].endswith(path) for r in self.requests) >= count, timeout_s
            )
        if not arrived:
            raise TimeoutError(f"{path} was not asked for {count} times in {timeout_s} s")

    def _reply(self, entry: dict[str, Any], raw: bytes) -> tuple[str, Any]:
        method, path = entry["method"], entry["path"].removeprefix("/api/v1/")
        if path == "client/config":
            return "application/json", self.config
        if path == "client/dynamic_config":
            return "application/json", self.dynamic
        if path == "retrieve_future":
            return self._retrieve(entry["body"]["request_id"])
        if path == "retrieve_futures":
            return "application/json", self._completions(entry["body"])
        if method == "DELETE" or NO_BODY.search(path):
            return "application/json", {}
        for pattern, template in TEMPLATES:
            if pattern.match(path):
                path = template
                break
        if path == "samplers/{id}":
            sampler = entry["path"].rsplit("/", 1)[1]
            return "application/json", {"sampler_id": sampler, "base_model": "tinkex/tiny"}
        if f"{method} {path}" in REPLIES:
            return "application/json", REPLIES[f"{method} {path}"]
        return "application/json", self._accept(path, entry["body"], raw)

    def _accept(self, path: str, body: Any, raw: bytes) -> dict[str, Any]:
        if path == "create_session":
            return {"session_id": "session-1"}
        if path == "create_sampling_session":
            number = body["sampling_session_seq_id"]
            return {"sampling_session_id": f"{body['session_id']}:sample:{number}"}
        request_id = name_of(path, body, raw)
        reply: dict[str, Any] = {"request_id": request_id}
        media = "application/json"
        if path == "forward_backward":
            media, payload = "application/x-protobuf", forward_backward_output(raw)
        elif path == "asample":
            media, payload = "application/x-protobuf", sample_response(body)
            ids = [f"sequence-{body['seq_id']}-{i}" for i in range(body["num_samples"])]
            reply["sample_sequence_ids"] = ids
            self._sampled.append(request_id)
        else:
            payload = json.dumps(self._result(path, body)).encode()
        self._pending[request_id] = (media, payload, list(self.polls))
        return reply

    def _result(self, path: str, body: Any) -> dict[str, Any]:
        if path == "create_model":
            return {"model_id": f"{body['session_id']}:train:{body['model_seq_id']}"}
        if path == "save_weights_for_sampler":
            if "path" in body:
                return {"path": f"tinker://{body['model_id']}/sampler_weights/{body['path']}"}
            return {"sampling_session_id": f"session-1:sample:{body['sampling_session_seq_id']}"}
        if path in ("save_weights", "save_weights_external"):
            kind = path.removeprefix("save_").replace("weights_external", "external_weights")
            return {"path": f"tinker://{body['model_id']}/{kind}/{body['path']}"}
        return RESULTS[path]

    def _retrieve(self, request_id: str) -> tuple[str, Any]:
        media, payload, before = self._pending[request_id]
        if self.hold_samples and request_id in self._sampled:
            self._changed.wait(5)
            return "application/json", {"type": "try_again", "request_id": request_id}
        if before:
            return "application/json", before.pop(0)
        return media, payload

    def _completions(self, body: Any) -> dict[str, Any]:
        after = body["prev_cursor"]
        self._changed.wait_for(lambda: len(self._sampled) > after, 5)
        done = [
            {
                "state": "finished",
                "request_id": request_id,
                "response_payload_uncompressed_size": len(self._pending[request_id][1]),
            }
            for request_id in self._sampled[after:]
        ]
        return {"completions": done, "cursor": len(self._sampled)}


def decompress(body: bytes) -> bytes:
    """Undo zstd with whichever library this interpreter has."""
    try:
        import zstandard
    except ImportError:
        from backports import zstd

        return zstd.decompress(body)
    return zstandard.ZstdDecompressor().decompress(body)


def describe(method: str, target: str, headers: Any, raw: bytes) -> tuple[dict[str, Any], bytes]:
    """One recorded request, with everything random replaced by its kind."""
    url = urlsplit(target)
    if headers.get("content-encoding") == "zstd":
        raw = decompress(raw)
    kept = {
        name: UUID.sub("<uuid>", value)
        for name in RECORDED_HEADERS
        if (value := headers.get(name)) is not None
    }
    entry: dict[str, Any] = {"method": method, "path": url.path}
    if url.query:
        entry["query"] = dict(parse_qsl(url.query, keep_blank_values=True))
    entry["headers"] = kept
    if headers.get("content-type") == "application/x-protobuf":
        entry["body_hex"] = raw.hex()
        entry["body"] = None
    else:
        entry["body"] = json.loads(raw) if raw else None
    if url.path == "/api/v1/telemetry":
        entry["body"] = kinds(entry["body"])
    return entry, raw


def kinds(value: Any) -> Any:
    """The shape of a telemetry body: its members and event names, not what they say."""
    if isinstance(value, dict):
        return {name: value[name] if name == "event" else kinds(value[name]) for name in value}
    if isinstance(value, list):
        return [kinds(item) for item in value]
    return type(value).__name__


def _handler(recorder: Recorder) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Replies leave in one segment; Nagle would hold small ones back for 40 ms.
        wbufsize = -1
        disable_nagle_algorithm = True

        def _serve(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length") or 0))
            entry, raw = describe(self.command, self.path, self.headers, raw)
            media, body = recorder.answer(entry, raw)
            self.send_response(200)
            self.send_header("Content-Type", media)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

        do_GET = do_POST = do_PUT = do_DELETE = _serve

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def serve(recorder: Recorder) -> Iterator[str]:
    """Serve on a free loopback port; yields the base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(recorder))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
