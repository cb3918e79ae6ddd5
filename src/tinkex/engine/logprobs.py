"""From logits to log-probabilities: the one way in training, for prompts and while sampling.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def exponentials_(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits into exp(logit - largest of the row), in place.

    Returns what to subtract from a logit to get its log-probability, and the sum of the
    exponentials, both [R, 1].
    """
    largest_R1 = logits_RV.amax(1, keepdim=True)
    logits_RV.sub_(largest_R1).exp_()
    # A lone long row would be cut between threads and its parts added up in another order.
    rows_RV = logits_RV.expand(2, -1) if logits_RV.shape[0] == 1 else logits_RV
    total_R1 = rows_RV.sum(1, keepdim=True)[: logits_RV.shape[0]]
    return largest_R1 + total_R1.log(), total_R1


def normalizers(logits_RV: Tensor) -> Tensor:
    """What to subtract from each row's logits to get log-probabilities, [R]."""
    return weighed(logits_RV)[0]


def weighed(logits_RV: Tensor) -> tuple[Tensor, Tensor | None]:
    """The same, and the exponentials where they had to be computed for it."""
    if logits_RV.is_cuda and logits_RV.dtype == torch.float32:
        from tinkex.engine.kernels import cross_entropy

        any_token_R1 = torch.zeros_like(logits_RV[:, :1], dtype=torch.int64)
        return cross_entropy.logprobs(logits_RV, any_token_R1)[1], None
    weights_RV = logits_RV.clone()
    return exponentials_(weights_RV)[0][:, 0], weights_RV
