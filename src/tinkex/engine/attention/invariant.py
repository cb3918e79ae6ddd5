"""Batch-invariant attention: the bits of a query depend on that query and its own keys only.

Batched matrix products and a softmax, in a form in which neither the other queries nor the masked
keys nor the number of threads change the order of any sum:

- Queries come in multiples of `ROW_STEP`. Fewer rows use other matrix kernels.
- Keys are padded to a multiple of `KEY_STEP`. The softmax sums in SIMD lanes; whole vectors of
  masked keys add exact zeros to each lane, a partial vector would be summed separately.
- Values are summed over `VALUE_BLOCK` keys at a time, from the first key on. The library splits a
  longer sum, and masked keys would move the split; a shorter one is sequential, and zeros at its
  end do not change it.

Masked keys and values must be finite: a weight of zero times infinity is not zero. Libraries do not
document their order of summation. These rules were found by experiment (MKL, 1 to 16 threads), and
`tests/unit/engine/agreement` verifies them on each machine.

Shapes: n independent problems (a sequence's key head), R query rows, S keys, d head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

ROW_STEP: Final = 4
KEY_STEP: Final = 16
VALUE_BLOCK: Final = 128


def round_up(count: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-count // step) * step


def scores(q_nRd: Tensor, k_nSd: Tensor) -> Tensor:
    """s_nRS of queries that are already divided by the square root of the head size."""
    assert q_nRd.shape[1] % ROW_STEP == 0, "too few query rows"
    assert k_nSd.shape[1] % KEY_STEP == 0, "keys are not padded"
    return torch.bmm(q_nRd, k_nSd.transpose(1, 2))


def mix(p_nRS: Tensor, v_nSd: Tensor) -> Tensor:
    """o_nRd: the values, weighted."""
    if v_nSd.shape[1] <= VALUE_BLOCK:
        return torch.bmm(p_nRS, v_nSd)
    o_nRd = torch.bmm(p_nRS[:, :, :VALUE_BLOCK], v_nSd[:, :VALUE_BLOCK])
    for start in range(VALUE_BLOCK, v_nSd.shape[1], VALUE_BLOCK):
        block = slice(start, start + VALUE_BLOCK)
        o_nRd.baddbmm_(p_nRS[:, :, block], v_nSd[:, block])
    return o_nRd
