"""Rotary positions have the same bits in any batch, on any number of threads.

Without MKL, as on ARM, an angle of 125 or more changes how the others of its vector are computed.
"""

from __future__ import annotations

import pytest
import torch

from tinkex.engine.backends.torch.layers import on_threads, rotation


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("frequencies", [3, 6, 8, 32])
def test_a_position_is_rotated_to_the_same_bits_in_any_batch(
    frequencies: int, threads: int
) -> None:
    frequencies_F = 1.0 / 10_000.0 ** (torch.arange(frequencies) / frequencies)
    positions_T = torch.arange(700)
    with on_threads(threads):
        whole = rotation(positions_T, frequencies_F)
        for part in (slice(0, 1), slice(130, 170), slice(601, 691)):
            found = rotation(positions_T[part], frequencies_F)
            assert torch.equal(found.cos_T1F, whole.cos_T1F[part])
            assert torch.equal(found.sin_T1F, whole.sin_T1F[part])
    angles_T1F = (positions_T[:, None].double() * frequencies_F.double())[:, None]
    torch.testing.assert_close(whole.cos_T1F.double(), angles_T1F.cos(), rtol=0, atol=1e-4)
    torch.testing.assert_close(whole.sin_T1F.double(), angles_T1F.sin(), rtol=0, atol=1e-4)
