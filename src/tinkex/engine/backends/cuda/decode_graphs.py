"""Decoding on a CUDA device: one captured graph per batch size samples a token for every row.

Launching each kernel of a decoding step would take longer than running it. A graph is captured the
first time its batch size occurs; smaller batches are padded with rows that write to a block that no
sequence uses. The inputs of a step from the host are two buffers and a table at constant addresses
on the device. A step may start before the tokens of the previous one have been read on the host: it
reads them on the device.

Shapes: B rows, W blocks per row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from tinkex.engine.backends.cuda.attention import Pages
from tinkex.engine.backends.cuda.cross_entropy import logprobs
from tinkex.engine.backends.cuda.fixed_rows import BLOCK_ROWS
from tinkex.engine.backends.cuda.lora import RowTiles
from tinkex.engine.backends.cuda.pick import pick
from tinkex.engine.backends.cuda.slots import TILE_ROWS, SlotTiles, tile_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.backends.cuda.adapters import CudaAdapters
    from tinkex.engine.decoder import Decoder
    from tinkex.engine.sampler.async_decode import DecodeRow

_TOKENS, _POSITIONS, _SLOTS, _CONTEXTS = range(4)
_TEMPERATURES, _UNIFORMS = range(2)
_BUSY_PROGRAMS: Final = 256
_SPLIT_KEYS: Final = 512
_SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


@dataclass(frozen=True, slots=True)
class Decoding:
    """A step that runs on the device; `logits_BV` are valid until the next one starts."""

    logits_BV: Tensor
    tokens_B: Tensor
    """The sampled tokens, on the device; in range even where logits are not finite."""
    drawn_2B: Tensor
    """The sampled tokens and their log-probabilities on the host, valid after `arrived`."""
    arrived: torch.cuda.Event

    def wait(self) -> tuple[list[int], list[float]]:
        """The sampled tokens and their log-probabilities, row by row."""
        self.arrived.synchronize()
        tokens, logprobs = self.drawn_2B.numpy()
        return tokens.astype(np.int64).tolist(), logprobs.tolist()


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits_BV: Tensor
    tokens_B: Tensor
    drawn_2B: Tensor


class _Host:
    """Pinned host memory for the inputs and results of one step."""

    def __init__(self, most: int, max_blocks: int, spare: int) -> None:
        self.ints = torch.zeros((4, most), dtype=torch.int64, pin_memory=True)
        self.floats = torch.zeros((2, most), dtype=torch.float64, pin_memory=True)
        self.tables = torch.full((most, max_blocks), spare, dtype=torch.int32, pin_memory=True)
        self.drawn = torch.zeros(2 * most, dtype=torch.float64, pin_memory=True)
        self.arrived = torch.cuda.Event()
        self._spare = spare
        # Per row of the table: the block list that it was written from, and its length then.
        self._known: list[tuple[list[int], int] | None] = [None] * most

    def fill(self, rows: Sequence[DecodeRow], size: int, block_size: int) -> None:
        """Write the inputs of a step; the device must have read those of the previous one."""
        count = len(rows)
        ints, floats = self.ints.numpy(), self.floats.numpy()
        self._fill_tables(rows)
        starts = np.fromiter((row.piece.start if row.piece else 0 for row in rows), np.int64, count)
        ints[_TOKENS, :count] = [row.piece.sequence.tokens[-1] if row.piece else 0 for row in rows]
        ints[_POSITIONS, :count] = starts
        ints[_CONTEXTS, :count] = starts + 1
        blocks = self.tables.numpy()[np.arange(count), starts // block_size]
        ints[_SLOTS, :count] = blocks.astype(np.int64) * block_size + starts % block_size
        ints[:, count:size] = np.array([[0], [0], [self._spare * block_size], [1]])
        floats[_TEMPERATURES, :count] = [row.temperature for row in rows]
        floats[_UNIFORMS, :count] = [row.uniform for row in rows]
        floats[:, count:size] = 0.0

    def _fill_tables(self, rows: Sequence[DecodeRow]) -> None:
        """Write the rows that changed since the last step; padding gets the spare block."""
        tables = self.tables.numpy()
        for number, known in enumerate(self._known):
            piece = rows[number].piece if number < len(rows) else None
            if piece is not None:
                # A restarted sequence has a new list; a growing one appends to its list.
                blocks = piece.sequence.blocks
                if known is None or known[0] is not blocks or known[1] != len(blocks):
                    tables[number, : len(blocks)] = blocks
                    self._known[number] = (blocks, len(blocks))
            elif known is not None:
                tables[number, 0] = self._spare
                self._known[number] = None


class DecodeGraphs:
    """Runs passes in which every sequence computes exactly its last token."""

    def __init__(
        self,
        decoder: Decoder,
        cache: Tensor,
        adapters: CudaAdapters,
        *,
        block_size: int,
        max_sequences: int,
        max_blocks: int,
        spare_block: int,
        strict: bool,
    ) -> None:
        device = cache.device
        self._decoder = decoder
        self._cache = cache
        self._adapters = adapters
        self._block_size = block_size
        self._spare = spare_block
        self._strict = strict
        self._sizes = _sizes(max_sequences, strict=strict)
        most = self._sizes[-1]
        # All mutable state: the inputs that graphs read on the device, their host buffers, and the
        # graphs by (size, tiles, rank, unembed). There are two host buffers because one step's
        # inputs are written while the device may still copy the other's.
        self._ints = torch.zeros((4, most), dtype=torch.int64, device=device)
        self._floats = torch.zeros((2, most), dtype=torch.float64, device=device)
        self._tables = torch.zeros((most, max_blocks), dtype=torch.int32, device=device)
        self._tiles = torch.zeros((3, most), dtype=torch.int32, device=device)
        self._first_rows = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._hosts = [_Host(most, max_blocks, spare_block) for _ in range(2)]
        self._graphs: dict[tuple[int, int, int, bool], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def size(self, count: int) -> int:
        """The number of rows that a step of `count` rows computes."""
        return next(size for size in self._sizes if size >= count)

    def start(self, rows: Sequence[DecodeRow], after: Decoding | None = None) -> Decoding:
        """Start computing the pieces' last tokens and sampling the next ones.

        Rows are ordered by version. With `after`, the last tokens are those that this unfinished
        step samples, row by row. At most two steps may be unfinished.
        """
        size = self.size(len(rows))
        host = self._hosts[0]
        self._hosts.reverse()
        # This buffer served the step before the last: done, unless that was never waited for.
        host.arrived.synchronize()
        host.fill(rows, size, self._block_size)
        self._ints.copy_(host.ints, non_blocking=True)
        self._floats.copy_(host.floats, non_blocking=True)
        # Whole rows, because only those are contiguous.
        self._tables[:size].copy_(host.tables[:size], non_blocking=True)
        if after is not None:
            self._ints[_TOKENS, : len(rows)].copy_(after.tokens_B[: len(rows)])
        tiles = self._write_tiles([row.version for row in rows], size)
        key = (size, tiles.rows.slots_K.shape[0], tiles.rank, tiles.unembed)
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._graphs[key] = self._capture(size, tiles)
        captured.graph.replay()
        drawn_2B = host.drawn[: 2 * size].view(2, size)
        drawn_2B.copy_(captured.drawn_2B, non_blocking=True)
        host.arrived.record()
        return Decoding(
            captured.logits_BV, captured.tokens_B, drawn_2B[:, : len(rows)], host.arrived
        )

    def _write_tiles(self, versions: Sequence[str], size: int) -> SlotTiles:
        runs, rank, unembed = self._adapters.runs(versions)
        if not rank:
            return SlotTiles(RowTiles(*self._tiles[:, :0]), 0, False)
        found = tile_table(runs)
        count = next(count for count in _tile_counts(size) if count >= found.shape[1])
        table = np.zeros((3, count), np.int32)  # a tile without rows is a no-op
        table[:, : found.shape[1]] = found
        self._tiles[:, :count] = torch.from_numpy(table)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
        return SlotTiles(RowTiles(*self._tiles[:, :count]), rank, unembed)

    def _capture(self, size: int, tiles: SlotTiles) -> _Captured:
        """Run the step twice, so that every kernel is compiled and autotuned, then capture it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(size, tiles)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            found = self._step(size, tiles)
        return _Captured(graph, *found)

    @torch.no_grad()
    def _step(self, size: int, tiles: SlotTiles) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, tokens, and tokens with their log-probabilities."""
        ints, floats = self._ints[:, :size], self._floats[:, :size]
        pages = Pages(
            slots_T=ints[_SLOTS],
            cu_q=self._first_rows[: size + 1],
            contexts=ints[_CONTEXTS].int(),
            tables=self._tables[:size],
            block_size=self._block_size,
            longest=1,
            strict=self._strict,
            split_keys=self._split_keys(size),
        )
        h_BD = self._decoder.hidden(
            ints[_TOKENS],
            ints[_POSITIONS],
            partial(pages.attend, self._cache),
            self._adapters.tiled(tiles),
        )
        logits_BV = self._adapters.tiled_logits(h_BD, tiles)
        tokens_B = pick(logits_BV, floats[_TEMPERATURES].float(), floats[_UNIFORMS])
        # The same function as in training and for prompts, so that all have the same bits.
        logprobs_B1, _ = logprobs(logits_BV, tokens_B[:, None])
        drawn_2B = torch.stack((tokens_B.double(), logprobs_B1[:, 0].double()))
        return logits_BV, tokens_B, drawn_2B

    def _split_keys(self, size: int) -> int | None:
        """Few long contexts leave the device idle unless each is split; strict mode splits none."""
        enough = size * self._decoder.config.num_kv_heads >= _BUSY_PROGRAMS
        return None if enough or self._strict else _SPLIT_KEYS


def _sizes(most: int, *, strict: bool) -> tuple[int, ...]:
    """The batch sizes to capture: some below the maximum, and the maximum.

    Strict products run on blocks of `BLOCK_ROWS` rows, so smaller batches would save nothing.
    """
    if strict:
        return tuple(range(BLOCK_ROWS, most + BLOCK_ROWS, BLOCK_ROWS))
    return (*(size for size in _SIZES if size < most), most)


def _tile_counts(rows: int) -> tuple[int, ...]:
    """The numbers of tiles to capture: for few adapters, for many, and one per row."""
    full = -(-rows // TILE_ROWS)
    return tuple(sorted({min(full + 4, rows), min(full + 40, rows), rows}))
