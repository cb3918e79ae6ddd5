"""The attention gradients against float64 autograd of plain attention, and against each other.

Shapes: T tokens, N tokens of one sequence, H heads, G key/value heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tinkex.engine.backends.cuda.attention_backward import (
    BackwardTiles,
    packed_attention_backward,
)
from tinkex.engine.backends.cuda.paged_attention import Tiles, packed_attention
from tinkex.errors import InputError

pytestmark = pytest.mark.usefixtures("poisoned")

SMALL = BackwardTiles(Tiles(16, 32, 4, 2), Tiles(16, 16, 4, 2))
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Sequences with their queries, keys, values and the gradients of their attention."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    do: list[torch.Tensor]

    def gradients(
        self,
        sequences: list[int] | None = None,
        *,
        tiles: BackwardTiles | None = SMALL,
        scale: float | None = None,
        longest: int | None = None,
    ) -> Gradients:
        """What the kernels say of these sequences laid end to end."""
        chosen = range(len(self.q)) if sequences is None else sequences
        q_THd, k_TGd, v_TGd, do_THd = (
            torch.cat([x[i] for i in chosen]) for x in (self.q, self.k, self.v, self.do)
        )
        counts = torch.tensor([0, *(len(self.q[i]) for i in chosen)])
        cu = counts.cumsum(0).to(q_THd.device, torch.int32)
        longest = longest or int(counts.max())
        o_THd, lse_HT = packed_attention(q_THd, k_TGd, v_TGd, cu, longest, scale=scale)
        return packed_attention_backward(
            *(do_THd, q_THd, k_TGd, v_TGd, o_THd, lse_HT, cu, longest), scale=scale, tiles=tiles
        )

    def expected(self, scale: float | None = None) -> Gradients:
        """What autograd says, in float64 on the CPU."""
        found = [
            reference(*sequence, scale)
            for sequence in zip(self.q, self.k, self.v, self.do, strict=True)
        ]
        dq, dk, dv = (torch.cat(parts) for parts in zip(*found, strict=True))
        return dq, dk, dv


def reference(
    q_NHd: torch.Tensor,
    k_NGd: torch.Tensor,
    v_NGd: torch.Tensor,
    do_NHd: torch.Tensor,
    scale: float | None,
) -> Gradients:
    q_NHd, k_NGd, v_NGd = (x.cpu().double().requires_grad_() for x in (q_NHd, k_NGd, v_NGd))
    length, heads, dim = q_NHd.shape
    group = heads // k_NGd.shape[1]
    k_NHd, v_NHd = (x.repeat_interleave(group, 1) for x in (k_NGd, v_NGd))
    scores_HNN = torch.einsum("nhd,mhd->hnm", q_NHd, k_NHd) * (scale or dim**-0.5)
    hidden_NN = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights_HNN = scores_HNN.masked_fill(hidden_NN, -torch.inf).softmax(-1)
    o_NHd = torch.einsum("hnm,mhd->nhd", weights_HNN, v_NHd)
    dq, dk, dv = torch.autograd.grad(o_NHd, (q_NHd, k_NGd, v_NGd), do_NHd.cpu().double())
    return dq, dk, dv


def make(
    device: str,
    lengths: list[int],
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype = torch.float32,
) -> Case:
    generator = torch.Generator().manual_seed(sum(lengths) + dim)

    def normal(count: int) -> list[torch.Tensor]:
        return [
            torch.randn((n, count, dim), generator=generator).to(device, dtype) for n in lengths
        ]

    return Case(normal(heads[0]), normal(heads[1]), normal(heads[1]), normal(heads[0]))


def assert_near(got: Gradients, expected: Gradients, tolerance: float) -> None:
    for name, found, wanted in zip("qkv", got, expected, strict=True):
        torch.testing.assert_close(
            found.cpu().double(),
            wanted,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"d{name}: {text}",
        )


@pytest.mark.parametrize(
    ("heads", "dim"), [((2, 2), 16), ((4, 2), 64), ((3, 1), 80), ((4, 1), 128), ((20, 1), 16)]
)
def test_gradients_equal_those_of_plain_attention(
    device: str, heads: tuple[int, int], dim: int
) -> None:
    case = make(device, [1, 32, 45], heads, dim)
    assert_near(case.gradients(), case.expected(), 2e-5)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 97])
def test_every_length_is_walked_to_its_end(device: str, length: int) -> None:
    case = make(device, [length], (2, 1), 16)
    assert_near(case.gradients(), case.expected(), 2e-5)


@pytest.mark.parametrize(
    ("rows", "keys"), [((16, 16), (16, 16)), ((64, 16), (16, 64)), ((32, 64), (64, 16))]
)
def test_any_tiles_give_the_gradients(
    device: str, rows: tuple[int, int], keys: tuple[int, int]
) -> None:
    case = make(device, [70, 21], (6, 2), 16)
    tiles = BackwardTiles(Tiles(rows[0], keys[0], 4, 2), Tiles(rows[1], keys[1], 4, 2))
    assert_near(case.gradients(tiles=tiles), case.expected(), 2e-5)


@pytest.mark.parametrize("dim", [64, 128])
def test_sixteen_bits_equal_plain_gradients_to_their_precision(device: str, dim: int) -> None:
    # The interpreter multiplies the bit patterns of bfloat16 (triton issue 11584).
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    case = make(device, [9, 140], (4, 2), dim, dtype)
    got = case.gradients(tiles=None)
    assert all(x.dtype == dtype for x in got)
    # Weights and their gradients are rounded once each, as are results and the output they use.
    assert_near(got, case.expected(), 8 * torch.finfo(dtype).eps)


def test_a_scale_of_ones_own_is_used(device: str) -> None:
    case = make(device, [20], (2, 1), 16)
    assert_near(case.gradients(scale=0.7), case.expected(0.7), 2e-5)


def test_strided_rows_give_the_same_bits_as_dense_ones(device: str) -> None:
    case = make(device, [21], (4, 2), 64)
    q_THd, k_TGd, v_TGd, do_THd = case.q[0], case.k[0], case.v[0], case.do[0]
    cu = torch.tensor([0, 21], dtype=torch.int32, device=device)
    o_THd, lse_HT = packed_attention(q_THd, k_TGd, v_TGd, cu, 21)
    dense = packed_attention_backward(
        do_THd, q_THd, k_TGd, v_TGd, o_THd, lse_HT, cu, 21, tiles=SMALL
    )
    joined = torch.cat([q_THd, k_TGd, v_TGd, do_THd, o_THd], dim=1)
    strided = packed_attention_backward(
        *(joined[:, 8:12], joined[:, :4], joined[:, 4:6], joined[:, 6:8], joined[:, 12:]),
        *(lse_HT, cu, 21),
        tiles=SMALL,
    )
    assert all(torch.equal(a, b) for a, b in zip(dense, strided, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_at_odd_addresses_give_the_gradients(device: str, dtype: torch.dtype) -> None:
    """Heads of 21 numbers start wherever; descriptors could not show them."""
    case = make(device, [9, 20], (2, 1), 21, dtype)
    assert_near(case.gradients(), case.expected(), max(2e-5, 8 * torch.finfo(dtype).eps))


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (4, 2)])
def test_a_sequence_has_the_same_bits_alone_and_beside_others(
    device: str, heads: tuple[int, int]
) -> None:
    case = make(device, [5, 45, 17], heads, 16)
    together = case.gradients()
    assert all(torch.equal(a, b) for a, b in zip(together, case.gradients(), strict=True))
    alone = case.gradients([1], longest=90)
    assert all(torch.equal(a[5:50], b) for a, b in zip(together, alone, strict=True))


def test_what_is_not_finite_stays_in_its_sequence(device: str) -> None:
    case = make(device, [5, 40, 33], (4, 2), 16)
    wild = replace(
        case,
        **{
            x: [getattr(case, x)[0], getattr(case, x)[1] * torch.nan, getattr(case, x)[2]]
            for x in ("q", "k", "v", "do")
        },
    )
    for tame, beside in zip(case.gradients(), wild.gradients(), strict=True):
        assert torch.equal(tame[:5], beside[:5])
        assert torch.equal(tame[45:], beside[45:])
        assert beside[5:45].isnan().all()


def test_large_scores_do_not_overflow(device: str) -> None:
    case = make(device, [40], (2, 1), 16)
    loud = replace(case, q=[case.q[0] * 300])
    assert all(x.isfinite().all() for x in loud.gradients())


def test_bad_arguments_are_refused_by_name(device: str) -> None:
    case = make(device, [20], (4, 2), 16)
    q, k, v, do = case.q[0], case.k[0], case.v[0], case.do[0]
    lse = torch.zeros(4, 20, device=device)
    cu = torch.tensor([0, 20], dtype=torch.int32, device=device)
    with pytest.raises(InputError, match="3 heads cannot share 2 key heads"):
        packed_attention_backward(do, q[:, :3], k, v, q, lse, cu, 20)
    with pytest.raises(InputError, match="tiles: must have 16 rows or more"):
        case.gradients(tiles=replace(SMALL, queries=Tiles(8, 16, 4, 2)))
    with pytest.raises(InputError, match=r"v_TGd: is \[20, 1, 16\], not \[20, 2, 16\]"):
        packed_attention_backward(do, q, k, v[:, :1], q, lse, cu, 20)
    with pytest.raises(InputError, match="do_THd: heads must be contiguous"):
        packed_attention_backward(do[:, :, :1].expand(-1, -1, 16), q, k, v, q, lse, cu, 20)
    with pytest.raises(InputError, match="lse_HT: must hold one value per head and token"):
        packed_attention_backward(do, q, k, v, q, lse.T, cu, 20)
    wide = torch.zeros(20, 2, 320, device=device)
    with pytest.raises(InputError, match="heads of 320 numbers"):
        packed_attention_backward(wide, wide, wide, wide, wide, lse[:2], cu, 20)
