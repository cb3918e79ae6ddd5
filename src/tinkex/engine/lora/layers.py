"""Linear layers that serve many adapters at once.

The tokens of a batch lie adapter by adapter. The base weight is multiplied with all of them
in one go; then each segment adds its own low-rank product. `_Adapted.apply` is the one
place where the two meet, so a grouped kernel has one function to replace.

A segment's own products only ever see that segment's rows, so its gradients do not depend
on what else is in the batch.

Shapes: T tokens, S tokens of a segment, R rank, I inputs and O outputs of one projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.lora.weights import LoraWeights
    from tinkex.engine.models.base import Decoder, Project, Projection


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens that share an adapter; None is the base model itself."""

    start: int
    stop: int
    weights: LoraWeights | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where one low-rank product applies: rows, output (index into names), scale."""

    rows: slice
    output: int
    scale: float


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything `_Adapted` needs besides the tensors it differentiates."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    pieces: tuple[_Piece, ...]


def adapted_projections(decoder: Decoder, segments: Sequence[Segment]) -> Project:
    """The base model's linear layers with the adapter of each segment on top."""

    def project(layer: int, names: tuple[Projection, ...], x_TI: Tensor) -> tuple[Tensor, ...]:
        pieces: list[_Piece] = []
        factors: list[Tensor] = []
        for segment in segments:
            adapter = segment.weights
            if adapter is None:
                continue
            for output, name in enumerate(names):
                pair = adapter.pair(layer, name)
                if pair is not None:
                    rows = slice(segment.start, segment.stop)
                    pieces.append(_Piece(rows, output, adapter.scale))
                    # Masters are fp32; the product runs in the precision of the activations.
                    factors += (factor.to(x_TI.dtype) for factor in pair)
        plan = _Plan(
            tuple(decoder.weight(layer, name) for name in names),
            tuple(decoder.bias(layer, name) for name in names),
            tuple(pieces),
        )
        return _apply(plan, x_TI, factors)

    return project


def _apply(plan: _Plan, x_TI: Tensor, factors: list[Tensor]) -> tuple[Tensor, ...]:
    return _Adapted.apply(plan, x_TI, *factors)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportReturnType] -- torch's own stub


class _Adapted(torch.autograd.Function):
    """`x @ W.T + b` for several W, plus `scale * (x @ A.T) @ B.T` on each piece's rows."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, x_TI: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        outputs = tuple(
            F.linear(x_TI, weight, bias)
            for weight, bias in zip(plan.weights, plan.biases, strict=True)
        )
        inner: list[Tensor] = []
        for piece, a_RI, b_OR in zip(plan.pieces, factors[::2], factors[1::2], strict=True):
            z_SR = F.linear(x_TI[piece.rows], a_RI)
            outputs[piece.output][piece.rows].addmm_(z_SR, b_OR.T, alpha=piece.scale)
            inner.append(z_SR)
        ctx.plan = plan
        ctx.save_for_backward(x_TI, *factors, *inner)
        return outputs

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        x_TI, *saved = ctx.saved_tensors
        count = len(plan.pieces)
        factors, inner = saved[: 2 * count], saved[2 * count :]
        dx_TI = _input_slope(plan, slopes) if ctx.needs_input_grad[1] else None
        gradients: list[Tensor | None] = []
        for piece, a_RI, b_OR, z_SR in zip(
            plan.pieces, factors[::2], factors[1::2], inner, strict=True
        ):
            dy_SO = slopes[piece.output][piece.rows]
            dz_SR = (dy_SO @ b_OR).mul_(piece.scale)
            if dx_TI is not None:
                dx_TI[piece.rows].addmm_(dz_SR, a_RI)
            gradients.append(dz_SR.T @ x_TI[piece.rows])
            gradients.append((dy_SO.T @ z_SR).mul_(piece.scale))
        return (None, dx_TI, *gradients)


def _input_slope(plan: _Plan, slopes: tuple[Tensor, ...]) -> Tensor:
    dx_TI = slopes[0] @ plan.weights[0]
    for dy_TO, weight in zip(slopes[1:], plan.weights[1:], strict=True):
        dx_TI.addmm_(dy_TO, weight)
    return dx_TI
