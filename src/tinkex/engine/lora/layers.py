"""Linear layers that serve many adapters at once.

The tokens of a batch are ordered by adapter. The base weight is multiplied with all of them in one
product; then each segment adds its own low-rank product. Both happen in `_Adapted`.

A segment's products read only that segment's rows, so its gradients do not depend on the rest of
the batch. The backward pass writes them to the segment's own buffers, in the precision of the
master weights; autograd only propagates the gradients of activations.

Shapes: T tokens, S tokens of a segment, R rank, Z ranks of projections that share an input,
I inputs, O outputs of one projection, Y outputs of those that share an input, concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tinkex.engine.backends.torch.layers import concatenated_view
from tinkex.engine.lora.weights import in_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from tinkex.engine.backends.table import Backend
    from tinkex.engine.backends.torch.linear import Linear
    from tinkex.engine.decoder import Decoder, Project, Projection
    from tinkex.engine.lora.weights import Group, LoraWeights


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens that share an adapter; None is the base model itself.

    The backward pass writes to `gradient`; without it the adapter gets no gradient.
    """

    start: int
    stop: int
    weights: LoraWeights | None
    gradient: LoraWeights | None = None


class RowProducts(Protocol):
    """Strict products: how the products of a pass are computed.

    `base` multiplies with a base weight; `add` adds all low-rank products to its result.
    """

    def base(self, linear: Linear, x_TI: Tensor) -> Tensor:
        """Return x times the weight in new memory."""
        ...

    def add(self, layer: int, names: tuple[Projection, ...], x_TI: Tensor, y_TY: Tensor) -> None:
        """Add every segment's low-rank products to y."""
        ...


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything `_Adapted` needs besides the tensors it differentiates."""

    linear: Linear
    backend: Backend
    pieces: tuple[AdaptedRows, ...]
    base: Callable[[Tensor], Tensor]
    add: Callable[[Tensor, Tensor], None] | None


def adapted_projections(
    decoder: Decoder,
    segments: Sequence[Segment],
    *,
    anchor: Tensor | None = None,
    batch_invariant: bool = False,
    products: RowProducts | None = None,
) -> Project:
    """The base model's linear layers with the adapter of each segment on top.

    For gradients, `anchor` is any tensor that requires one: differentiating the result by it
    makes the backward pass fill in the segments' gradients. `batch_invariant` selects the kind of
    product with base weights on a CPU: see `backends/torch/linear.py`.
    """
    dtype = decoder.unembed_VD.dtype
    cast = [
        (segment, in_dtype(segment.weights, dtype))
        for segment in segments
        if segment.weights is not None
    ]

    def project(layer: int, names: tuple[Projection, ...], x_TI: Tensor) -> tuple[Tensor, ...]:
        linear = decoder.linear(layer, names)
        found = (_piece(segment, weights, layer, names) for segment, weights in cast)
        pieces = tuple(piece for piece in found if piece is not None)
        if products is None:
            plan = _Plan(
                linear,
                decoder.backend,
                pieces,
                partial(linear.multiply, batch_invariant=batch_invariant),
                None,
            )
        else:
            plan = _Plan(
                linear,
                decoder.backend,
                pieces,
                partial(products.base, linear),
                partial(products.add, layer, names),
            )
        learns = any(piece.gradient is not None for piece in pieces)
        return _apply(plan, x_TI, anchor if learns else None)

    return project


def _piece(
    segment: Segment, weights: LoraWeights, layer: int, names: tuple[Projection, ...]
) -> AdaptedRows | None:
    factors = weights.group(layer, names)
    if factors is None:
        return None
    gradient = None if segment.gradient is None else segment.gradient.group(layer, names)
    return AdaptedRows(slice(segment.start, segment.stop), weights.scale, factors, gradient)


def _apply(plan: _Plan, x_TI: Tensor, anchor: Tensor | None) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and (anchor is not None or x_TI.requires_grad):
        return _Adapted.apply(plan, x_TI, anchor)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportReturnType] -- torch's own stub
    return plan.linear.split(_forward(plan, x_TI)[0])


def _forward(plan: _Plan, x_TI: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The concatenated outputs, and the inner activations of the pieces."""
    y_TY = plan.base(x_TI)
    if plan.add is not None:
        plan.add(x_TI, y_TY)
        return y_TY, []
    return y_TY, [_add(plan.backend, piece, x_TI, y_TY) for piece in plan.pieces]


def _add(backend: Backend, piece: AdaptedRows, x_TI: Tensor, y_TY: Tensor) -> Tensor:
    """Add a piece's products to its rows; return its inner activations."""
    z_SZ = backend.shrink(x_TI[piece.rows], piece.factors.a_ZI)
    parts = piece.parts(y_TY[piece.rows], z_SZ)
    for (y_SO, z_SR), b_OR in zip(parts, piece.factors.bs_OR, strict=True):
        backend.expand_add_(y_SO, z_SR, b_OR, piece.scale)
    return z_SZ


class _Adapted(torch.autograd.Function):
    """`x @ W.T + b` for joined W, plus `scale * (x @ A.T) @ B.T` on each piece's rows."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, x_TI: Tensor, anchor: Tensor | None) -> tuple[Tensor, ...]:
        y_TY, inner = _forward(plan, x_TI)
        ctx.plan = plan
        ctx.save_for_backward(x_TI, *inner)
        return plan.linear.split(y_TY)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        x_TI, *inner = ctx.saved_tensors
        dy_TY = _joined(grad_outputs)
        dx_TI = plan.linear.input_gradient(dy_TY) if ctx.needs_input_grad[1] else None
        for number, piece in enumerate(plan.pieces):
            x_SI, dy_SY = x_TI[piece.rows], dy_TY[piece.rows]
            z_SZ = inner[number] if inner else torch.mm(x_SI, piece.factors.a_ZI.T)
            dz_SZ = _inner_gradient(piece, dy_SY, z_SZ)
            if dx_TI is not None:
                dx_TI[piece.rows].addmm_(dz_SZ, piece.factors.a_ZI)
            if piece.gradient is not None:
                into, scale = piece.gradient, piece.scale
                product_into(into.a_ZI, dz_SZ.T, x_SI)
                parts = piece.parts(dy_SY, z_SZ)
                for (dy_SO, z_SR), b_OR in zip(parts, into.bs_OR, strict=True):
                    product_into(b_OR, dy_SO.T, z_SR, scale=scale)
        return None, dx_TI, None


def _inner_gradient(piece: AdaptedRows, dy_SY: Tensor, z_SZ: Tensor) -> Tensor:
    """The gradient by the inner activations, times the scale."""
    dz_SZ = torch.empty_like(z_SZ)
    parts = piece.parts(dy_SY, dz_SZ)
    for (dy_SO, dz_SR), b_OR in zip(parts, piece.factors.bs_OR, strict=True):
        torch.addmm(dz_SR, dy_SO, b_OR, beta=0, alpha=piece.scale, out=dz_SR)
    return dz_SZ


def product_into(
    out: Tensor, left: Tensor, right: Tensor, *, scale: float = 1.0, add: bool = False
) -> None:
    """Write a product over tokens: many terms, so it has the precision of the master weights.

    With `add` it is added to `out`.
    """
    if left.is_cuda and left.dtype != out.dtype:
        if add:
            out.add_(torch.mm(left, right, out_dtype=out.dtype), alpha=scale)
            return
        torch.mm(left, right, out_dtype=out.dtype, out=out)
        if scale != 1.0:
            out.mul_(scale)
    else:
        left, right = left.to(out.dtype), right.to(out.dtype)
        torch.addmm(out, left, right, beta=float(add), alpha=scale, out=out)


def _joined(gradients: tuple[Tensor, ...]) -> Tensor:
    """Gradients of several projections as one tensor, without a copy where they are adjacent."""
    joined_TY = concatenated_view(gradients)
    if joined_TY is None or not joined_TY.is_contiguous():
        return torch.cat(gradients, dim=1)
    return joined_TY


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The low-rank products of one segment that share an input.

    `factors` are in the activations' precision, `gradient` in that of the master weights.
    """

    rows: slice
    scale: float
    factors: Group
    gradient: Group | None

    def parts(self, y_SY: Tensor, z_SZ: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The outputs of each projection, and the inner activations that belong to them."""
        bs_OR = self.factors.bs_OR
        if len(bs_OR) == 1:
            return iter(((y_SY, z_SZ),))
        widths, rank = [b_OR.shape[0] for b_OR in bs_OR], bs_OR[0].shape[1]
        ranks = [rank] * len(widths)
        return zip(
            y_SY.split_with_sizes(widths, dim=1), z_SZ.split_with_sizes(ranks, dim=1), strict=True
        )
