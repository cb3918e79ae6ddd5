"""From logits to tokens and log-probabilities.

Random numbers are Philox4x32-10 of (seed, sample, position), so a draw does not depend on other
draws or on the batch. Log-probabilities are the model's own, at temperature 1 and
before top-k and top-p, whatever the token was drawn with.

Shapes: B rows, V vocabulary, K best tokens or draws of a row, C blocks of W tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from tinkex.engine.backends.torch.cross_entropy import exponentials_, row_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

_U32 = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
# float32 cannot represent the reciprocal of a lower temperature; such draws are greedy anyway.
_COLDEST = 1e-30
_CANDIDATES = 1024
_BLOCK = 256
# The largest vocabulary whose cumulative sum is computed in one call on a CPU.
_FEW_TOKENS = 4096


def philox(counter: Sequence[Any], key: Sequence[Any]) -> list[NDArray[np.uint64]]:
    """Philox4x32-10 (Salmon et al., SC 2011): four counter words and two key words to four words.

    Words are 32-bit numbers in uint64 arrays, so that products do not overflow.
    """
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, np.uint64) for word in key)
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ k0,
            p1 & _U32,
            (p0 >> _SHIFT) ^ c3 ^ k1,
            p0 & _U32,
        )
        k0, k1 = (k0 + _WEYL[0]) & _U32, (k1 + _WEYL[1]) & _U32
    return [c0, c1, c2, c3]


def uniforms(seed: Any, sample: Any, position: Any, draw: Any = 0) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits; the arguments are numbers or arrays of them.

    Draw 0 is the sampled token; alternative prompt tokens take the draws from 1 on.
    """
    seeds = np.asarray(seed, np.uint64)
    w0, w1, _, _ = philox((position, draw, sample, 0), (seeds & _U32, seeds >> _SHIFT))
    bits = ((w0 << _SHIFT) | w1) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def seed_of(seed: int | None, op_id: str) -> int:
    """The 64-bit seed of a request; without one its own id makes calls differ, a replay equal."""
    if seed is not None:
        return seed % 2**64
    return int.from_bytes(blake2b(op_id.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw one row's token. Temperature 0 is greedy; top_k -1 and 0 mean all tokens."""

    temperature: float
    top_k: int
    top_p: float
    uniform: float

    @property
    def filters(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0)


def best(logits_BV: Tensor, lse_B: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each row and their log-probabilities, best first."""
    values_BK, ids_BK = torch.topk(logits_BV, min(k, logits_BV.shape[-1]), dim=-1)
    return ids_BK, values_BK - lse_B[:, None]


def sample_at_temperature_one(
    logits_BV: Tensor, uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token per row at temperature 1 without filters, and its log-probability; on a CPU.

    Has the bits of `pick` and `normalizers`, in fewer and shorter calls.
    """
    logits = logits_BV.numpy()
    if len(logits) == 1 and logits.shape[1] <= _FEW_TOKENS:
        return _draw_one(logits, uniforms[0])
    uniforms_B1 = np.array(uniforms)[:, None]
    if logits.shape[1] <= _FEW_TOKENS:
        largest_B1 = logits.max(1, keepdims=True)
        weights_BV = torch.from_numpy(logits - largest_B1).exp_()  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
        lse_B1 = largest_B1 + row_sums(weights_BV).log_().numpy()
        found_B1 = _inverted_few(weights_BV, uniforms_B1)
    else:
        weights_BV = logits_BV.clone()
        lse_B1 = exponentials_(weights_BV)[0].numpy()
        found_B1 = _inverted(weights_BV, torch.from_numpy(uniforms_B1)).numpy()  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
    tokens: list[int] = found_B1[:, 0].tolist()
    return tokens, [float(logits[row, t] - lse_B1[row, 0]) for row, t in enumerate(tokens)]


def _draw_one(logits_1V: NDArray[np.float32], uniform: float) -> tuple[list[int], list[float]]:
    """The same for one row of a small vocabulary; scalars are faster than arrays here."""
    largest = logits_1V.max()
    weights_1V = torch.from_numpy(logits_1V - largest).exp_()  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
    lse = largest + row_sums(weights_1V).log_().numpy()[0, 0]
    ends_V = weights_1V.cumsum(-1, dtype=torch.float64).numpy()[0]
    total = float(ends_V[-1])
    target = min(uniform * total, math.nextafter(total, 0.0))  # see `_below`
    token = min(int(ends_V.searchsorted(target, "right")), len(ends_V) - 1)
    return [token], [float(logits_1V[0, token] - lse)]


def pick(logits_BV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One token per row. Rows do not influence each other."""
    warm = [i for i, draw in enumerate(draws) if draw.temperature > 0]
    if len(warm) == len(draws):  # the usual case
        return _draw(logits_BV, draws)
    tokens_B = torch.argmax(logits_BV, dim=-1)  # of equal logits the lowest id
    if not warm:
        return tokens_B
    rows = torch.tensor(warm, device=logits_BV.device)
    drawn = _draw(logits_BV[rows], [draws[i] for i in warm])
    return tokens_B.index_copy(0, rows, drawn)


def _draw(logits_BV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Invert the cumulative distribution, in the order of token ids."""
    device = logits_BV.device
    uniforms_B1 = torch.tensor([[d.uniform] for d in draws], dtype=torch.float64, device=device)
    scaled_BV = scaled(logits_BV, [draw.temperature for draw in draws])
    filtered = [i for i, draw in enumerate(draws) if draw.filters]
    if filtered:
        rows = torch.tensor(filtered, device=device)
        kept = _filter(scaled_BV[rows], [draws[i] for i in filtered])
        scaled_BV = scaled_BV.index_copy(0, rows, kept)
    return invert(scaled_BV, uniforms_B1)[:, 0]


def scaled(logits_BV: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Logits at the given temperatures, shifted so that the largest is 0."""
    divisors_B = torch.tensor([max(t, _COLDEST) for t in temperatures], device=logits_BV.device)
    return (logits_BV - logits_BV.amax(-1, keepdim=True)) / divisors_B[:, None]


def invert(scaled_BV: Tensor, uniforms_BK: Tensor) -> Tensor:
    """Token ids [B, K] at the given quantiles of each row's cumulative distribution.

    `scaled_BV` are logits whose largest is 0, minus infinity where a token is ruled out.
    """
    return _inverted(scaled_BV.exp(), uniforms_BK)


def _inverted(weights_BV: Tensor, uniforms_BK: Tensor) -> Tensor:
    if weights_BV.shape[1] <= _FEW_TOKENS and weights_BV.device.type == "cpu":
        return torch.from_numpy(_inverted_few(weights_BV, uniforms_BK.numpy()))  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
    # A cumulative sum over the whole vocabulary would take longest: find the block first, then
    # the token within it.
    if missing := -weights_BV.shape[1] % _BLOCK:
        weights_BV = F.pad(weights_BV, (0, missing))
    weights_BCW = weights_BV.view(len(weights_BV), -1, _BLOCK)
    # float64: in float32 the tail of a large vocabulary would fall below one rounding step.
    ends_BC = weights_BCW.sum(-1).cumsum(-1, dtype=torch.float64)
    targets_BK = _below(uniforms_BK.to(torch.float64) * ends_BC[:, -1:], ends_BC[:, -1:])
    blocks_BK = torch.searchsorted(ends_BC, targets_BK, right=True)
    starts_BC = F.pad(ends_BC, (1, 0))
    rows_B1 = torch.arange(len(ends_BC), device=ends_BC.device)[:, None]
    ends_BKW = weights_BCW[rows_B1, blocks_BK].to(torch.float64).cumsum(-1)
    within_BK1 = (targets_BK - starts_BC.gather(1, blocks_BK))[..., None]
    within_BK1 = _below(within_BK1, ends_BKW[..., -1:])
    places_BK = torch.searchsorted(ends_BKW, within_BK1, right=True)[..., 0]
    return blocks_BK * _BLOCK + places_BK


def _inverted_few(weights_BV: Tensor, uniforms_BK: NDArray[np.float64]) -> NDArray[np.int64]:
    """The same for a small vocabulary; numpy's calls are faster than torch's here."""
    ends_BV = weights_BV.cumsum(-1, dtype=torch.float64).numpy()
    totals_B1 = ends_BV[:, -1:]
    targets_BK = np.minimum(uniforms_BK * totals_B1, np.nextafter(totals_B1, 0.0))  # see `_below`
    found_BK = np.empty(uniforms_BK.shape, np.int64)
    for row, ends_V in enumerate(ends_BV):
        found_BK[row] = ends_V.searchsorted(targets_BK[row], "right")
    # NaN sorts beyond the last token.
    return np.minimum(found_BK, weights_BV.shape[1] - 1)


def _below(targets: Tensor, totals: Tensor) -> Tensor:
    """Targets strictly below the totals.

    Rounding can make a target equal to the total, which no cumulative sum exceeds.
    """
    return torch.minimum(targets, torch.nextafter(totals, torch.zeros_like(totals)))


def _filter(scaled_BV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Mask the tokens outside top-k, then those outside top-p of the rest.

    Of equally likely tokens at the boundary those with lower ids stay, on every device.
    """
    size, device = scaled_BV.shape[-1], scaled_BV.device
    top_k = [min(draw.top_k, size) if draw.top_k > 0 else size for draw in draws]
    top_k_B1 = torch.tensor([[k] for k in top_k], device=device)
    top_p_B1 = torch.tensor([[d.top_p] for d in draws], dtype=torch.float64, device=device)
    # Sorting the whole vocabulary is slow and rarely needed: the likeliest tokens are enough.
    width = min(size, max(_CANDIDATES, *(k for k in top_k if k < size), 1))
    kept = _kept(scaled_BV, width, top_k_B1, top_p_B1)
    if kept is None:
        kept = _kept(scaled_BV, size, top_k_B1, top_p_B1)
        assert kept is not None
    count_B1, edge_B1 = kept
    # Compares values, not ranks: the order of equal values in a sorted list may vary.
    stays_BV = scaled_BV >= edge_B1
    if bool((stays_BV.sum(-1, keepdim=True) > count_B1).any()):
        above_BV = scaled_BV > edge_B1
        room_B1 = count_B1 - above_BV.sum(-1, keepdim=True)
        at_edge_BV = stays_BV & ~above_BV
        stays_BV = above_BV | (at_edge_BV & (at_edge_BV.cumsum(-1) <= room_B1))
    return scaled_BV.masked_fill(~stays_BV, -torch.inf)


def _kept(
    scaled_BV: Tensor, width: int, top_k_B1: Tensor, top_p_B1: Tensor
) -> tuple[Tensor, Tensor] | None:
    """How many tokens stay in each row and the value of the last of them.

    Looks at the `width` likeliest tokens; None when these are not enough.
    """
    size = scaled_BV.shape[-1]
    sorted_BW = torch.topk(scaled_BV, width, dim=-1).values
    ranks_W = torch.arange(width, device=scaled_BV.device)
    weights_BW = sorted_BW.exp().to(torch.float64)
    in_top_k_BW = ranks_W < top_k_B1
    total_B1 = torch.where(
        top_k_B1 < size,
        (weights_BW * in_top_k_BW).sum(-1, keepdim=True),
        scaled_BV.exp().sum(-1, keepdim=True, dtype=torch.float64),
    )
    # A token stays while the likelier ones have not reached top_p; the likeliest always does.
    short_BW = weights_BW.cumsum(-1) - weights_BW < top_p_B1 * total_B1
    short_BW |= top_p_B1 >= 1
    short_BW &= in_top_k_BW
    count_B1 = short_BW.sum(-1, keepdim=True).clamp_(min=1)
    if width < size and bool(((count_B1 == width) & (top_k_B1 > width)).any()):
        return None
    return count_B1, sorted_BW.gather(-1, count_B1 - 1)
