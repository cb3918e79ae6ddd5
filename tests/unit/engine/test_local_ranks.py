"""Every rank from 1 to 256 and every choice of targets, trained and sampled adjacent."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.engine.local_kit import data, engine, optim_op, sample_op, spec, train_op, trained
from tests.unit.engine.training.kit import Reference, add, column, datum, gradient, op, run, trainer

if TYPE_CHECKING:
    from pathlib import Path

    from tinkex.engine.local import LocalEngine
    from tinkex.engine.protocol import SampleResult

RANKS = (1, 2, 3, 7, 31, 100, 255, 256)
FLAGS = [
    dict(zip(("train_attn", "train_mlp", "train_unembed"), chosen, strict=True))
    for chosen in product((True, False), repeat=3)
    if any(chosen)
]
ADAPTERS: dict[str, tuple[int, dict[str, Any]]] = {
    f"rank-{rank}": (rank, FLAGS[place % len(FLAGS)]) for place, rank in enumerate(RANKS)
}


@pytest.mark.parametrize("rank", [2, 100, 255, 256])
def test_uncommon_ranks_have_the_reference_gradient(rank: int):
    made, data = trainer(), [datum(9, 1), datum(4, 2)]
    add(made, "m", rank)
    run(made, op("m", data))
    reference = Reference(made, "m")
    loss = -sum((column(each, "weights") * reference.logprobs(each)).sum() for each in data)
    loss.backward()
    expected = reference.flat_P.grad
    assert expected is not None
    # float32 against float64.
    gap = (gradient(made, "m") - expected).abs().max() / expected.abs().max()
    assert float(gap) < 1e-5


def answers(result: SampleResult) -> tuple[Any, ...]:
    sequence = result.response.sequences[0]
    return sequence.tokens, sequence.logprobs, result.response.prompt_logprobs


async def _stepped(target: LocalEngine, names: list[str]) -> list[Any]:
    """Two steps of these adapters, each batch in one call; then a snapshot of each."""
    found: list[Any] = []
    for turn in range(2):
        batch = [train_op(name, [data(9 + int(name[5:]) % 7, turn)]) for name in names]
        found.append([result.output for result in await trained(target, *batch)])
        steps = await target.optim_step([optim_op(name) for name in names])
        found.append([step.metrics for step in steps])
    for name in names:
        await target.publish(name, name)
    return found


def test_all_of_them_in_one_batch_answer_the_bits_that_each_answers_alone(tmp_path: Path):
    async def together(folder: Path) -> tuple[list[Any], list[Any]]:
        async with engine(folder) as target:
            for name, (rank, flags) in ADAPTERS.items():
                await target.create_adapter(spec(name, rank, **flags))
            found = await _stepped(target, list(ADAPTERS))
            samples = await asyncio.gather(
                *(target.sample(sample_op(snapshot=name)) for name in ADAPTERS)
            )
            by_adapter = [list(column) for column in zip(*found, strict=True)]
            return by_adapter, [answers(sample) for sample in samples]

    async def alone(folder: Path, name: str) -> tuple[list[Any], Any]:
        async with engine(folder) as target:
            rank, flags = ADAPTERS[name]
            await target.create_adapter(spec(name, rank, **flags))
            found = await _stepped(target, [name])
            sample = await target.sample(sample_op(snapshot=name))
            return [only for (only,) in found], answers(sample)

    trained_together, sampled_together = asyncio.run(together(tmp_path / "together"))
    for place, name in enumerate(ADAPTERS):
        trained_alone, sampled_alone = asyncio.run(alone(tmp_path / name, name))
        assert trained_together[place] == trained_alone, name
        assert sampled_together[place] == sampled_alone, name
    texts = {repr(tokens) for tokens, _, _ in sampled_together}
    assert len(texts) > 3  # they have learned, each in its own way
