"""Corrections of many adapters against plain products in float64, and rows against each other.

Shapes: T rows, I inputs, Y width of the joined output, S slots, P projections, R largest rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tinkex.engine.backends.cuda.lora import RowTiles, default_splits, expand_add_, shrink
from tinkex.errors import InputError

BASE = -1


@dataclass(frozen=True)
class Adapters:
    """Slots of adapters that lie anywhere; None where a slot does not adapt a projection."""

    sizes: tuple[int, ...]
    ranks: list[int]
    scales: list[float]
    a: list[list[torch.Tensor | None]]
    b: list[list[torch.Tensor | None]]

    def add_to(
        self,
        y_TY: torch.Tensor,
        x_TI: torch.Tensor,
        tiles: list[tuple[int, int, int]],
        *,
        splits: int | None = None,
        max_rank: int | None = None,
        offsets: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """y with the corrections added; tiles are (slot, first row, rows)."""
        device = x_TI.device
        columns = [
            torch.tensor(column, dtype=torch.int32, device=device)
            for column in zip(*tiles, strict=True)
        ]
        ranks_S = torch.tensor(self.ranks, dtype=torch.int32, device=device)
        z_NTPR = shrink(
            x_TI,
            _addresses(self.a, device),
            ranks_S,
            RowTiles(*columns),
            max_rank=max_rank or max(self.ranks),
            splits=splits,
            block_i=16,
        )
        y_TY = y_TY.clone()
        expand_add_(
            y_TY,
            z_NTPR,
            _addresses(self.b, device),
            ranks_S,
            torch.tensor(self.scales, device=device),
            RowTiles(*columns),
            sizes=self.sizes,
            offsets=offsets,
            dtype=x_TI.dtype,
            block_o=32,
        )
        return y_TY

    def expected(
        self,
        y_TY: torch.Tensor,
        x_TI: torch.Tensor,
        tiles: list[tuple[int, int, int]],
        offsets: tuple[int, ...],
    ) -> torch.Tensor:
        y_TY, x_TI = y_TY.cpu().double(), x_TI.cpu().double()
        for slot, first, count in tiles:
            rows = slice(first, first + count)
            for p, (offset, size) in enumerate(zip(offsets, self.sizes, strict=True)):
                if slot == BASE or (a_RI := self.a[slot][p]) is None:
                    continue
                b_OR = self.b[slot][p]
                assert b_OR is not None
                added = x_TI[rows] @ a_RI.cpu().double().T @ b_OR.cpu().double().T
                y_TY[rows, offset : offset + size] += self.scales[slot] * added
        return y_TY


def _addresses(matrices: list[list[torch.Tensor | None]], device: torch.device) -> torch.Tensor:
    rows = [[0 if m is None else m.data_ptr() for m in row] for row in matrices]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def make(
    device: str,
    ranks: list[int],
    inputs: int,
    sizes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    shift: int = 0,
) -> Adapters:
    """Random adapters in flat vectors, each matrix `shift` numbers off a multiple of 16 bytes."""
    generator = torch.Generator().manual_seed(sum(ranks) + inputs)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        flat = torch.randn(rows * columns, generator=generator).to(device, dtype) / columns**0.5
        room = torch.zeros(len(flat) + shift, dtype=dtype, device=device)
        room[shift:] = flat
        return room[shift:].view(rows, columns)

    a = [[matrix(rank, inputs) for _ in sizes] for rank in ranks]
    b = [[matrix(size, rank) for size in sizes] for rank in ranks]
    scales = [0.5 + slot for slot in range(len(ranks))]
    return Adapters(sizes, ranks, scales, [list(row) for row in a], [list(row) for row in b])


def normal(device: str, seed: int, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, columns), generator=generator).to(device)


TILES = [(0, 0, 5), (1, 5, 16), (1, 21, 2), (BASE, 23, 7), (2, 30, 7), (BASE, 0, 0), (2, 0, 0)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize("shift", [0, 1])
def test_adapters_of_all_ranks_equal_plain_products(device: str, splits: int, shift: int) -> None:
    adapters = make(device, [3, 8, 20], 72, (40, 24, 70), shift=shift)
    x_TI, y_TY = normal(device, 1, 37, 72), normal(device, 2, 37, 134)
    got = adapters.add_to(y_TY, x_TI, TILES, splits=splits)
    want = adapters.expected(y_TY, x_TI, TILES, (0, 40, 64))
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[23:30], y_TY[23:30])


@pytest.mark.usefixtures("poisoned")
def test_ranks_beyond_one_block_equal_plain_products(device: str) -> None:
    adapters = make(device, [1, 136], 48, (40,))
    tiles = [(1, 0, 9), (0, 9, 3)]
    x_TI, y_TY = normal(device, 3, 12, 48), normal(device, 4, 12, 40)
    got = adapters.add_to(y_TY, x_TI, tiles)
    want = adapters.expected(y_TY, x_TI, tiles, (0,))
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("poisoned")
def test_a_projection_without_address_is_left_alone(device: str) -> None:
    adapters = make(device, [8, 4], 32, (32, 48))
    adapters.a[0][1] = adapters.b[0][1] = None
    adapters.a[1][0] = adapters.b[1][0] = None
    tiles = [(0, 0, 4), (1, 4, 4)]
    x_TI, y_TY = normal(device, 5, 8, 32), normal(device, 6, 8, 80)
    got = adapters.add_to(y_TY, x_TI, tiles)
    torch.testing.assert_close(
        got.cpu().double(), adapters.expected(y_TY, x_TI, tiles, (0, 32)), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(got[:4, 32:], y_TY[:4, 32:])
    assert torch.equal(got[4:, :32], y_TY[4:, :32])


@pytest.mark.usefixtures("poisoned")
def test_outputs_may_lie_apart_in_wider_rows(device: str) -> None:
    adapters = make(device, [5], 40, (33, 20))
    x_TI = normal(device, 7, 6, 90)[:, 40:80]
    y_TY = normal(device, 8, 6, 200)
    got = adapters.add_to(y_TY[:, 10:170], x_TI, [(0, 0, 6)], offsets=(100, 7))
    want = adapters.expected(y_TY[:, 10:170], x_TI, [(0, 0, 6)], (100, 7))
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("poisoned")
def test_sixteen_bits_round_once_more_than_plain_products(device: str) -> None:
    # The interpreter multiplies the bit patterns of bfloat16 (triton issue 11584).
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    adapters = make(device, [16, 6], 64, (32, 48), dtype)
    x_TI, y_TY = normal(device, 9, 20, 64).to(dtype), normal(device, 10, 20, 80)
    tiles = [(0, 0, 12), (1, 12, 8)]
    step = 4 * torch.finfo(dtype).eps
    for y in (y_TY, y_TY.to(dtype)):
        got = adapters.add_to(y, x_TI, tiles)
        assert got.dtype == y.dtype
        want = adapters.expected(y, x_TI, tiles, (0, 32))
        torch.testing.assert_close(got.cpu().double(), want, rtol=step, atol=step)


def test_a_row_has_the_same_bits_whatever_lies_beside_it(device: str) -> None:
    adapters = make(device, [20, 6, 40], 72, (40, 24))
    x_TI, y_TY = normal(device, 11, 37, 72), normal(device, 12, 37, 64)
    together = adapters.add_to(y_TY, x_TI, [(0, 0, 16), (0, 16, 9), (1, 25, 12)])
    # Other tiles, other ranks in the pass, another place in the tables.
    apart = adapters.add_to(y_TY, x_TI, [(0, row, 1) for row in range(25)], max_rank=20)
    assert torch.equal(apart[:25], together[:25])
    moved = Adapters(
        adapters.sizes,
        [6, 20],
        [adapters.scales[1], adapters.scales[0]],
        [adapters.a[1], adapters.a[0]],
        [adapters.b[1], adapters.b[0]],
    )
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0)).to(device)
    rows = [(int(order[i] < 25), i, 1) for i in range(37)]
    shuffled = moved.add_to(y_TY[order], x_TI[order], rows)
    assert torch.equal(shuffled, together[order])


def test_parts_of_the_sum_depend_on_the_width_alone() -> None:
    assert [default_splits(n) for n in (16, 576, 1024, 4096, 14336)] == [1, 1, 2, 4, 8]


def test_bad_arguments_are_refused_by_name(device: str) -> None:
    adapters = make(device, [4], 32, (16, 16))
    x_TI, y_TY = normal(device, 1, 8, 32), normal(device, 2, 8, 32)
    with pytest.raises(InputError, match="x_TI: rows must be contiguous"):
        adapters.add_to(y_TY, normal(device, 1, 32, 8).T, [(0, 0, 8)])
    with pytest.raises(InputError, match="sizes: 2 projections need as many"):
        adapters.add_to(y_TY, x_TI, [(0, 0, 8)], offsets=(0,))
    ranks_S = torch.tensor([4], dtype=torch.int32, device=device)
    tiles = RowTiles(ranks_S, ranks_S, ranks_S)
    with pytest.raises(InputError, match=r"dtype: adapters of type torch\.float64"):
        shrink(x_TI, ranks_S[:, None].long(), ranks_S, tiles, max_rank=4, dtype=torch.float64)
