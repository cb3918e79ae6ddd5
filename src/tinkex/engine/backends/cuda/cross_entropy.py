# pyright: basic, reportCallIssue=false, reportArgumentType=false
# Kernel bodies are triton's own language, which carries no types, and launching one adds
# arguments (num_warps) and takes plain numbers for constants, which its signature denies.
"""Log-probabilities of chosen tokens from rows of logits, and the gradient by the logits.

Both directions read the logits once. A row is always split into the same parts, each summed by
one program, and a second small kernel joins the parts in order. So one row already occupies many
programs, and a row's bits do not depend on the number of rows.

Within a part every lane keeps a running maximum and a sum of exponentials relative to it; lanes
are reduced at the end. A lane sums a few dozen terms and the reduction is a tree of positive
numbers, so float32 is precise enough.

Shapes: C rows, V vocabulary, K targets of a row, P parts of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.backends.cuda.launcher import fast_launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.engine.backends.torch.rectangles import Rectangle

PART = 16384
"""Columns summed by one program; it decides the bits of the result."""

_BLOCK = 2048
"""Columns read at a time: four warps, four loads of 16 bytes for each thread."""


def logprobs(logits_CV: Tensor, ids_CK: Tensor, *, part: int = PART) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `ids_CK`, and each row's log of the sum of exponentials.

    Returns `(logprobs_CK, lse_C)` in float32. Ids must be within the vocabulary: they are
    not checked here. `part` is a power of two.
    """
    rows, vocabulary = logits_CV.shape
    targets = ids_CK.shape[1]
    parts = triton.cdiv(vocabulary, part)
    block = min(_BLOCK, part)
    kind = {"dtype": torch.float32, "device": logits_CV.device}
    largest_CP = torch.empty((rows, parts), **kind)
    total_CP = torch.empty((rows, parts), **kind)
    _sum_part[(rows, parts)](
        logits_CV,
        largest_CP,
        total_CP,
        logits_CV.stride(0),
        VOCABULARY=vocabulary,
        PART=part,
        BLOCK=block,
        num_warps=4,
    )
    lse_C = torch.empty(rows, **kind)
    logprobs_CK = torch.empty((rows, targets), **kind)
    _join_parts[(rows,)](
        logits_CV,
        ids_CK.contiguous(),
        largest_CP,
        total_CP,
        lse_C,
        logprobs_CK,
        logits_CV.stride(0),
        targets,
        PARTS=parts,
        PARTS_BLOCK=triton.next_power_of_2(parts),
        TARGETS_BLOCK=triton.next_power_of_2(targets),
        num_warps=1,
    )
    return logprobs_CK, lse_C


def dlogits_into(
    logits_CV: Tensor,
    lse_C: Tensor,
    ids_CK: Tensor,
    gradient_CK: Tensor,
    out_CV: Tensor,
) -> None:
    """Write the gradient by the logits, given that by the log-probabilities of the targets.

    `out_CV` may be the logits themselves. A token that is a target twice counts twice.
    """
    rows, vocabulary = logits_CV.shape
    targets = ids_CK.shape[1]
    _gradient_by_logits[(rows, triton.cdiv(vocabulary, _BLOCK))](
        logits_CV,
        lse_C,
        ids_CK.contiguous(),
        gradient_CK.contiguous(),
        out_CV,
        logits_CV.stride(0),
        out_CV.stride(0),
        targets,
        VOCABULARY=vocabulary,
        TARGETS_BLOCK=triton.next_power_of_2(targets),
        BLOCK=_BLOCK,
        num_warps=4,
    )


def cross_entropy(
    logits_CV: Tensor,
    parts: Sequence[Rectangle],
    ids_M: Tensor,
    gradient_M: Tensor | None,
    dtype: torch.dtype,
) -> tuple[list[Tensor], Tensor | None]:
    """Log-probabilities of the chosen tokens and, given the gradient by them, that by logits."""
    flat: list[Tensor] = []
    dlogits_CV = None
    if gradient_M is not None:
        dlogits_CV = torch.empty(logits_CV.shape, dtype=dtype, device=logits_CV.device)
    for part in parts:
        logits_BV = logits_CV[part.start : part.stop]
        ids_BK = part.filled(ids_M)
        chosen_BK, lse_B = logprobs(logits_BV, ids_BK)
        flat.append(part.flat(chosen_BK))
        if gradient_M is not None and dlogits_CV is not None:
            gradient_BK = part.filled(gradient_M)
            out_BV = dlogits_CV[part.start : part.stop]
            dlogits_into(logits_BV, lse_B, ids_BK, gradient_BK, out_BV)
    return flat, dlogits_CV


def normalizers(logits_CV: Tensor) -> Tensor:
    """What to subtract from each row's logits to get log-probabilities."""
    any_token_C1 = torch.zeros_like(logits_CV[:, :1], dtype=torch.int64)
    return logprobs(logits_CV, any_token_C1)[1]


@fast_launch
@triton.jit
def _sum_part(
    logits,
    largest,
    total,
    stride,
    VOCABULARY: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * PART
    lane = tl.arange(0, BLOCK)
    # Finite: a lane without columns must not compute infinity minus infinity below.
    top = tl.full((BLOCK,), -3.0e38, tl.float32)
    amount = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, PART, BLOCK):
        col = first + start + lane
        x = tl.load(logits + row * stride + col, mask=col < VOCABULARY, other=-float("inf")).to(
            tl.float32
        )
        ahead = x - top
        # One exponential for both cases: it rescales the old sum, or it is the new term.
        factor = tl.exp(-tl.abs(ahead))
        amount = tl.where(ahead > 0, amount * factor + 1.0, amount + factor)
        top = tl.maximum(top, x)
    most = tl.max(top, 0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(largest + place, most)
    tl.store(total + place, tl.sum(amount * tl.exp(top - most), 0))


@fast_launch
@triton.jit(do_not_specialize=["targets"])
def _join_parts(
    logits,
    ids,
    largest,
    total,
    lse,
    logprobs,
    stride,
    targets,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    TARGETS_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_BLOCK)
    top = tl.load(largest + row * PARTS + part, mask=part < PARTS, other=-3.0e38)
    amount = tl.load(total + row * PARTS + part, mask=part < PARTS, other=0.0)
    most = tl.max(top, 0)
    row_lse = most + tl.log(tl.sum(amount * tl.exp(top - most), 0))
    tl.store(lse + row, row_lse)
    target = tl.arange(0, TARGETS_BLOCK)
    live = target < targets
    place = row * targets + target
    chosen = tl.load(logits + row * stride + tl.load(ids + place, mask=live, other=0), mask=live)
    # A single subtraction: sampling computes the same bits from the logit and the lse.
    tl.store(logprobs + place, chosen.to(tl.float32) - row_lse, mask=live)


@fast_launch
@triton.jit(do_not_specialize=["targets"])
def _gradient_by_logits(
    logits,
    lse,
    ids,
    gradient,
    dlogits,
    stride,
    out_stride,
    targets,
    VOCABULARY: tl.constexpr,
    TARGETS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    col = first + tl.arange(0, BLOCK)
    live = col < VOCABULARY
    target = tl.arange(0, TARGETS_BLOCK)
    place = row * targets + target
    id_K = tl.load(ids + place, mask=target < targets, other=-1)
    gradient_K = tl.load(gradient + place, mask=target < targets, other=0.0).to(tl.float32)
    x = tl.load(logits + row * stride + col, mask=live, other=-float("inf")).to(tl.float32)
    value = -tl.exp(x - tl.load(lse + row)) * tl.sum(gradient_K, 0)
    # Few blocks contain a target; only those loop over the targets, in order, without atomics.
    if tl.sum(((id_K >= first) & (id_K < first + BLOCK)).to(tl.int32), 0) > 0:
        for index in range(TARGETS_BLOCK):
            here = row * targets + index
            one = tl.load(ids + here, mask=index < targets, other=-1)
            up = tl.load(gradient + here, mask=index < targets, other=0.0).to(tl.float32)
            value += tl.where(col == one, up, 0.0)
    tl.store(dlogits + row * out_stride + col, value.to(dlogits.dtype.element_ty), mask=live)
