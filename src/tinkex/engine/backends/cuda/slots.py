"""Adapters on a CUDA device as a table of addresses: one kernel serves any mix of them.

A slot is one version of the weights: a copy in the precision of the activations, and the addresses
of its factors. The tables have constant addresses, so captured graphs can read them. A pass assigns
its rows to slots in tiles of at most `TILE_ROWS` rows of one slot.

The mapping that holds the copies may drop some between two passes, to stay within a budget. That
frees their slots, and a version gets a new copy when it is next used.

Shapes: T rows, S slots, P projections that share an input, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from tinkex.engine.backends.cuda.lora import RowTiles, expand_add_, shrink
from tinkex.engine.decoder import SHARED_INPUT
from tinkex.engine.lora.shapes import matrix_shape
from tinkex.engine.lora.weights import wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, MutableMapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tinkex.engine.decoder import DecoderConfig, Projection
    from tinkex.engine.lora.shapes import Matrix
    from tinkex.engine.lora.weights import LoraWeights

TILE_ROWS: Final = 16
NO_SLOT: Final = -1
_SMALLEST_RANK: Final = 16


@dataclass(frozen=True, slots=True)
class SlotTiles:
    """Rows by slot, on the device.

    `rank` bounds the ranks of these slots; 0 means that there is nothing to add.
    """

    rows: RowTiles
    rank: int
    unembed: bool


def tile_table(runs: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
    """Cut runs of (slot, rows) into tiles [3, tiles]; rows without an adapter are in none."""
    found: list[tuple[int, int, int]] = []
    row = 0
    for slot, count in runs:
        if slot != NO_SLOT:
            found += [
                (slot, first, min(TILE_ROWS, row + count - first))
                for first in range(row, row + count, TILE_ROWS)
            ]
        row += count
    return np.array(found, np.int32).reshape(-1, 3).T.copy()


class _Slot(NamedTuple):
    number: int
    rank: int
    unembeds: bool


class LoraSlots:
    """The versions that the kernels can use, at most `slots` of them at a time.

    `copies` holds their copies: by default a dict, which drops none.
    """

    def __init__(
        self,
        config: DecoderConfig,
        slots: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        copies: MutableMapping[str, LoraWeights] | None = None,
    ) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype
        layers = config.num_layers
        self._widths = {
            names: tuple(matrix_shape(config, name)[1] for name in names) for names in SHARED_INPUT
        }
        # Mutable state. On the device, at constant addresses: the factors' addresses as [layer, 2,
        # S, P], those of the unembedding as [2, S, 1], and rank and scale by slot. On the host: the
        # slot of each version, least recently used first, and the copies.
        self._tables = {
            names: torch.zeros((layers, 2, slots, len(names)), dtype=torch.int64, device=device)
            for names in SHARED_INPUT
        }
        # Views of the same memory as pairs of [S, P], made once: making one takes time in every
        # layer.
        self._addresses = {
            names: [(factors[0], factors[1]) for factors in table.unbind()]
            for names, table in self._tables.items()
        }
        self._unembed = torch.zeros((2, slots, 1), dtype=torch.int64, device=device)
        self._ranks = torch.zeros(slots, dtype=torch.int32, device=device)
        self._scales = torch.zeros(slots, dtype=torch.float32, device=device)
        self._used: OrderedDict[str, _Slot] = OrderedDict()
        self._copies: MutableMapping[str, LoraWeights] = {} if copies is None else copies
        self._free = list(range(slots - 1, -1, -1))

    @property
    def in_use(self) -> list[str]:
        """The versions that have a slot, least recently used first."""
        return [version for version in self._used if version in self._copies]

    def place(
        self, versions: Iterable[str], find: Callable[[str], LoraWeights | None]
    ) -> dict[str, int]:
        """Give every version a slot; one that has none takes the least recently used.

        `find` gives the weights of a version on any device; they never change. A version without
        weights gets no slot.
        """
        wanted = dict.fromkeys(versions)
        # Touch those that have a slot first, so that they are not evicted for the others.
        missing = [version for version in wanted if not self._touch(version)]
        for version in missing:
            weights = find(version)
            if weights is None:
                del wanted[version]
            else:
                self._fill(version, weights)
        return {version: self._used[version].number for version in wanted}

    def _touch(self, version: str) -> bool:
        """Mark a version as recently used; False when it has no slot yet."""
        if version not in self._used or version not in self._copies:
            return False
        self._copies[version]  # a read: the least recently read copy is dropped first
        self._used.move_to_end(version)
        return True

    def forget(self, version: str) -> None:
        """Free a version's slot; unknown versions are ignored."""
        slot = self._used.pop(version, None)
        if slot is not None:
            if version in self._copies:
                del self._copies[version]
            self._free.append(slot.number)

    def _free_slot(self) -> int:
        if not self._free:
            gone = [version for version in self._used if version not in self._copies]
            for version in gone or [next(iter(self._used))]:
                self.forget(version)
        return self._free.pop()

    def rank(self, versions: Sequence[str]) -> int:
        """An upper bound of the ranks of these versions, a power of two."""
        ranks = [self._used[version].rank for version in versions]
        return max(_SMALLEST_RANK, 1 << (max(ranks) - 1).bit_length()) if ranks else 0

    def unembeds(self, versions: Sequence[str]) -> bool:
        """Whether one of these versions changes the unembedding."""
        return any(self._used[version].unembeds for version in versions)

    def add(
        self,
        layer: int,
        names: tuple[Projection, ...],
        x_TI: Tensor,
        y_TO: Tensor,
        tiles: SlotTiles,
    ) -> None:
        """Add the low-rank products of projections that share an input to their joined output."""
        if tiles.rank:
            a_SP, b_SP = self._addresses[names][layer]
            self._add(x_TI, y_TO, a_SP, b_SP, tiles, self._widths[names])

    def add_unembed(self, x_TI: Tensor, logits_TV: Tensor, tiles: SlotTiles) -> None:
        """Add the low-rank product of the unembedding to the logits."""
        if tiles.rank and tiles.unembed:
            a_SP, b_SP = self._unembed.unbind()
            self._add(x_TI, logits_TV, a_SP, b_SP, tiles, (logits_TV.shape[1],))

    def _add(
        self,
        x_TI: Tensor,
        y_TO: Tensor,
        a_SP: Tensor,
        b_SP: Tensor,
        tiles: SlotTiles,
        widths: tuple[int, ...],
    ) -> None:
        z = shrink(x_TI, a_SP, self._ranks, tiles.rows, max_rank=tiles.rank, block_rows=TILE_ROWS)
        expand_add_(
            *(y_TO, z, b_SP, self._ranks, self._scales, tiles.rows),
            sizes=widths,
            dtype=self._dtype,
            block_rows=TILE_ROWS,
        )

    def _fill(self, version: str, weights: LoraWeights) -> None:
        self.forget(version)  # it still has the slot of a copy that was dropped
        copy_P = weights.flat_P.to(self._device, self._dtype, copy=True)
        kept = self._copies[version] = wrap(weights.config, weights.lora, copy_P)
        slot = self._free_slot()
        for names, table in self._tables.items():
            found = [
                [[_address(kept, layer, name, factor) for name in names] for factor in (0, 1)]
                for layer in range(self._config.num_layers)
            ]
            table[:, :, slot] = torch.tensor(found, dtype=torch.int64).to(self._device)
        heads = [[_address(kept, None, "unembed", factor)] for factor in (0, 1)]
        self._unembed[:, slot] = torch.tensor(heads, dtype=torch.int64).to(self._device)
        self._ranks[slot] = kept.lora.rank
        self._scales[slot] = kept.scale
        self._used[version] = _Slot(slot, kept.lora.rank, heads[0][0] != 0)


def _address(weights: LoraWeights, layer: int | None, name: Matrix, factor: int) -> int:
    """The address of a factor; 0 when the adapter does not cover the matrix."""
    pair = weights.pair(layer, name)
    return 0 if pair is None else pair[factor].data_ptr()
