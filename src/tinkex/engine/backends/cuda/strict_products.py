"""The products of a strict training pass on a CUDA device, with the bits of the sampler's.

Base weights are multiplied in fixed blocks of rows; adapters use the kernels of the sampler. Only
the forward pass is special: gradients need not agree with anything in the sampler.

Shapes: T tokens of a pass, C rows of a chunk, D hidden, V vocabulary, I inputs, Y outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tinkex.engine.backends.cuda.lora import RowTiles
from tinkex.engine.backends.cuda.slots import NO_SLOT, LoraSlots, SlotTiles, tile_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.backends.cuda.fixed_rows import FixedRows
    from tinkex.engine.backends.torch.linear import Linear
    from tinkex.engine.decoder import Decoder, Projection
    from tinkex.engine.lora.layers import Segment


class CudaProducts:
    """`RowProducts` and `HeadProducts` of one pass over these segments."""

    def __init__(self, decoder: Decoder, segments: Sequence[Segment], rows: FixedRows) -> None:
        weight = decoder.unembed_VD
        adapted = {
            str(number): segment.weights
            for number, segment in enumerate(segments)
            if segment.weights is not None
        }
        self._unembed_VD = weight
        self._rows = rows
        self._segments = segments
        self._slots = LoraSlots(
            decoder.config, max(len(adapted), 1), device=weight.device, dtype=weight.dtype
        )
        self._places = self._slots.place(adapted, adapted.get)
        self._rank = self._slots.rank(list(adapted))
        self._unembeds = self._slots.unembeds(list(adapted))
        self._tiles = self._tiles_between(0, segments[-1].stop)

    def base(self, linear: Linear, x_TI: Tensor) -> Tensor:
        """Return x times the weight in new memory."""
        return self._rows.linear(x_TI, linear.weight_OI, linear.bias_O)

    def add(self, layer: int, names: tuple[Projection, ...], x_TI: Tensor, y_TY: Tensor) -> None:
        """Add every segment's low-rank products to y."""
        self._slots.add(layer, names, x_TI, y_TY, self._tiles)

    def logits(self, h_CD: Tensor, start: int, stop: int) -> Tensor:
        """The fp32 logits of the pass's tokens from `start` to `stop`."""
        logits_CV = self._rows.logits(h_CD, self._unembed_VD)
        if self._unembeds:
            self._slots.add_unembed(h_CD, logits_CV, self._tiles_between(start, stop))
        return logits_CV

    def _tiles_between(self, start: int, stop: int) -> SlotTiles:
        runs = [
            (self._places.get(str(number), NO_SLOT), rows)
            for number, segment in enumerate(self._segments)
            if (rows := min(segment.stop, stop) - max(segment.start, start)) > 0
        ]
        table = torch.from_numpy(tile_table(runs))  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
        return SlotTiles(RowTiles(*table.to(self._unembed_VD.device)), self._rank, self._unembeds)
