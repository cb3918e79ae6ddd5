"""Rendered examples as the datums of a pass, and the numbers in its output."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tinkex.errors import ResultError
from tinkex.types import Datum

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from tinkex.chat.examples import Rendered
    from tinkex.types import ForwardBackwardOutput


def weighted(rendered: Rendered, factor: float) -> Datum:
    """The example with the weights of its trained tokens multiplied by `factor`."""
    datum = rendered.datum()
    weights = np.asarray(rendered.weights[1:], np.float32) * np.float32(factor)
    inputs = cast("dict[str, Any]", {**datum.loss_fn_inputs, "weights": weights})
    return Datum(datum.model_input, inputs)


def trained_weight(examples: Iterable[Rendered]) -> float:
    """The sum of the weights of all trained tokens: usually their number."""
    return sum(sum(one.weights[1:]) for one in examples)


def tokens_of(examples: Iterable[Rendered]) -> int:
    """The number of tokens, context included."""
    return sum(len(one.tokens) for one in examples)


def loss_of(output: ForwardBackwardOutput) -> float:
    """The summed loss of a pass."""
    loss = output.metrics.get("loss:sum")
    if loss is None:
        raise ResultError("the server's answer lacks the metric loss:sum")
    return loss


def trained_logprobs(rendered: Rendered, output: dict[str, Any]) -> float:
    """The summed log-probability of the trained tokens of an example."""
    found: NDArray[Any] = np.asarray(output["logprobs"].to_numpy(), np.float64)
    return float(found @ np.asarray(rendered.weights[1:], np.float64))


def fingerprint(parts: Iterable[Sequence[Rendered]]) -> str:
    """A SHA-256 over tokens and weights: it changes when a run would train on other tokens."""
    known = hashlib.sha256()
    for part in parts:
        known.update(f"{len(part)} examples".encode())
        for one in part:
            known.update(np.asarray(one.tokens, "<i8").tobytes())
            known.update(np.asarray(one.weights, "<f8").tobytes())
    return known.hexdigest()
