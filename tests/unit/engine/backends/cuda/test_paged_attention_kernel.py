"""The attention kernel against plain float64 attention, and its rows against each other.

Shapes: T query tokens, N tokens of one sequence, S cache slots, H heads, G key/value heads,
d head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tinkex.engine.backends.cuda.paged_attention import (
    Tiles,
    default_tiles,
    packed_attention,
    paged_attention,
    strict_tiles,
)
from tinkex.errors import InputError

pytestmark = pytest.mark.usefixtures("poisoned")

BLOCK = 16
SMALL = Tiles(block_m=16, block_n=16, num_warps=4, num_stages=2)


def reference(q_NHd: torch.Tensor, k_LGd: torch.Tensor, v_LGd: torch.Tensor) -> torch.Tensor:
    """Attention of the last N of L tokens, in float64 on the CPU."""
    q_NHd, k_LGd, v_LGd = (x.cpu().double() for x in (q_NHd, k_LGd, v_LGd))
    queries, heads, dim = q_NHd.shape
    length, kv_heads = k_LGd.shape[:2]
    k_LHd, v_LHd = (x.repeat_interleave(heads // kv_heads, 1) for x in (k_LGd, v_LGd))
    scores_HNL = torch.einsum("nhd,lhd->hnl", q_NHd, k_LHd) * dim**-0.5
    positions_N = torch.arange(length - queries, length)
    hidden_NL = torch.arange(length) > positions_N[:, None]
    weights_HNL = scores_HNL.masked_fill(hidden_NL, -torch.inf).softmax(-1)
    return torch.einsum("hnl,lhd->nhd", weights_HNL, v_LHd)


@dataclass(frozen=True)
class Case:
    """Sequences with their whole queries, keys and values, and how they lie in a cache."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    keys_SGd: torch.Tensor
    values_SGd: torch.Tensor
    tables: list[list[int]]

    def paged(
        self,
        pieces: list[tuple[int, int]],
        *,
        tiles: Tiles | None = None,
        split_keys: int | None = None,
        contexts: list[int] | None = None,
        extra_width: int = 0,
    ) -> torch.Tensor:
        """Attention of pieces (sequence, queries); a context ends with its piece's queries."""
        device = self.keys_SGd.device
        contexts = contexts or [len(self.k[i]) for i, _ in pieces]
        rows = [
            self.q[i][end - count : end] for (i, count), end in zip(pieces, contexts, strict=True)
        ]
        width = max(len(self.tables[i]) for i, _ in pieces) + extra_width
        tables = [self.tables[i] + [0] * (width - len(self.tables[i])) for i, _ in pieces]
        counts = torch.tensor([0, *(count for _, count in pieces)])
        q_THd = torch.cat(rows)
        return paged_attention(
            q_THd,
            self.keys_SGd,
            self.values_SGd,
            cu_q=counts.cumsum(0).to(device, torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            block_size=BLOCK,
            max_q=max(count for _, count in pieces),
            out=torch.full_like(q_THd, torch.nan),
            tiles=tiles,
            split_keys=split_keys,
        )

    def packed(self, sequences: list[int], tiles: Tiles) -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.tensor([0, *(len(self.k[i]) for i in sequences)])
        q_THd, k_TGd, v_TGd = (
            torch.cat([x[i] for i in sequences]) for x in (self.q, self.k, self.v)
        )
        return packed_attention(
            q_THd,
            k_TGd,
            v_TGd,
            counts.cumsum(0).to(q_THd.device, torch.int32),
            int(counts.max()),
            out=torch.full_like(q_THd, torch.nan),
            tiles=tiles,
        )


def make(
    device: str,
    lengths: list[int],
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Random sequences in a shuffled cache; slots that hold nothing are NaN."""
    generator = torch.Generator().manual_seed(sum(lengths) + dim)

    def normal(length: int, count: int) -> torch.Tensor:
        return torch.randn((length, count, dim), generator=generator).to(device, dtype)

    q, k, v = ([normal(n, count) for n in lengths] for count in (heads[0], heads[1], heads[1]))
    sizes = [-(-length // BLOCK) for length in lengths]
    order = (torch.randperm(sum(sizes) + 1, generator=generator) + 1).tolist()
    tables = [[order.pop() for _ in range(size)] for size in sizes]
    slots = (sum(sizes) + 2) * BLOCK
    keys_SGd = torch.full((slots, heads[1], dim), torch.nan, dtype=dtype, device=device)
    values_SGd = keys_SGd.clone()
    for table, k_LGd, v_LGd in zip(tables, k, v, strict=True):
        positions = torch.arange(len(k_LGd))
        places = torch.tensor(table)[positions // BLOCK] * BLOCK + positions % BLOCK
        keys_SGd[places.to(device)] = k_LGd
        values_SGd[places.to(device)] = v_LGd
    return Case(q, k, v, keys_SGd, values_SGd, tables)


def expected(case: Case, pieces: list[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([reference(case.q[i][-n:], case.k[i], case.v[i]) for i, n in pieces])


@pytest.mark.parametrize(
    ("heads", "dim"), [((2, 2), 64), ((9, 3), 64), ((8, 2), 128), ((4, 2), 80), ((20, 1), 16)]
)
def test_decode_and_prefill_equal_plain_attention(
    device: str, heads: tuple[int, int], dim: int
) -> None:
    case = make(device, [1, 16, 37, 70], heads, dim)
    for pieces in ([(i, 1) for i in range(4)], [(0, 1), (1, 16), (2, 5), (3, 41)]):
        got = case.paged(pieces)
        torch.testing.assert_close(got.cpu().double(), expected(case, pieces), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_m", [16, 64])
def test_sixteen_bits_equal_plain_attention_to_their_precision(device: str, block_m: int) -> None:
    # The interpreter multiplies the bit patterns of bfloat16 (triton issue 11584).
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    case = make(device, [9, 70], (6, 2), 64, dtype)
    pieces = [(0, 1), (1, 23)]
    got = case.paged(pieces, tiles=Tiles(block_m, 32, 4, 2))
    assert got.dtype == dtype
    # Weights and results are rounded once each; values are about 1.
    step = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.cpu().double(), expected(case, pieces), rtol=step, atol=step)


def test_heads_of_strided_tensors_are_found(device: str) -> None:
    case = make(device, [21], (4, 2), 64)
    joined_THd = torch.cat([case.q[0], case.k[0], case.v[0]], dim=1)
    q_THd, k_TGd, v_TGd = joined_THd[:, :4], joined_THd[:, 4:6], joined_THd[:, 6:]
    cu = torch.tensor([0, 21], dtype=torch.int32, device=device)
    got, _ = packed_attention(q_THd, k_TGd, v_TGd, cu, 21, tiles=SMALL)
    assert torch.equal(got, case.packed([0], SMALL)[0])


def test_packed_attention_and_its_log_sum_exp_equal_plain_ones(device: str) -> None:
    case = make(device, [19, 1, 50], (6, 2), 64)
    out_THd, lse_HT = case.packed([0, 1, 2], SMALL)
    pieces = [(0, 19), (1, 1), (2, 50)]
    torch.testing.assert_close(out_THd.cpu().double(), expected(case, pieces), rtol=1e-5, atol=1e-5)
    k_LHd = case.k[2].cpu().repeat_interleave(3, 1).double()
    scores_HNL = torch.einsum("nhd,lhd->hnl", case.q[2].cpu().double(), k_LHd) / 8
    future_NL = torch.ones(50, 50, dtype=torch.bool).triu(1)
    lse_HN = scores_HNL.masked_fill(future_NL, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse_HT[:, 20:].cpu().double(), lse_HN, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 2)])
def test_a_row_has_the_same_bits_in_decode_in_prefill_and_packed(
    device: str, heads: tuple[int, int]
) -> None:
    """What strict mode relies on: the way a token is computed leaves no trace."""
    case = make(device, [70, 33, 5], heads, 64)
    tiles = replace(strict_tiles(torch.float32, heads[0] // heads[1]), block_n=16)
    whole = case.paged([(0, 70)], tiles=tiles)
    assert torch.equal(case.packed([2, 0, 1], tiles)[0][5:75], whole)
    chunk = case.paged([(1, 33), (0, 31)], tiles=tiles, contexts=[33, 70])
    assert torch.equal(chunk[33:], whole[39:])
    for context in (1, 16, 17, 50, 70):
        alone = case.paged([(0, 1)], tiles=tiles, contexts=[context])
        beside = case.paged([(1, 1), (0, 1), (2, 1)], tiles=tiles, contexts=[20, context, 5])
        assert torch.equal(alone[0], whole[context - 1])
        assert torch.equal(beside[1], whole[context - 1])


def test_bits_do_not_depend_on_tables_that_are_wider_than_needed(device: str) -> None:
    case = make(device, [40, 70], (4, 2), 64)
    for split_keys in (None, 32):
        narrow = case.paged([(0, 1)], tiles=SMALL, split_keys=split_keys)
        wide = case.paged([(0, 1)], tiles=SMALL, split_keys=split_keys, extra_width=40)
        assert torch.equal(narrow, wide)
        assert torch.equal(
            case.paged([(1, 1), (0, 1)], tiles=SMALL, split_keys=split_keys)[1], narrow[0]
        )


@pytest.mark.parametrize("dim", [64, 80])
def test_split_walks_equal_plain_attention(device: str, dim: int) -> None:
    case = make(device, [1, 32, 33, 90], (6, 2), dim)
    pieces = [(0, 1), (1, 1), (2, 7), (3, 2)]
    got = case.paged(pieces, tiles=SMALL, split_keys=32)
    torch.testing.assert_close(got.cpu().double(), expected(case, pieces), rtol=1e-5, atol=1e-5)


def test_more_parts_than_one_round_joins_are_all_counted(device: str) -> None:
    case = make(device, [290], (2, 1), 16)
    got = case.paged([(0, 1)], tiles=SMALL, split_keys=16)
    torch.testing.assert_close(got.cpu().double(), expected(case, [(0, 1)]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("split_keys", [None, 16])
def test_a_context_of_no_tokens_gives_zeros(device: str, split_keys: int | None) -> None:
    case = make(device, [20], (4, 2), 64)
    q_THd = torch.cat([case.q[0][-1:], case.q[0][-1:]])
    got = paged_attention(
        q_THd,
        case.keys_SGd,
        case.values_SGd,
        cu_q=torch.tensor([0, 1, 2], dtype=torch.int32, device=device),
        context_lens=torch.tensor([20, 0], dtype=torch.int32, device=device),
        block_tables=torch.tensor([case.tables[0]] * 2, dtype=torch.int32, device=device),
        block_size=BLOCK,
        max_q=1,
        out=torch.full_like(q_THd, torch.nan),
        tiles=SMALL,
        split_keys=split_keys,
    )
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    torch.testing.assert_close(
        got[:1].cpu().double(), expected(case, [(0, 1)]), rtol=1e-5, atol=1e-5
    )


def test_large_scores_do_not_overflow(device: str) -> None:
    case = make(device, [40], (2, 1), 64)
    loud = Case([case.q[0] * 300], case.k, case.v, case.keys_SGd, case.values_SGd, case.tables)
    got = loud.paged([(0, 40)], tiles=SMALL)
    assert got.isfinite().all()
    # Scores of some thousands carry float32 errors of 1e-4, and so do the weights.
    torch.testing.assert_close(got.cpu().double(), expected(loud, [(0, 40)]), rtol=5e-3, atol=5e-3)


def test_tiles_hold_at_least_one_query_of_all_heads_that_share_a_key_head() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert strict_tiles(dtype, 71).block_m == 128
        assert default_tiles(dtype, 20, 1).block_m == 32
        assert default_tiles(dtype, 1, 1).block_m == 16


def test_bad_arguments_are_refused_by_name(device: str) -> None:
    case = make(device, [20], (4, 2), 64)
    with pytest.raises(InputError, match="split_keys: must be a multiple of 16"):
        case.paged([(0, 1)], tiles=SMALL, split_keys=24)
    with pytest.raises(InputError, match=r"tiles\.block_m: is less than the 2 heads"):
        case.paged([(0, 1)], tiles=replace(SMALL, block_m=1))
    three = replace(case, q=[case.q[0][:, :3]])
    with pytest.raises(InputError, match="3 heads cannot share 2 key heads"):
        three.paged([(0, 1)])
    cu = torch.tensor([0, 20], dtype=torch.int32, device=device)
    q, k, v = case.q[0], case.k[0], case.v[0]
    with pytest.raises(InputError, match="heads must be contiguous"):
        packed_attention(q.transpose(1, 2), k.transpose(1, 2), v, cu, 20)
    wide = torch.zeros(20, 2, 320, device=device)
    with pytest.raises(InputError, match="heads of 320 numbers"):
        packed_attention(wide, wide, wide, cu, 20)
