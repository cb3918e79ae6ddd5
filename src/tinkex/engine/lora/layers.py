"""Linear layers that serve many adapters at once.

The tokens of a batch lie adapter by adapter. The base weight is multiplied with all of them
in one go; then each segment adds its own low-rank product: see `pieces` and, for segments that
are alike, `stacks`. `_Adapted` is the one place where the two meet, so a grouped kernel has one
function to replace. Autograd only carries the slopes from layer to layer.

Shapes: T tokens, I inputs, O outputs of one projection, Y outputs of those that share an input,
side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tinkex.engine.adjacent import side_by_side
from tinkex.engine.lora.pieces import piece_of
from tinkex.engine.lora.stacks import stack_of, stacked
from tinkex.engine.lora.weights import in_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tinkex.engine.lora.pieces import Piece, Segment
    from tinkex.engine.lora.stacks import Stack
    from tinkex.engine.models.base import Decoder, Project, Projection
    from tinkex.engine.models.linear import Linear


class RowProducts(Protocol):
    """How the products of a pass are computed, where that is not the usual way.

    `base` multiplies with a base weight; `add` adds all low-rank products to its result.
    """

    def base(self, linear: Linear, x_TI: Tensor) -> Tensor:
        """Return x times the weight in fresh memory."""
        ...

    def add(self, layer: int, names: tuple[Projection, ...], x_TI: Tensor, y_TY: Tensor) -> None:
        """Add every segment's low-rank products to y."""
        ...


class Adapt(Protocol):
    """Adds the adapters' products to those with base weights."""

    def __call__(
        self, layer: int, names: tuple[Projection, ...], x_TI: Tensor, y_TY: Tensor
    ) -> None:
        """Add to y, given what the projections read."""
        ...


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything `_Adapted` needs besides the tensors it differentiates."""

    linear: Linear
    pieces: tuple[Piece | Stack, ...]
    base: Callable[[Tensor], Tensor]
    add: Callable[[Tensor, Tensor], None] | None


def adapted_projections(
    decoder: Decoder,
    segments: Sequence[Segment],
    *,
    anchor: Tensor | None = None,
    packed: bool = False,
    products: RowProducts | None = None,
) -> Project:
    """The base model's linear layers with the adapter of each segment on top.

    For gradients, `anchor` is any tensor that requires one: differentiating the result by it
    makes the backward pass fill in the segments' gradients. `packed` chooses the way of
    multiplying with base weights on a CPU: see `models/linear.py`.
    """
    dtype = decoder.unembed_VD.dtype
    runs = stacked(
        [
            replace(segment, weights=in_dtype(segment.weights, dtype))
            for segment in segments
            if segment.weights is not None
        ]
    )

    def project(layer: int, names: tuple[Projection, ...], x_TI: Tensor) -> tuple[Tensor, ...]:
        linear = decoder.linear(layer, names)
        pieces = _pieces(runs, layer, names)
        if products is None:
            plan = _Plan(linear, pieces, partial(linear.multiply, packed=packed), None)
        else:
            plan = _Plan(
                linear,
                pieces,
                partial(products.base, linear),
                partial(products.add, layer, names),
            )
        learns = any(piece.learns for piece in pieces)
        return _apply(plan, x_TI, anchor if learns else None)

    return project


def adapted_in_place(segments: Sequence[Segment]) -> Adapt | None:
    """What adds the adapters' products to those with base weights; None if there are none.

    The weights have the precision of the activations.
    """
    adapted = [segment for segment in segments if segment.weights is not None]
    if not adapted:
        return None

    def adapt(layer: int, names: tuple[Projection, ...], x_TI: Tensor, y_TY: Tensor) -> None:
        for segment in adapted:
            piece = piece_of(segment, layer, names)
            if piece is not None:
                piece.add(x_TI, y_TY)

    return adapt


def _pieces(
    runs: Sequence[Sequence[Segment]], layer: int, names: tuple[Projection, ...]
) -> tuple[Piece | Stack, ...]:
    found = (
        piece_of(run[0], layer, names) if len(run) == 1 else stack_of(run, layer, names)
        for run in runs
    )
    return tuple(piece for piece in found if piece is not None)


def _apply(plan: _Plan, x_TI: Tensor, anchor: Tensor | None) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and (anchor is not None or x_TI.requires_grad):
        return _Adapted.apply(plan, x_TI, anchor)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportReturnType] -- torch's own stub
    return plan.linear.split(_forward(plan, x_TI)[0])


def _forward(plan: _Plan, x_TI: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The outputs side by side, and the inner activations of the pieces."""
    y_TY = plan.base(x_TI)
    if plan.add is not None:
        plan.add(x_TI, y_TY)
        return y_TY, []
    return y_TY, [piece.add(x_TI, y_TY) for piece in plan.pieces]


class _Adapted(torch.autograd.Function):
    """`x @ W.T + b` for joined W, plus `scale * (x @ A.T) @ B.T` on each piece's rows."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, x_TI: Tensor, anchor: Tensor | None) -> tuple[Tensor, ...]:
        y_TY, inner = _forward(plan, x_TI)
        ctx.plan = plan
        ctx.save_for_backward(x_TI, *inner)
        return plan.linear.split(y_TY)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        x_TI, *inner = ctx.saved_tensors
        dy_TY = _joined(slopes)
        dx_TI = plan.linear.slope(dy_TY) if ctx.needs_input_grad[1] else None
        for number, piece in enumerate(plan.pieces):
            piece.back(x_TI, dy_TY, inner[number] if inner else None, dx_TI)
        return None, dx_TI, None


def _joined(slopes: tuple[Tensor, ...]) -> Tensor:
    """Slopes of several projections as one tensor; without a copy where they already lie so."""
    joined_TY = side_by_side(slopes)
    if joined_TY is None or not joined_TY.is_contiguous():
        return torch.cat(slopes, dim=1)
    return joined_TY
