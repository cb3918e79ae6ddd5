"""From logits to log-probabilities, for training, prompts and sampling.

Shapes: R rows, C rows of a chunk, B rows of a rectangle, V vocabulary, K targets of a row,
M targets of all rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from tinkex.engine.backends.torch.rectangles import Rectangle


_SHARED: Final = 32_768
"""torch splits a sum of this many elements or more between threads."""


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
    # A single long row would be split between threads, which changes the order of its sum.
    return weights_RV.expand(2, -1).sum(1, keepdim=True)[:1]


def normalizers(logits_RV: Tensor) -> Tensor:
    """What to subtract from each row's logits to get log-probabilities, [R]."""
    return exponentials_(logits_RV.clone())[0][:, 0]


def cross_entropy(
    logits_CV: Tensor,
    parts: Sequence[Rectangle],
    ids_M: Tensor,
    gradient_M: Tensor | None,
    dtype: torch.dtype,
) -> tuple[list[Tensor], Tensor | None]:
    """Log-probabilities of the chosen tokens and, given the gradient by them, that by the logits.

    The result may overwrite the logits.
    """
    found = [logits_CV[part.start : part.stop].gather(1, part.filled(ids_M)) for part in parts]
    # From here on the logits' memory holds exp(logit - largest), then the gradient.
    lse_C1, total_C1 = exponentials_(logits_CV)
    for part, chosen_BK in zip(parts, found, strict=True):
        chosen_BK -= lse_C1[part.start : part.stop]
    flat = [part.flat(chosen_BK) for part, chosen_BK in zip(parts, found, strict=True)]
    if gradient_M is None:
        return flat, None
    # The gradient by the logits: each target up, the softmax down.
    for part in parts:
        dlogits_BV = logits_CV[part.start : part.stop]
        gradient_BK = part.filled(gradient_M)
        down_B1 = gradient_BK.sum(1, keepdim=True).neg_().div_(total_C1[part.start : part.stop])
        dlogits_BV.mul_(down_B1).scatter_add_(1, part.filled(ids_M), gradient_BK)
    return flat, logits_CV.to(dtype)
