"""From logits to log-probabilities: the one way in training, for prompts and while sampling.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor


_SHARED: Final = 32_768
"""From so many numbers on torch shares a sum between threads."""


def exponentials_(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits into exp(logit - largest of the row), in place.

    Returns what to subtract from a logit to get its log-probability, and the sum of the
    exponentials, both [R, 1].
    """
    largest_R1 = logits_RV.amax(1, keepdim=True)
    logits_RV.sub_(largest_R1).exp_()
    total_R1 = row_sums(logits_RV)
    return largest_R1 + total_R1.log(), total_R1


def row_sums(weights_RV: Tensor) -> Tensor:
    """The sum of each row, [R, 1]."""
    if weights_RV.shape[0] > 1 or weights_RV.shape[1] < _SHARED:
        return weights_RV.sum(1, keepdim=True)
    # A lone long row would be cut between threads and its parts added up in another order.
    return weights_RV.expand(2, -1).sum(1, keepdim=True)[:1]


def normalizers(logits_RV: Tensor) -> Tensor:
    """What to subtract from each row's logits to get log-probabilities, [R]."""
    if logits_RV.is_cuda and logits_RV.dtype == torch.float32:
        from tinkex.engine.backends.cuda import cross_entropy

        any_token_R1 = torch.zeros_like(logits_RV[:, :1], dtype=torch.int64)
        return cross_entropy.logprobs(logits_RV, any_token_R1)[1]
    return exponentials_(logits_RV.clone())[0][:, 0]
