"""Tickets and results of calls, and joining the results of chunks. Pure."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.errors import ResultError
from tinkex.types.training import ForwardBackwardOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.types import LossFnOutput, Usage
    from tinkex.wire import routes

T = TypeVar("T")
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
class TimedResult:
    """A result and what the server says it cost; times are None when it does not say."""

    value: Any
    queue_s: float | None = None
    device_s: float | None = None


def given(value: T | None, field: str, answer: str) -> T:
    """`value`, which the protocol says must be there."""
    if value is None:
        raise ResultError(f"the server's answer to {answer} lacks {field}")
    return value


def combine(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """One output for all chunks: data in order, each metric reduced by its suffix."""
    data: list[LossFnOutput] = []
    usage: Usage | None = None
    for output in outputs:
        data += output.loss_fn_outputs
        if output.usage is not None:
            usage = output.usage if usage is None else usage + output.usage
    return ForwardBackwardOutput(
        loss_fn_output_type=outputs[0].loss_fn_output_type,
        loss_fn_outputs=data,
        metrics=_reduce_metrics(outputs),
        usage=usage,
    )


def _reduce_metrics(outputs: Sequence[ForwardBackwardOutput]) -> dict[str, float]:
    weights = [float(len(one.loss_fn_outputs)) for one in outputs]
    reduced: dict[str, float] = {}
    for key in outputs[0].metrics:
        values = [output.metrics[key] for output in outputs if key in output.metrics]
        name, _, suffix = key.rpartition(":")
        rule = _RULES.get(suffix) if name and ":" not in name else None
        if len(outputs) == 1 and key.count(":") != 1:
            # Not a reducible name, but with a single chunk there is nothing to reduce.
            reduced[key] = values[0]
        elif len(values) < len(outputs):
            continue
        elif suffix == "unique":
            for i, value in enumerate(values):
                reduced[key if i == 0 else f"{key}_{i}"] = value
        elif rule is not None:
            reduced[key] = rule(values, weights)
        else:
            _log.debug("metric %r has no known reduction and was dropped", key)
    return reduced


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
