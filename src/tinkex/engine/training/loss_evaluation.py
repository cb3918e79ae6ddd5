"""The loss of a checked operation: its gradient by the log-probabilities, and its outputs.

Shapes: M targets of some data of the operation, concatenated.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tinkex.errors import InputError
from tinkex.types import ForwardBackwardOutput, TensorData

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from tinkex.engine.training.examples import Example, TrainingJob

OUTPUT_TYPE = "ArrayRecord"


def known_gradient(job: TrainingJob, first: int, last: int) -> Tensor | None:
    """The gradient of the loss of some data, if it does not depend on the log-probabilities."""
    if job.loss is None or job.loss.constant_gradient is None:
        return None
    return job.loss.constant_gradient(job.columns(first, last))


def loss_gradient(job: TrainingJob, first: int, last: int, logprobs_M: Tensor) -> Tensor:
    """The gradient of the loss of some data by their log-probabilities."""
    if job.loss is None:
        gradient_M = _custom_gradient(job, first, last, logprobs_M)
    else:
        p = logprobs_M.double().requires_grad_()
        total = job.loss.function(p, job.columns(first, last), job.settings).elements.sum()
        (gradient_M,) = torch.autograd.grad(total, p)
    if not bool(gradient_M.isfinite().all()):
        raise InputError(
            f"its gradient is not finite for data[{first}:{last}]: the ratio of new to "
            "old probabilities may be too large; check logprobs",
            "loss",
        )
    return gradient_M


def _custom_gradient(job: TrainingJob, first: int, last: int, logprobs_M: Tensor) -> Tensor:
    assert job.custom is not None
    found: list[Tensor] = []
    for example, own in _by_example(job.examples[first:last], logprobs_M):
        p = own.clone().requires_grad_()
        value, _ = job.custom.evaluate(p, dict(example.values))
        found.append(_derivative(value, p).flatten())
    return torch.cat(found).double()


def _derivative(value: Tensor, p: Tensor) -> Tensor:
    if not value.requires_grad:  # a loss that does not depend on the log-probabilities
        return torch.zeros_like(p)
    try:
        (found,) = torch.autograd.grad(value, p, allow_unused=True)
    except RuntimeError as error:
        raise InputError(f"has no gradient: {error}", "graph") from error
    return torch.zeros_like(p) if found is None else found  # pyright: ignore[reportUnnecessaryComparison] -- allow_unused


def train_output(job: TrainingJob, logprobs: Sequence[Tensor]) -> ForwardBackwardOutput:
    """Per datum `logprobs` (and `elementwise_loss`) in the shape of its targets; plain sums."""
    logprobs_M = torch.cat(list(logprobs))
    columns = {"logprobs": logprobs_M}
    if job.loss is None:
        metrics = _custom_metrics(job, logprobs_M)
    else:
        value = job.loss.function(
            logprobs_M.double(), job.columns(0, len(job.examples)), job.settings
        )
        columns["elementwise_loss"] = value.elements.float()
        metrics = {"loss:sum": float(value.elements.sum()), **value.metrics}
    if not math.isfinite(metrics["loss:sum"]):
        raise InputError(
            "is not finite: the ratio of new to old probabilities may be too large; check logprobs",
            "loss",
        )
    metrics["tokens:sum"] = float(sum(job.lengths))
    outputs: list[dict[str, TensorData]] = [{} for _ in job.examples]
    for name, column_M in columns.items():
        for output, (_, own) in zip(outputs, _by_example(job.examples, column_M), strict=True):
            # A copy: a view would keep the whole column alive with each datum.
            output[name] = TensorData.from_torch(own.clone())
    return ForwardBackwardOutput(OUTPUT_TYPE, outputs, metrics)


def _custom_metrics(job: TrainingJob, logprobs_M: Tensor) -> dict[str, float]:
    """Losses add; metrics add or average over the data, as their names say."""
    assert job.custom is not None
    total = 0.0
    sums: dict[str, float] = {}
    for example, p in _by_example(job.examples, logprobs_M):
        value, metrics = job.custom.evaluate(p, dict(example.values))
        total += float(value)
        for name, number in metrics.items():
            sums[name] = sums.get(name, 0.0) + number
    count = len(job.examples)
    folded = {
        name: number / count if name.endswith(":mean") else number for name, number in sums.items()
    }
    return {"loss:sum": total, **folded}


def _by_example(examples: Sequence[Example], column_M: Tensor) -> Iterator[tuple[Example, Tensor]]:
    """Each example with its part of a column, in the shape of its targets."""
    parts = column_M.split_with_sizes([example.targets.size for example in examples])
    for example, part in zip(examples, parts, strict=True):
        yield example, part.view(example.shape)
