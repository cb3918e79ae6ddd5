"""The low-rank products of several segments that are alike, computed together on a CPU.

Short segments make small products: what calling them takes, and sharing each among threads,
takes as long as multiplying. Batched products take a whole stack of segments at once, and
threads share the segments.

Nobody's bits may depend on the company, so a stack must give those of `Piece`. On up to two
threads the library's batched product does, for whole steps of rows and ranks from a step on;
more threads cut lone products in another way. This was found by trying (MKL), and
`tests/unit/engine/training/test_stacks.py` tries it on the machine at hand.

Shapes: T tokens of a pass, N segments of a stack, S tokens of each, R rank, Z ranks of
projections that share an input, I inputs, O outputs of one projection, Y outputs of those that
share an input, side by side, G numbers of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

import torch

from tinkex.engine.lora.thin import STEP

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from tinkex.engine.lora.pieces import Segment
    from tinkex.engine.lora.weights import Group
    from tinkex.engine.models.base import Projection

_MOST_THREADS: Final = 2
_LONGEST: Final = 256
"""Tokens; larger products gain nothing."""
_HIGHEST: Final = 8
"""Segments of a stack, so that their factors stay in the cache."""


def stacked(segments: Sequence[Segment]) -> list[list[Segment]]:
    """The segments in order; those whose products can be computed together are together."""
    found: list[list[Segment]] = []
    for kind, run in groupby(enumerate(segments), _kind):
        members = [segment for _, segment in run]
        size = 1 if kind is None else _HIGHEST
        found += [members[start : start + size] for start in range(0, len(members), size)]
    return found


def _kind(numbered: tuple[int, Segment]) -> tuple[object, ...] | None:
    """Equal for neighbours that are alike; None for a segment that stays alone."""
    number, segment = numbered
    tokens = segment.stop - segment.start
    if segment.weights is None or tokens > _LONGEST or not _same_bits(segment):
        return None
    lora = segment.weights.lora
    covered = lora.rank, lora.train_attn, lora.train_mlp
    first = segment.start - number * tokens  # the same as long as no gap lies between them
    return first, tokens, *covered, segment.gradient is None


def _same_bits(segment: Segment) -> bool:
    used = [each for each in (segment.weights, segment.gradient) if each is not None]
    return (
        torch.get_num_threads() <= _MOST_THREADS
        and (segment.stop - segment.start) % STEP == 0
        and all(each.lora.rank >= STEP and _plain(each.flat_P) for each in used)
    )


def _plain(flat_P: Tensor) -> bool:
    return flat_P.device.type == "cpu" and flat_P.dtype == torch.float32


@dataclass(frozen=True, slots=True)
class Stack:
    """The products of some segments that share an input: a `Piece` for each of them."""

    rows: slice
    scale: float
    factors: tuple[Group, ...]
    gradients: tuple[Group, ...]
    """Of each segment, or of none."""

    @property
    def learns(self) -> bool:
        """Whether its segments have gradients."""
        return bool(self.gradients)

    def add(self, x_TI: Tensor, y_TY: Tensor) -> Tensor:
        """Add the products to the stack's rows; return the inner activations."""
        x_NSI, y_NSY = self._folded(x_TI), self._folded(y_TY)
        a_NZI, bs_NOR = self._matrices(self._joined())
        z_NSZ = torch.bmm(x_NSI, a_NZI.mT)
        for y_NSO, z_NSR, b_NOR in self._parts(y_NSY, z_NSZ, bs_NOR):
            y_NSO.baddbmm_(z_NSR, b_NOR.mT, alpha=self.scale)
        return z_NSZ

    def back(self, x_TI: Tensor, dy_TY: Tensor, z_NSZ: Tensor | None, dx_TI: Tensor | None) -> None:
        """Write the gradients, and add to the slope by x."""
        assert z_NSZ is not None, "only other devices have it computed again"
        x_NSI, dy_NSY = self._folded(x_TI), self._folded(dy_TY)
        # Joined once more rather than kept: all layers' together are as large as the adapters.
        flat_NG = self._joined()
        a_NZI, bs_NOR = self._matrices(flat_NG)
        dz_NSZ = torch.empty_like(z_NSZ)
        for dy_NSO, dz_NSR, b_NOR in self._parts(dy_NSY, dz_NSZ, bs_NOR):
            torch.baddbmm(dz_NSR, dy_NSO, b_NOR, beta=0, alpha=self.scale, out=dz_NSR)
        if dx_TI is not None:
            self._folded(dx_TI).baddbmm_(dz_NSZ, a_NZI)
        if self.gradients:
            # The factors are not needed any more, and their memory is in the cache.
            torch.bmm(dz_NSZ.mT, x_NSI, out=a_NZI)
            for dy_NSO, z_NSR, b_NOR in self._parts(dy_NSY, z_NSZ, bs_NOR):
                torch.baddbmm(b_NOR, dy_NSO.mT, z_NSR, beta=0, alpha=self.scale, out=b_NOR)
            torch._foreach_copy_([group.flat_G for group in self.gradients], flat_NG.unbind())  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] -- one call for all

    def _folded(self, x_TI: Tensor) -> Tensor:
        """See the stack's rows by segment."""
        return x_TI[self.rows].view(len(self.factors), -1, x_TI.shape[1])

    def _joined(self) -> Tensor:
        return torch.stack([group.flat_G for group in self.factors])

    def _matrices(self, flat_NG: Tensor) -> tuple[Tensor, list[Tensor]]:
        """See groups as their A and B."""
        first = self.factors[0]
        shapes = [matrix.shape for matrix in (first.a_ZI, *first.bs_OR)]
        parts = flat_NG.split_with_sizes([shape.numel() for shape in shapes], dim=1)
        a_NZI, *bs_NOR = (
            part.view(len(part), *shape) for part, shape in zip(parts, shapes, strict=True)
        )
        return a_NZI, bs_NOR

    def _parts(
        self, y_NSY: Tensor, z_NSZ: Tensor, bs_NOR: list[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Outputs and inner activations of each projection, and its B."""
        widths = [b_NOR.shape[1] for b_NOR in bs_NOR]
        ranks = [b_NOR.shape[2] for b_NOR in bs_NOR]
        return zip(
            y_NSY.split_with_sizes(widths, dim=2),
            z_NSZ.split_with_sizes(ranks, dim=2),
            bs_NOR,
            strict=True,
        )


def stack_of(
    segments: Sequence[Segment], layer: int, names: tuple[Projection, ...]
) -> Stack | None:
    """The products of segments that are alike at one place, or None where there are none."""
    rows = slice(segments[0].start, segments[-1].stop)
    weights = [segment.weights for segment in segments if segment.weights is not None]
    factors = [each.group(layer, names) for each in weights]
    gradients = [s.gradient.group(layer, names) for s in segments if s.gradient is not None]
    if factors[0] is None:
        return None
    return Stack(rows, weights[0].scale, _known(factors), _known(gradients))


def _known(groups: Sequence[Group | None]) -> tuple[Group, ...]:
    return tuple(group for group in groups if group is not None)
