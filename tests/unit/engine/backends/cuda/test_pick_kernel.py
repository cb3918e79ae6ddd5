"""Tokens drawn by the kernel against the sampler's own way to draw them, on the CPU.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch

from tinkex.engine.backends.cuda.pick import pick
from tinkex.engine.backends.torch.pick import invert, scaled
from tinkex.errors import InputError

BLOCK = 64


def normal(device: str, rows: int, size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn((rows, size), generator=generator).to(device)


def draw(
    logits_BV: torch.Tensor, temperature: float | list[float], uniforms: list[float]
) -> torch.Tensor:
    device, rows = logits_BV.device, logits_BV.shape[0]
    temperatures = temperature if isinstance(temperature, list) else [temperature] * rows
    return pick(
        logits_BV,
        torch.tensor(temperatures, device=device),
        torch.tensor(uniforms, dtype=torch.float64, device=device),
        block=BLOCK,
    )


@pytest.mark.req("B15")
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("size", [1, 63, 64, 1000])
def test_tokens_are_those_of_the_sampler(device: str, size: int) -> None:
    logits_BV = normal(device, 24, size)
    temperatures = [0.1, 0.7, 1.0, 2.5] * 6
    uniforms = torch.rand(24, generator=torch.Generator().manual_seed(1)).tolist()
    tokens_B = draw(logits_BV, temperatures, uniforms)
    places_B1 = torch.tensor(uniforms, dtype=torch.float64)[:, None]
    wanted_B = invert(scaled(logits_BV.cpu(), temperatures), places_B1)[:, 0]
    assert torch.equal(tokens_B.cpu(), wanted_B)


@pytest.mark.usefixtures("poisoned")
def test_temperature_zero_takes_the_lowest_id_of_the_largest_logits(device: str) -> None:
    logits_BV = normal(device, 3, 200)
    for row, places in enumerate([(5, 199), (130, 131), (70, 128)]):
        logits_BV[row, list(places)] = 20.0
    tokens_B = draw(logits_BV, 0.0, [0.99, 0.5, 0.0])
    assert tokens_B.tolist() == [5, 130, 70]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_a_tiny_temperature_is_greedy(device: str) -> None:
    logits_BV = normal(device, 4, 200)
    for temperature in (1e-6, 1e-38):
        tokens_B = draw(logits_BV, temperature, [0.0, 0.3, 0.6, 1 - 2**-53])
        assert torch.equal(tokens_B, logits_BV.argmax(-1))


@pytest.mark.usefixtures("poisoned")
def test_a_token_of_no_probability_is_never_drawn(device: str) -> None:
    """Neither at the ends of the distribution nor in blocks that are ruled out altogether."""
    logits_BV = torch.full((4, 300), -torch.inf, device=device)
    logits_BV[:, [70, 140, 141]] = 1.0
    tokens_B = draw(logits_BV, 1.0, [0.0, 0.34, 0.67, 1 - 2**-53])
    assert tokens_B.tolist() == [70, 140, 141, 141]


@pytest.mark.usefixtures("poisoned")
def test_draws_follow_the_distribution(device: str) -> None:
    """Evenly spaced places hit each token as often as its probability says, to one draw each."""
    logits_V = normal(device, 1, 130, seed=3)[0]
    count = 150
    tokens_B = draw(logits_V.repeat(count, 1), 1.5, [(i + 0.5) / count for i in range(count)])
    hits_V = torch.bincount(tokens_B.cpu(), minlength=130).double()
    shares_V = (logits_V.cpu().double() / 1.5).softmax(-1) * count
    assert (hits_V - shares_V).abs().max() <= 1
    assert (tokens_B.diff() >= 0).all()


def test_a_row_has_the_same_bits_alone_and_in_a_batch(device: str) -> None:
    logits_BV = normal(device, 6, 500)
    uniforms = [0.1, 0.9, 0.5, 0.2, 0.7, 0.3]
    together = draw(logits_BV, [1.0, 0.0, 0.5, 1.0, 2.0, 1.0], uniforms)
    for row, temperature in ((1, 0.0), (4, 2.0)):
        alone = draw(logits_BV[row : row + 1], temperature, [uniforms[row]])
        assert torch.equal(alone[0], together[row])
    wider_BV = torch.cat([logits_BV, logits_BV], dim=1)[:, :500]
    assert torch.equal(draw(wider_BV, 1.0, uniforms), draw(logits_BV, 1.0, uniforms))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which the interpreter uses
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_distribution_gets_some_token_and_spoils_no_other(
    device: str, bad: float, temperature: float
) -> None:
    logits_BV = normal(device, 3, 200)
    clean = draw(logits_BV, temperature, [0.2, 0.4, 0.6])
    logits_BV[1, 77] = bad
    tokens_B = draw(logits_BV, temperature, [0.2, 0.4, 0.6])
    assert 0 <= tokens_B[1] < 200
    assert torch.equal(tokens_B[[0, 2]], clean[[0, 2]])
    nothing = draw(torch.full((1, 200), -torch.inf, device=device), temperature, [0.5])
    assert 0 <= nothing[0] < 200


def test_other_types_are_refused_by_name(device: str) -> None:
    logits_BV = normal(device, 2, 64)
    ones_B = torch.ones(2, device=device)
    with pytest.raises(InputError, match="logits_BV: must be float32"):
        pick(logits_BV.double(), ones_B, ones_B.double())
    with pytest.raises(InputError, match="uniforms_B: must be float64"):
        pick(logits_BV, ones_B, ones_B)
    with pytest.raises(InputError, match="temperatures_B: must be float32"):
        pick(logits_BV, ones_B.double(), ones_B.double())
