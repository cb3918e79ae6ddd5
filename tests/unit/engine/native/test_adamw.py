"""AdamW in machine code, next to the rule in double precision."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.native.processor import needs_machine_code
from tinkex.engine.native import adamw
from tinkex.types import AdamParams

PARAMS = AdamParams(learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1)
SIZE = 3 * 4096 + 100


def _old(size: int = SIZE) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    p, gradient, first = (torch.randn(size, generator=generator) for _ in range(3))
    return [p, gradient, first, torch.rand(size, generator=generator)]


def _new(size: int = SIZE) -> list[torch.Tensor]:
    return [torch.full((size,), torch.nan) for _ in range(3)]


def _by_the_rule(old: list[torch.Tensor], clip: float, step: int) -> list[torch.Tensor]:
    p, gradient, first, second = (vector.double() for vector in old)
    gradient = gradient * clip
    first = PARAMS.beta1 * first + (1 - PARAMS.beta1) * gradient
    second = PARAMS.beta2 * second + (1 - PARAMS.beta2) * gradient**2
    below = (second / (1 - PARAMS.beta2**step)).sqrt() + PARAMS.eps
    change = PARAMS.learning_rate * first / (1 - PARAMS.beta1**step) / below
    return [p * (1 - PARAMS.learning_rate * PARAMS.weight_decay) - change, first, second]


@needs_machine_code
@pytest.mark.parametrize(("clip", "step"), [(1.0, 1), (0.25, 7)])
def test_it_follows_the_rule_and_leaves_what_is_not_a_whole_vector(clip: float, step: int) -> None:
    old, new = _old(), _new()
    kept = [vector.clone() for vector in old]
    done, squares = adamw(old, new, clip=clip, step=step, params=PARAMS)
    assert done == SIZE - SIZE % 16
    expected = _by_the_rule(old, clip, step)
    for found, wanted in zip(new, expected, strict=True):
        torch.testing.assert_close(found[:done].double(), wanted[:done], rtol=1e-5, atol=1e-6)
        assert found[done:].isnan().all()
    moved = new[0][:done].double() - old[0][:done].double()
    assert squares == pytest.approx(float(moved.square().sum()), rel=1e-6)
    for vector, before in zip(old, kept, strict=True):
        assert torch.equal(vector, before)


@needs_machine_code
def test_bits_do_not_depend_on_threads() -> None:
    old, usual = _old(), torch.get_num_threads()
    answers = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            new = _new()
            squares = adamw(old, new, clip=1.0, step=1, params=PARAMS)[1]
            answers.append((squares, [vector[: SIZE - SIZE % 16] for vector in new]))
    finally:
        torch.set_num_threads(usual)
    first = answers[0]
    for squares, vectors in answers[1:]:
        assert squares == first[0]
        assert all(map(torch.equal, vectors, first[1]))


@needs_machine_code
@pytest.mark.parametrize("kind", ["too few", "double", "apart", "not aligned"])
def test_what_it_has_no_code_for_is_left_alone(kind: str) -> None:
    size = 15 if kind == "too few" else 64
    old, new = _old(2 * size), _new(size)
    if kind == "apart":
        old = [vector[::2] for vector in old]
    else:
        start = 1 if kind == "not aligned" else 0
        old = [vector[start : start + size] for vector in old]
    if kind == "double":
        old[1] = old[1].double()
    assert adamw(old, new, clip=1.0, step=1, params=PARAMS) == (0, 0.0)
    assert all(vector.isnan().all() for vector in new)


def test_machines_without_the_code_leave_it_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkex.engine.native.optimizer.library", lambda: None)
    assert adamw(_old(), _new(), clip=1.0, step=1, params=PARAMS) == (0, 0.0)
