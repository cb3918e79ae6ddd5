"""From rendered examples to what a pass is given, and from its answer to numbers."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tinkex.errors import InputError, ResultError
from tinkex.loops.schedule import held_out, steps_of
from tinkex.types import Datum

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TypeVar

    from numpy.typing import NDArray

    from tinkex.chat.examples import Rendered
    from tinkex.loops.settings import Settings
    from tinkex.types import ForwardBackwardOutput

    T = TypeVar("T")


def weighted(rendered: Rendered, factor: float) -> Datum:
    """The example with the weights of its trained tokens multiplied."""
    datum = rendered.datum()
    weights = np.asarray(rendered.weights[1:], np.float32) * np.float32(factor)
    inputs = cast("dict[str, Any]", {**datum.loss_fn_inputs, "weights": weights})
    return Datum(datum.model_input, inputs)


def trained_weight(examples: Iterable[Rendered]) -> float:
    """What the weights of all trained tokens come to: their number, as a rule."""
    return sum(sum(one.weights[1:]) for one in examples)


def tokens_of(examples: Iterable[Rendered]) -> int:
    """How many tokens there are, context included."""
    return sum(len(one.tokens) for one in examples)


def loss_of(output: ForwardBackwardOutput) -> float:
    """The summed loss of a pass."""
    loss = output.metrics.get("loss:sum")
    if loss is None:
        raise ResultError("the server's answer lacks the metric loss:sum")
    return loss


def trained_logprobs(rendered: Rendered, output: dict[str, Any]) -> float:
    """The log-probability of everything in an example that is trained."""
    found: NDArray[Any] = np.asarray(output["logprobs"].to_numpy(), np.float64)
    return float(found @ np.asarray(rendered.weights[1:], np.float64))


def fingerprint(parts: Iterable[Sequence[Rendered]]) -> str:
    """A hash of tokens and weights: what a run is really trained on."""
    known = hashlib.sha256()
    for part in parts:
        known.update(f"{len(part)} examples".encode())
        for one in part:
            known.update(np.asarray(one.tokens, "<i8").tobytes())
            known.update(np.asarray(one.weights, "<f8").tobytes())
    return known.hexdigest()


def split(examples: list[T], fraction: float | None, seed: int) -> tuple[list[T], list[T]]:
    """What is trained, and what is held out from it to evaluate with."""
    if fraction is None:
        return examples, []
    if len(examples) < 2:
        raise InputError("needs at least two examples, one of them to train on", "eval_fraction")
    out = held_out(len(examples), fraction, seed)
    return (
        [one for number, one in enumerate(examples) if number not in out],
        [one for number, one in enumerate(examples) if number in out],
    )


def total_steps(settings: Settings, epochs: int, examples: int) -> int:
    """How long the run is."""
    total = settings.steps or steps_of(epochs, settings.batch_size, examples)
    if settings.warmup >= total:
        raise InputError(f"must be fewer than the {total} steps of the run", "warmup")
    return total


def counted(number: int, noun: str) -> str:
    """A number of things, as people write it."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
