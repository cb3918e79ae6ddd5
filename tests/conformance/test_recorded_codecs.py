"""Every recorded body of the official client passes through our codecs and comes out equal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import compare
import pytest

from tinkex.wire import json_codec, proto_training, routes, tinkex_pb2

RECORDED = Path(__file__).parent / "recorded"
FILES = sorted(RECORDED.glob("*.json"))


def requests_of(path: Path) -> list[dict[str, Any]]:
    seen = json.loads(path.read_text())["requests"]
    # Telemetry is recorded as a shape only.
    return [request for request in seen if request["path"] != "/api/v1/telemetry"]


def route_of(request: dict[str, Any]) -> routes.Route[Any, Any]:
    """The most literal row of our table that has this method and path."""
    found = [
        route
        for route in routes.ROUTES
        if route.method == request["method"] and pattern(route.path).fullmatch(request["path"])
    ]
    assert found, f"no route for {request['method']} {request['path']}"
    return min(found, key=lambda route: route.path.count("{"))


def pattern(template: str) -> re.Pattern[str]:
    checkpoint = re.escape("{ckpt}")
    whole = re.escape(template).replace(checkpoint, "[^/]+/[^/]+")
    return re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", whole))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recorded_request_has_a_route_that_fits_it(path: Path) -> None:
    for request in requests_of(path):
        route = route_of(request)
        assert set(request.get("query", ())) <= set(route.query or ()), route.name
        has_body = request["body"] is not None or "body_hex" in request
        assert has_body == (route.request_encoding != "none"), route.name


@pytest.mark.req("S6")
@pytest.mark.req("S12")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recorded_json_bodies_come_out_as_they_went_in(path: Path) -> None:
    for request in requests_of(path):
        if request["body"] is None:
            continue
        kind = route_of(request).request
        assert kind is not None, request["path"]
        value = json_codec.decode(kind, json.dumps(request["body"]))
        assert json.loads(json_codec.encode(value)) == request["body"], request["path"]


@pytest.mark.parametrize(
    "path", [path for path in FILES if "body_hex" in path.read_text()], ids=lambda path: path.stem
)
def test_recorded_training_bodies_come_out_as_they_went_in(path: Path) -> None:
    for request in requests_of(path):
        if "body_hex" not in request:
            continue
        body = bytes.fromhex(request["body_hex"])
        read = proto_training.decode_forward_backward(body)
        written = proto_training.encode_forward_backward(
            model_id=read.model_id,
            seq_id=read.seq_id,
            data=read.data,
            loss_fn=read.loss_fn,
            loss_fn_config=read.loss_fn_config,
            forward_only=read.forward_only,
        )
        assert with_shapes(written) == with_shapes(body)
        if compare.is_deterministic(body) and not lacks_a_shape(body):
            assert written == body


def tensors(message: tinkex_pb2.ForwardBackwardRequest) -> list[Any]:
    return [tensor for datum in message.data for tensor in datum.loss_fn_inputs.values()]


def lacks_a_shape(body: bytes) -> bool:
    message = tinkex_pb2.ForwardBackwardRequest.FromString(body)
    return any(not tensor.shape for tensor in tensors(message))


def with_shapes(body: bytes) -> str:
    """The canonical body, an absent shape replaced by what it means: one dimension."""
    message = tinkex_pb2.ForwardBackwardRequest.FromString(body)
    for tensor in tensors(message):
        if not tensor.shape:
            item_bytes = 8 if tensor.dtype == tinkex_pb2.DTYPE_INT64 else 4
            tensor.shape.append(len(tensor.dense) // item_bytes)
    return message.SerializeToString(deterministic=True).hex()
