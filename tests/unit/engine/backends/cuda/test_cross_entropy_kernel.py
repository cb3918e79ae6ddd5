"""The log-probability kernels against log-softmax and its autograd in float64.

Tolerances: a log-probability of size ten has float32 steps of 1e-6; a gradient in bfloat16 is
one step off (the interpreter cuts off where the device rounds to nearest).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tinkex.engine.backends.cuda.cross_entropy import PART, dlogits_into, logprobs

pytestmark = pytest.mark.usefixtures("poisoned")


def made_logits(seed: int, rows: int, vocabulary: int, device: str) -> Tensor:
    values = torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(seed))
    return (values * 4).to(device)


def made_ids(seed: int, rows: int, targets: int, vocabulary: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (rows, targets), generator=generator).to(device)


def dlogits(
    logits: Tensor, lse: Tensor, ids: Tensor, gradient: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    dlogits_into(logits, lse, ids, gradient, out)
    return out


def exact(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.double().log_softmax(1).gather(1, ids)


def exact_gradient(logits: Tensor, ids: Tensor, gradient: Tensor) -> Tensor:
    wide = logits.double().requires_grad_()
    (found,) = torch.autograd.grad(exact(wide, ids), wide, gradient.double())
    return found


@pytest.mark.parametrize(
    ("vocabulary", "part"),
    [(5000, 1024), (4096, 1024), (5000, 256), (3001, PART), (37, PART), (1, PART)],
)
@pytest.mark.parametrize("targets", [1, 3])
def test_logprobs_equal_those_of_a_log_softmax(
    vocabulary: int, part: int, targets: int, device: str
) -> None:
    logits = made_logits(1, 6, vocabulary, device)
    ids = made_ids(2, 6, targets, vocabulary, device)
    found, lse = logprobs(logits, ids, part=part)
    assert found.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact(logits, ids), rtol=2e-6, atol=2e-6)
    expected = logits.double().logsumexp(1)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_row_longer_than_a_part_by_default_is_joined(device: str) -> None:
    logits = made_logits(3, 2, PART + 100, device)
    ids = torch.tensor([[0, PART - 1, PART, PART + 99]] * 2, device=device)
    found, _ = logprobs(logits, ids)
    torch.testing.assert_close(found.double(), exact(logits, ids), rtol=2e-6, atol=2e-6)


def test_logits_far_from_zero_neither_overflow_nor_vanish(device: str) -> None:
    logits = made_logits(4, 3, 300, device) + torch.tensor([[-3e4], [0.0], [3e4]], device=device)
    ids = made_ids(5, 3, 2, 300, device)
    found, _ = logprobs(logits, ids, part=256)
    # One step of a float32 near 30,000 is 2e-3: that is how exact the row's lse can be.
    torch.testing.assert_close(found.double(), exact(logits, ids), rtol=0, atol=2e-3)


def test_a_nearly_certain_token_keeps_its_small_logprob(device: str) -> None:
    logits = torch.full((1, 1000), 985.0, device=device)
    logits[0, 7] = 1000.0
    ids = torch.tensor([[7]], device=device)
    found, _ = logprobs(logits, ids, part=256)
    # A sum near one is good to a few steps of 1e-7; next to a logit of 1000 it would be 6e-5.
    torch.testing.assert_close(found.double(), exact(logits, ids), rtol=0, atol=2e-6)


def test_impossible_tokens_are_left_out_of_the_sum(device: str) -> None:
    logits = made_logits(6, 2, 700, device)
    logits[:, 100:600] = -torch.inf
    ids = torch.tensor([[0, 300], [699, 50]], device=device)
    found, lse = logprobs(logits, ids, part=128)
    torch.testing.assert_close(found.double(), exact(logits, ids), rtol=2e-6, atol=2e-6)
    gradient = torch.tensor([[1.0, 0.0], [1.0, 1.0]], device=device)
    expected = exact_gradient(logits, ids, gradient)
    torch.testing.assert_close(
        dlogits(logits, lse, ids, gradient, torch.float32).double(), expected, rtol=1e-5, atol=1e-6
    )


def test_a_nan_logit_makes_its_row_nan_and_no_other(device: str) -> None:
    logits = made_logits(7, 3, 700, device)
    logits[1, 650] = torch.nan
    found, lse = logprobs(logits, torch.zeros((3, 1), dtype=torch.int64, device=device), part=256)
    assert found[:, 0].isnan().tolist() == [False, True, False]
    assert lse.isnan().tolist() == [False, True, False]


def test_rows_may_lie_apart(device: str) -> None:
    wide = made_logits(8, 4, 640, device)
    logits = wide[:, :500]
    ids = made_ids(9, 4, 2, 500, device)
    found, lse = logprobs(logits, ids, part=256)
    torch.testing.assert_close(found.double(), exact(logits, ids), rtol=2e-6, atol=2e-6)
    gradient = torch.randn(4, 2, generator=torch.Generator().manual_seed(10)).to(device)
    expected = exact_gradient(logits, ids, gradient)
    beyond = wide[:, 500:].clone()
    found = dlogits(logits, lse, ids, gradient, torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(wide[:, 500:], beyond)


def test_a_row_has_the_same_bits_alone_among_others_and_with_more_targets(device: str) -> None:
    logits = made_logits(11, 17, 3000, device)
    ids = made_ids(12, 17, 3, 3000, device)
    gradient = torch.randn(17, 3, generator=torch.Generator().manual_seed(13)).to(device)
    together, lse = logprobs(logits, ids, part=512)
    gradients = dlogits(logits, lse, ids, gradient)
    for row in (0, 8, 16):
        one = slice(row, row + 1)
        alone, lse_alone = logprobs(logits[one], ids[one, :1], part=512)
        assert torch.equal(alone[0, 0], together[row, 0])
        assert torch.equal(lse_alone[0], lse[row])
        assert torch.equal(
            dlogits(logits[one], lse[one], ids[one], gradient[one])[0], gradients[row]
        )


@pytest.mark.parametrize("vocabulary", [5000, 2048, 37])
@pytest.mark.parametrize("targets", [1, 3, 4])
def test_gradients_equal_autograd(vocabulary: int, targets: int, device: str) -> None:
    logits = made_logits(14, 5, vocabulary, device)
    ids = made_ids(15, 5, targets, vocabulary, device)
    gradient = torch.randn(5, targets, generator=torch.Generator().manual_seed(16)).to(device)
    expected = exact_gradient(logits, ids, gradient)
    _, lse = logprobs(logits, ids)
    found = dlogits(logits, lse, ids, gradient)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=1e-6)
    in_place = dlogits(logits, lse, ids, gradient, torch.float32)
    assert in_place.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(in_place.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_token_that_is_a_target_twice_counts_twice(device: str) -> None:
    logits = made_logits(17, 2, 100, device)
    ids = torch.tensor([[4, 4, 9], [99, 0, 99]], device=device)
    gradient = torch.tensor([[1.0, 0.5, -2.0], [0.25, 3.0, -1.0]], device=device)
    expected = exact_gradient(logits, ids, gradient)
    _, lse = logprobs(logits, ids)
    found = dlogits(logits, lse, ids, gradient, torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_row_without_gradient_has_a_gradient_of_zero(device: str) -> None:
    logits = made_logits(18, 2, 300, device)
    ids = made_ids(19, 2, 2, 300, device)
    gradient = torch.tensor([[0.0, 0.0], [1.0, 0.0]], device=device)
    _, lse = logprobs(logits, ids)
    found = dlogits(logits, lse, ids, gradient)
    assert (found[0] == 0).all()
    assert (found[1] != 0).any()
