"""Results: reading answers, noting what they used, and joining those of chunks. Pure."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tinkex.errors import APIResponseValidationError, InputError, ResponseInfo
from tinkex.spans import span
from tinkex.types import Usage
from tinkex.types.training import ForwardBackwardOutput
from tinkex.wire.results import decode_result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.transport.base import Reply
    from tinkex.wire import routes
    from tinkex.wire.results import Failed, MetadataOnly, Pending, Ready

_log = logging.getLogger(__name__)
_UINT64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Ticket:
    """An accepted request whose result can be asked for."""

    request_id: str
    request_type: routes.RequestType
    sequence_ids: Sequence[str] | None = None
    round_trip_s: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A result and what the server says it cost; times are None when it does not say."""

    value: Any
    queue_s: float | None = None
    device_s: float | None = None


def read_answer(ticket: Ticket, reply: Reply) -> Pending | MetadataOnly | Failed | Ready:
    """What a reply to a poll says."""
    media_type = reply.headers.get("content-type", "")
    try:
        with span("futures.decode", request_id=ticket.request_id, size_bytes=len(reply.body)):
            return decode_result(ticket.request_type, media_type, reply.body, ticket.sequence_ids)
    except InputError as error:
        response = ResponseInfo(reply.status, {"content-type": media_type})
        raise APIResponseValidationError(
            response, None, f"{ticket.request_type} {ticket.request_id}: {error}"
        ) from error


def read_usage(value: Any, usage_header: str | None) -> Result:
    """A value with the times that the server gave in its header, if it did."""
    if not usage_header:
        return Result(value)
    try:
        usage = msgspec.json.decode(usage_header, type=dict[str, float | None])
    except msgspec.MsgspecError:
        return Result(value)  # a server with another idea of this header; its result still counts
    return Result(value, usage.get("queue_s"), usage.get("device_s"))


def charge(result: Result, value: object, **tokens: int) -> Usage:
    """Note on `value` what it used: tokens as counted here, times as the server gave them."""
    usage = Usage(**tokens, queue_s=result.queue_s, device_s=result.device_s)
    # The value was decoded a moment ago and nobody else has seen it, so it is still ours to write.
    if isinstance(value, msgspec.Struct):
        msgspec.structs.force_setattr(value, "usage", usage)
    else:
        object.__setattr__(value, "usage", usage)
    return usage


def combine(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """One output for all chunks: data in order, each metric reduced by its suffix."""
    first = outputs[0]
    usages = [output.usage for output in outputs if output.usage is not None]
    return ForwardBackwardOutput(
        loss_fn_output_type=first.loss_fn_output_type,
        loss_fn_outputs=[item for output in outputs for item in output.loss_fn_outputs],
        metrics=_reduce_metrics(outputs),
        usage=sum(usages[1:], start=usages[0]) if usages else None,
    )


def _reduce_metrics(outputs: Sequence[ForwardBackwardOutput]) -> dict[str, float]:
    if len(outputs) == 1:
        plain = {k: v for k, v in outputs[0].metrics.items() if k.count(":") != 1}
    else:
        plain = {}
    weights = [float(len(output.loss_fn_outputs)) for output in outputs]
    reduced: dict[str, float] = {}
    for key in outputs[0].metrics:
        if key in plain:
            # Not a reducible name, but with a single chunk there is nothing to reduce.
            reduced[key] = plain[key]
        elif all(key in output.metrics for output in outputs):
            values = [output.metrics[key] for output in outputs]
            reduced.update(_reduce(key, values, weights))
    return reduced


def _reduce(key: str, values: list[float], weights: list[float]) -> dict[str, float]:
    name, _, suffix = key.rpartition(":")
    if suffix == "unique":
        return {key if i == 0 else f"{key}_{i}": value for i, value in enumerate(values)}
    rule = _RULES.get(suffix) if name and ":" not in name else None
    if rule is None:
        _log.debug("metric %r has no known reduction and was dropped", key)
        return {}
    return {key: rule(values, weights)}


def _mean(values: list[float], weights: list[float]) -> float:
    total = sum(weights)
    if total == 0:
        return sum(values) / len(values)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total


def _hash2(values: list[float], weights: list[float]) -> float:
    # An int on purpose: a float would lose the low bits.
    return sum(int(value) & _UINT64 for value in values) & _UINT64


_RULES: dict[str, Callable[[list[float], list[float]], float]] = {
    "mean": _mean,
    "sum": lambda values, weights: sum(values),
    "min": lambda values, weights: min(values),
    "max": lambda values, weights: max(values),
    "slack": lambda values, weights: max(values) - _mean(values, weights),
    "hash2": _hash2,
}
