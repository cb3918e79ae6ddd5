"""What a training operation answers: outputs per datum, and metrics."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tinkex.errors import InputError
from tinkex.types import ForwardBackwardOutput, TensorData

if TYPE_CHECKING:
    from torch import Tensor

    from tinkex.engine.training.examples import Job
    from tinkex.engine.training.passes import TrainingWork

OUTPUT_TYPE = "ArrayRecord"


def train_output(work: TrainingWork) -> ForwardBackwardOutput:
    """Per datum `logprobs` (and `elementwise_loss`) in the shape of its targets; plain sums."""
    job = work.job
    logprobs_M = torch.cat(work.logprobs)
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
    return ForwardBackwardOutput(OUTPUT_TYPE, _outputs(job, columns), metrics)


def _outputs(job: Job, columns: dict[str, Tensor]) -> list[dict[str, TensorData]]:
    outputs: list[dict[str, TensorData]] = []
    start = 0
    for example in job.examples:
        stop = start + example.targets.size
        outputs.append(
            {
                # A copy: a view would keep the whole column alive with each datum.
                name: TensorData.from_torch(column[start:stop].clone().view(example.shape))
                for name, column in columns.items()
            }
        )
        start = stop
    return outputs


def _custom_metrics(job: Job, logprobs_M: Tensor) -> dict[str, float]:
    """Losses add; metrics add or average over the data, as their names say."""
    assert job.custom is not None
    total = 0.0
    sums: dict[str, float] = {}
    start = 0
    for example in job.examples:
        p = logprobs_M[start : start + example.targets.size].view(example.shape)
        start += example.targets.size
        value, metrics = job.custom.evaluate(p, dict(example.values))
        total += float(value)
        for name, number in metrics.items():
            sums[name] = sums.get(name, 0.0) + number
    count = len(job.examples)
    folded = {
        name: number / count if name.endswith(":mean") else number for name, number in sums.items()
    }
    return {"loss:sum": total, **folded}
