"""Joins the results of a call that was sent in several chunks. Pure."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tinkex.types.training import ForwardBackwardOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_log = logging.getLogger(__name__)
_UINT64 = (1 << 64) - 1


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
