"""What two SDKs must have in common, out of all that a server saw of them.

Left out: heartbeats, how often settings are fetched, how often a result is polled for, and
the version each SDK says it is. Everything else must be there, equal, on both sides.
"""

from __future__ import annotations

import json
from typing import Any

from tinkex.wire import tinkex_pb2

Request = dict[str, Any]

COMPARED_HEADERS = (
    "accept",
    "content-encoding",
    "content-type",
    "x-api-key",
    "x-scenario",
    "x-sdk-method",
    "x-tinker-request-type",
    "x-tinker-sampling-backpressure",
    "x-tinker-weights-access-token",
)
BACKGROUND = {"/api/v1/session_heartbeat", "/api/v1/telemetry"}
# Asked for once by one SDK and several times by another, depending on what is ready when.
REPEATED = {
    "/api/v1/client/config",
    "/api/v1/client/dynamic_config",
    "/api/v1/retrieve_future",
    "/api/v1/retrieve_futures",
}


def canonical_training_body(body: bytes) -> dict[str, Any]:
    """A protobuf request as bytes that do not depend on the order of its maps."""
    message = tinkex_pb2.ForwardBackwardRequest.FromString(body)
    return {"protobuf": message.SerializeToString(deterministic=True).hex()}


def is_deterministic(body: bytes) -> bool:
    """Whether the bytes are the only encoding of this content: no map has two entries."""
    message = tinkex_pb2.ForwardBackwardRequest.FromString(body)
    maps = [message.loss_fn_config, message.loss_fn_config_v2]
    maps += [datum.loss_fn_inputs for datum in message.data]
    return all(len(entries) < 2 for entries in maps)


def comparable(request: Request) -> Request:
    """One request without what may differ."""
    path = request["path"]
    headers = {
        name: value for name, value in request["headers"].items() if name in COMPARED_HEADERS
    }
    if path == "/api/v1/weights_info":
        # The official client resumes through its REST client, which names its method here.
        headers.pop("x-sdk-method", None)
    if request["body"] is None and "body_hex" not in request:
        # The official client declares JSON for empty bodies too; it means nothing.
        headers.pop("content-type", None)
    body = request["body"]
    if "body_hex" in request:
        body = canonical_training_body(bytes.fromhex(request["body_hex"]))
    elif path == "/api/v1/retrieve_future":
        body = {"request_id": body["request_id"]}
    elif path == "/api/v1/retrieve_futures":
        body = {"target": body["target"]}
    seen: Request = {"method": request["method"], "path": path, "headers": headers, "body": body}
    if "query" in request:
        seen["query"] = request["query"]
    return seen


def _text(request: Request) -> str:
    return json.dumps(request, sort_keys=True)


def submissions(requests: list[Request]) -> list[str]:
    """Every request that says something once, in the order in which it came."""
    skipped = BACKGROUND | REPEATED
    return [_text(comparable(request)) for request in requests if request["path"] not in skipped]


def repeated(requests: list[Request]) -> list[str]:
    """The different settings fetches and polls."""
    return sorted(
        {_text(comparable(request)) for request in requests if request["path"] in REPEATED}
    )


def training_bodies(requests: list[Request]) -> dict[tuple[str, int], bytes]:
    """The raw protobuf bodies by the model and number they carry."""
    bodies: dict[tuple[str, int], bytes] = {}
    for request in requests:
        if "body_hex" in request:
            raw = bytes.fromhex(request["body_hex"])
            message = tinkex_pb2.ForwardBackwardRequest.FromString(raw)
            bodies[message.model_id, message.seq_id] = raw
    return bodies


def result_differences(ours: Any, theirs: Any, path: str = "result") -> list[str]:
    """Where our caller saw something else. An error may be caught by more names, not by fewer."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if "raised" in theirs and "raised" in ours:
            missing = set(theirs["raised"]) - set(ours["raised"])
            return (
                [f"{path}: {ours['raised']} is not caught by {sorted(missing)}"] if missing else []
            )
        if theirs.keys() == ours.keys():
            pairs = [(f"{path}[{name!r}]", ours[name], theirs[name]) for name in theirs]
            return [line for at, a, b in pairs for line in result_differences(a, b, at)]
    if isinstance(theirs, list) and isinstance(ours, list) and len(ours) == len(theirs):
        pairs = [(f"{path}[{n}]", a, b) for n, (a, b) in enumerate(zip(ours, theirs, strict=True))]
        return [line for at, a, b in pairs for line in result_differences(a, b, at)]
    return [] if ours == theirs else [f"{path}: ours {ours!r}, theirs {theirs!r}"]


def differences(ours: list[str], theirs: list[str]) -> str:
    """The lines that only one side has, for an assertion message."""
    left, right = list(ours), list(theirs)
    for line in theirs:
        if line in left:
            left.remove(line)
    for line in ours:
        if line in right:
            right.remove(line)
    return (
        "\n".join(
            [
                *(f"only ours:   {line}" for line in left),
                *(f"only theirs: {line}" for line in right),
            ]
        )
        or "another order"
    )
