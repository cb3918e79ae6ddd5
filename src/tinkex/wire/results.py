"""What a future's answer means, and the same answers from the server's side.

Pure functions over one successful HTTP answer of `retrieve_future`: the tests of the
protocol, in the protocol's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from tinkex.errors import ErrorCategory, InputError
from tinkex.wire import json_codec
from tinkex.wire.json_results import (
    read_forward_backward_output,
    read_sample_response,
    write_forward_backward_output,
    write_sample_response,
)
from tinkex.wire.proto_sampling import decode_sample_response, encode_sample_response
from tinkex.wire.proto_training import (
    decode_forward_backward_output,
    encode_forward_backward_output,
)
from tinkex.wire.routes import MEDIA_JSON, MEDIA_PROTOBUF, ROUTES, RequestType

if TYPE_CHECKING:
    from collections.abc import Sequence

QueueState = Literal["active", "paused_rate_limit", "paused_capacity", "unknown"]

# Results that travel as protobuf when the reader accepts it.
PROTOBUF_RESULTS: frozenset[RequestType] = frozenset({"Sample", "Forward", "ForwardBackward"})

_RESULT_TYPES: dict[str, type[Any]] = {
    route.request_type: route.future
    for route in ROUTES
    if route.request_type is not None and route.future is not None
}
_QUEUE_STATES: dict[Any, QueueState] = {
    "active": "active",
    "paused_rate_limit": "paused_rate_limit",
    "paused_capacity": "paused_capacity",
}
_CATEGORIES: dict[str, ErrorCategory] = {"unknown": "unknown", "server": "server", "user": "user"}


@dataclass(frozen=True, slots=True)
class PendingResult:
    """Not done yet. The state is `unknown` where the server does not give one.

    `position` is how many operations run first, where the server says so.
    """

    queue_state: QueueState = "unknown"
    reason: str | None = None
    position: int | None = None


@dataclass(frozen=True, slots=True)
class MetadataOnly:
    """Done, but the payload of this size must be asked for."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class FailedResult:
    """Accepted, and failed later."""

    error: str
    category: ErrorCategory


@dataclass(frozen=True, slots=True)
class ReadyResult:
    """The result itself."""

    value: Any


Outcome = PendingResult | MetadataOnly | FailedResult | ReadyResult


# The Accept header for polling a result of each kind.
ACCEPT: dict[RequestType, str] = {
    kind: MEDIA_PROTOBUF if kind in PROTOBUF_RESULTS else MEDIA_JSON
    for kind in get_args(RequestType)
}


def decode_result(
    request_type: RequestType,
    content_type: str,
    body: bytes,
    sequence_ids: Sequence[str] | None = None,
) -> Outcome:
    """Read a 200 answer; raises InputError when it breaks the protocol.

    `sequence_ids` are those of the future's envelope; a sample needs them.
    """
    if MEDIA_PROTOBUF in content_type.lower():
        if request_type == "Sample":
            if sequence_ids is None:
                raise _no_sequence_ids()
            return ReadyResult(decode_sample_response(body, sequence_ids))
        if request_type in PROTOBUF_RESULTS:
            return ReadyResult(decode_forward_backward_output(body))
        raise InputError(f"a {request_type} result is JSON, not protobuf", "content-type")
    answer = json_codec.decode_object(body)
    if answer.get("type") == "try_again":
        return _pending(answer)
    if answer.get("status") == "complete_metadata":
        return MetadataOnly(_size(answer.get("response_payload_size")))
    if "error" in answer:
        return FailedResult(_message(answer["error"]), parse_category(answer.get("category")))
    return ReadyResult(_decode_json(request_type, answer, sequence_ids))


def decode_pending(body: bytes) -> PendingResult | None:
    """The queue state that a 408 carries; None when it was not written by the API.

    Something between client and server answers a 408, too, when it gave up waiting.
    """
    try:
        return _pending(json_codec.decode_object(body))
    except InputError:
        return None


def parse_category(value: Any) -> ErrorCategory:
    """An error category in any case; one that is not known is `unknown`."""
    return _CATEGORIES.get(value.lower(), "unknown") if isinstance(value, str) else "unknown"


def encode_result(
    request_type: RequestType,
    outcome: Outcome,
    *,
    request_id: str = "",
    accept: str = MEDIA_PROTOBUF,
) -> tuple[str, bytes]:
    """The media type and body of an answer, for a reader that sent this Accept header."""
    if isinstance(outcome, ReadyResult):
        return encode_value(request_type, outcome.value, accept=accept)
    return MEDIA_JSON, json_codec.encode(_answer(outcome, request_id))


def encode_value(
    request_type: RequestType, value: Any, *, accept: str = MEDIA_PROTOBUF
) -> tuple[str, bytes]:
    """The media type and body of a result."""
    binary = MEDIA_PROTOBUF in accept.lower()
    if request_type == "Sample":
        if binary:
            return MEDIA_PROTOBUF, encode_sample_response(value)
        return MEDIA_JSON, json_codec.encode(write_sample_response(value))
    if request_type in PROTOBUF_RESULTS:
        if binary:
            return MEDIA_PROTOBUF, encode_forward_backward_output(value)
        return MEDIA_JSON, json_codec.encode(write_forward_backward_output(value))
    return MEDIA_JSON, json_codec.encode(value)


def _answer(
    outcome: PendingResult | MetadataOnly | FailedResult, request_id: str
) -> dict[str, Any]:
    if isinstance(outcome, FailedResult):
        return {"error": outcome.error, "category": outcome.category}
    if isinstance(outcome, MetadataOnly):
        return {
            "status": "complete_metadata",
            "request_id": request_id,
            "response_payload_size": outcome.size_bytes,
        }
    answer = {"type": "try_again", "request_id": request_id}
    if outcome.queue_state != "unknown":
        answer["queue_state"] = outcome.queue_state
    if outcome.reason is not None:
        answer["queue_state_reason"] = outcome.reason
    return answer


def _pending(answer: dict[str, Any]) -> PendingResult:
    state, reason = answer.get("queue_state"), answer.get("queue_state_reason")
    progress = answer.get("progress")
    place = cast("dict[str, Any]", progress).get("position") if isinstance(progress, dict) else None
    return PendingResult(
        _QUEUE_STATES.get(state, "unknown") if isinstance(state, str) else "unknown",
        reason if isinstance(reason, str) and reason else None,
        place if type(place) is int and place >= 0 else None,
    )


def _size(value: Any) -> int:
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise InputError("expected a number of bytes", "response_payload_size")
    return value


def _message(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json_codec.encode(value).decode()


def _decode_json(
    request_type: RequestType, answer: dict[str, Any], sequence_ids: Sequence[str] | None
) -> Any:
    if request_type == "Sample":
        if sequence_ids is None:
            raise _no_sequence_ids()
        return read_sample_response(answer, sequence_ids)
    if request_type in PROTOBUF_RESULTS:
        return read_forward_backward_output(answer)
    metrics = answer.get("metrics")
    if isinstance(metrics, dict):
        numbers = cast("dict[str, Any]", metrics)
        answer["metrics"] = {
            name: json_codec.number_from_json(value) for name, value in numbers.items()
        }
    return json_codec.convert(_RESULT_TYPES[request_type], answer)


def _no_sequence_ids() -> InputError:
    return InputError("the future of a sample must carry them", "sample_sequence_ids")
