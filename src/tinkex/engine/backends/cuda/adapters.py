"""The sampler's linear layers on a CUDA device: base weights once, adapters by slot.

Shapes: T rows, R rows of logits, D hidden, V vocabulary, I inputs of a projection.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch

from tinkex.engine.backends.cuda.fixed_rows import FixedRows
from tinkex.engine.backends.cuda.lora import RowTiles
from tinkex.engine.backends.cuda.slots import NO_SLOT, LoraSlots, SlotTiles, tile_table
from tinkex.engine.lora import logits as plain_logits

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence

    from torch import Tensor

    from tinkex.engine.decoder import Decoder, Project, Projection
    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.sampler.runner import VersionRows


class CudaAdapters:
    """`Adapters` for kernels that serve any mix of versions, at most `slots` in one pass.

    `find` gives the weights of a version on any device, and None for the base model; `copies` holds
    the copies on the CUDA device.
    """

    def __init__(
        self,
        decoder: Decoder,
        find: Callable[[str], LoraWeights | None],
        *,
        slots: int,
        copies: MutableMapping[str, LoraWeights] | None = None,
        strict: bool = False,
    ) -> None:
        weight = decoder.unembed_VD
        self._decoder = decoder
        self._find = find
        self._fixed = FixedRows() if strict else None
        self._slots = LoraSlots(
            decoder.config, slots, device=weight.device, dtype=weight.dtype, copies=copies
        )

    def project(self, segments: Sequence[VersionRows]) -> Project:
        """The base layers with each segment's adapter on top."""
        return self.tiled(self._tiles(segments))

    def logits(self, h_RD: Tensor, segments: Sequence[VersionRows]) -> Tensor:
        """The head, with the unembedding's low-rank product where an adapter has one."""
        return self.tiled_logits(h_RD, self._tiles(segments))

    def runs(self, versions: Sequence[str]) -> tuple[list[tuple[int, int]], int, bool]:
        """Rows by slot, a bound of their ranks, and whether an adapter covers the unembedding."""
        return self._place([(version, len(list(run))) for version, run in groupby(versions)])

    def tiled(self, tiles: SlotTiles) -> Project:
        """The linear layers for the rows of these tiles."""
        decoder, slots, fixed = self._decoder, self._slots, self._fixed

        def project(layer: int, names: tuple[Projection, ...], x_TI: Tensor) -> tuple[Tensor, ...]:
            linear = decoder.linear(layer, names)
            if fixed is None:
                y_TO = linear.multiply(x_TI, batch_invariant=False)
            else:
                y_TO = fixed.linear(x_TI, linear.weight_OI, linear.bias_O)
            slots.add(layer, names, x_TI, y_TO, tiles)
            return linear.split(y_TO)

        return project

    def tiled_logits(self, h_RD: Tensor, tiles: SlotTiles) -> Tensor:
        """The fp32 logits of the rows of these tiles."""
        if self._fixed is None:
            logits_RV = plain_logits(h_RD, self._decoder.head)
        else:
            logits_RV = self._fixed.logits(h_RD, self._decoder.unembed_VD)
        self._slots.add_unembed(h_RD, logits_RV, tiles)
        return logits_RV

    def _tiles(self, segments: Sequence[VersionRows]) -> SlotTiles:
        runs, rank, unembed = self._place([(s.version, s.stop - s.start) for s in segments])
        table = torch.from_numpy(tile_table(runs))  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
        rows = RowTiles(*table.to(self._decoder.unembed_VD.device))
        return SlotTiles(rows, rank, unembed)

    def _place(self, runs: list[tuple[str, int]]) -> tuple[list[tuple[int, int]], int, bool]:
        placed = self._slots.place((version for version, _ in runs), self._find)
        names = list(placed)
        return (
            [(placed.get(version, NO_SLOT), count) for version, count in runs],
            self._slots.rank(names),
            self._slots.unembeds(names),
        )
