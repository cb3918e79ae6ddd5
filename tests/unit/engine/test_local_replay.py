"""A run is the same to the bit whatever runs beside it, and when it is replayed from a snapshot.

Durability rests on this: after a crash a model is its last snapshot plus its operations since,
one by one, in an engine where nothing else may be going on. Compared are every number that an
operation answers, and the saved file at the end: weights, moments, gathered gradient and step.
What may differ is `device_s`, which is a time and no part of the metrics.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.unit.engine.local_kit import (
    data,
    engine,
    noting_model,
    optim_op,
    sample_op,
    spec,
    train_op,
    trained,
)
from tinkex.clients.loss_graph import trace
from tinkex.engine.protocol import CustomLoss, OptimOp, OptimResult
from tinkex.types import Datum, ModelInput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from tinkex.engine.local import LocalEngine
    from tinkex.engine.protocol import TrainOp

# Slices are cut by the larger; passes while samples run are filled up to the smaller.
SIZES = {"max_pass_tokens": 96, "shared_pass_tokens": 40}
STEP = {"weight_decay": 0.1, "grad_clip_norm": 0.5, "learning_rate": 0.02}
OTHERS = {
    "small": {"rank": 1, "seed": 2},
    "wide": {"rank": 16, "seed": 3, "train_attn": False},
    "head": {"rank": 3, "seed": 4, "train_attn": False, "train_mlp": False},
}


def rl(length: int, seed: int) -> Datum:
    """An example with old log-probabilities."""
    rng = np.random.default_rng([length, seed])
    ids = rng.integers(0, 256, length + 1).tolist()
    return Datum(
        ModelInput.from_ints(ids[:-1]),
        {
            "target_tokens": ids[1:],
            "logprobs": (-5 + rng.normal(size=length)).astype(np.float32),
            "advantages": rng.normal(size=length).astype(np.float32),
        },
    )


def wide(length: int, columns: int) -> Datum:
    """An example with several targets for each token."""
    rng = np.random.default_rng([length, columns])
    return Datum(
        ModelInput.from_ints(rng.integers(0, 256, length).tolist()),
        {
            "target_tokens": rng.integers(0, 256, (length, columns)),
            "weights": rng.normal(size=(length, columns)).astype(np.float32),
        },
    )


def own_loss() -> CustomLoss:
    """A loss of the client's own."""

    def loss(logprobs: Any, advantages: Any) -> Any:
        return -(torch.exp(logprobs + 5) * advantages).sum(), {"custom/mean:mean": logprobs.mean()}

    traced = trace(loss, {"logprobs": 1, "advantages": 1})
    return CustomLoss(inputs=traced.inputs, graph=traced.graph)


def own(length: int, seed: int) -> Datum:
    """An example for it."""
    inputs = dict(rl(length, seed).loss_fn_inputs)
    del inputs["logprobs"]
    return Datum(rl(length, seed).model_input, inputs)


def operations() -> list[TrainOp | OptimOp]:
    """Five steps of the model that is looked at, with all that leaves a trace in it."""
    found: list[TrainOp | OptimOp] = []
    for number in range(5):
        found += [
            train_op("m", [data(12 + number, number), data(70, 10 + number), data(90, number)]),
            train_op("m", [rl(5, number), rl(33, number)], "ppo"),
            replace(train_op("m", [data(21, number)]), backward=False),
            train_op("m", [rl(9, number)], "importance_sampling"),
            replace(train_op("m", [own(14, number)], "custom"), custom_loss=own_loss()),
            train_op("m", [wide(11, 5), wide(7, 3 + number)]),
            optim_op("m", **STEP),
        ]
    return found


MIDDLE = 16
"""After the second operation of the third step: a gradient is waiting."""


def other_operations(number: int) -> list[TrainOp]:
    """What the others train at the same time; never the same twice."""
    kinds = [
        lambda length: ([data(length, number), wide(length, 2 + length)], "cross_entropy"),
        lambda length: ([rl(length, number)], "ppo"),
        lambda length: ([rl(length, number)], "cispo"),
    ]
    return [
        train_op(model_id, *kinds[(number + place) % 3](3 + (number * 7 + place * 11) % 40))
        for place, model_id in enumerate(OTHERS)
    ]


@dataclass
class Load:
    """What is to happen beside the run, and how many of its own operations share a batch."""

    trains: bool = False
    samples: bool = False
    together: int = 1


async def run(
    target: LocalEngine, ops: Sequence[TrainOp | OptimOp], load: Load
) -> list[dict[str, Any]]:
    """Run operations in order; all that they answer."""
    found: list[dict[str, Any]] = []
    for number, batch in enumerate(batches(ops, load.together)):
        others = other_operations(number) if load.trains else []
        if isinstance(batch[0], OptimOp):
            steps = [optim_op(each.model_id) for each in others]
            answer = (await target.optim_step([*steps, *batch]))[-1]
            assert isinstance(answer, OptimResult), answer
            found.append(answer.metrics)
            continue
        # In the middle, so that their tokens lie elsewhere in every pass.
        results = await trained(target, *others[:1], *batch, *others[1:])
        for result in results[len(others[:1]) :][: len(batch)]:
            output = result.output
            found.append({"outputs": output.loss_fn_outputs, **output.metrics})
    return found


def batches(ops: Sequence[TrainOp | OptimOp], together: int) -> list[Sequence[Any]]:
    """Consecutive operations of one kind, at most so many."""
    found: list[Sequence[Any]] = []
    for _, kind in itertools.groupby(ops, type):
        alike = list(kind)
        found += [alike[first : first + together] for first in range(0, len(alike), together)]
    return found


@asynccontextmanager
async def streams(target: LocalEngine, count: int) -> AsyncIterator[None]:
    """Samples for as long as the block lasts, one after the other in each of some streams."""
    heard = [asyncio.Event() for _ in range(count)]

    async def stream(event: asyncio.Event) -> None:
        for seed in itertools.count():
            op = sample_op(max_tokens=300, temperature=1.0, seed=seed)
            await target.sample(op, lambda *_: event.set())

    running = [asyncio.ensure_future(stream(event)) for event in heard]
    for event in heard:
        await event.wait()
    yield
    for task in running:
        task.cancel()
    ended = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended), ended


async def whole_run(
    folder: Path, load: Load, **settings: Any
) -> tuple[list[dict[str, Any]], bytes, list[int]]:
    """All operations: what they answered, the file at the end, and the sizes of the passes."""
    model, decoder = noting_model()
    async with engine(folder, model, **{**SIZES, **settings}) as target:
        await target.create_adapter(spec("m", 5, seed=4))
        for model_id, lora in OTHERS.items():
            await target.create_adapter(spec(model_id, **lora))
        async with streams(target, 4 if load.samples else 0):
            ops = operations()
            answers = await run(target, ops[:MIDDLE], load)
            await target.save_adapter("m", "middle", optimizer=True)
            answers += await run(target, ops[MIDDLE:], load)
        return answers, await saved_file(target, folder), decoder.tokens


async def saved_file(target: LocalEngine, folder: Path) -> bytes:
    """The model with one more gradient on top, as a file."""
    await trained(target, train_op("m", [data(8, 77)]))
    await target.save_adapter("m", "end", optimizer=True)
    return await asyncio.to_thread((folder / "saved" / "end.safetensors").read_bytes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, bytes, list[int], Path]:
    """The undisturbed run, one operation at a time."""
    folder = tmp_path_factory.mktemp("alone")
    return *asyncio.run(whole_run(folder, Load())), folder


@pytest.mark.req("B16")
@pytest.mark.parametrize(
    ("load", "settings"),
    [
        (Load(trains=True), {}),
        (Load(together=3), {}),
        (Load(samples=True, together=3), {}),
        (Load(trains=True, samples=True, together=2), {}),
        # No two adapters fit: each goes to disk and comes back between its operations.
        (Load(trains=True, samples=True), {"adapter_bytes": 1 << 20}),
    ],
    ids=["with other adapters", "in batches", "with samples", "with all", "parked in between"],
)
def test_a_run_has_the_same_bits_in_any_batch(tmp_path, alone, load, settings):
    answers, file, passes = asyncio.run(whole_run(tmp_path, load, **settings))
    # It really was another way.
    assert passes != alone[2]
    assert answers == alone[0]
    assert file == alone[1]


@pytest.mark.req("B16")
@pytest.mark.parametrize("samples", [False, True], ids=["quiet", "with samples"])
def test_a_replay_from_a_snapshot_within_a_step_has_the_same_bits(tmp_path, alone, samples):
    async def replay() -> tuple[Any, bytes]:
        (tmp_path / "saved").mkdir()
        middle = alone[3] / "saved" / "middle.safetensors"
        (tmp_path / "saved" / "middle.safetensors").write_bytes(middle.read_bytes())
        async with engine(tmp_path, **SIZES) as target:
            await target.create_adapter(spec("m", 5, seed=99))  # nothing of this seed stays
            await target.load_adapter("m", "middle", optimizer=True)
            async with streams(target, 2 if samples else 0):
                answers = await run(target, operations()[MIDDLE:], Load())
            return answers, await saved_file(target, tmp_path)

    answers, file = asyncio.run(replay())
    assert answers == alone[0][MIDDLE:]
    assert file == alone[1]


@pytest.mark.req("B16")
def test_a_replay_from_the_beginning_has_the_same_bits(tmp_path, alone):
    assert asyncio.run(whole_run(tmp_path, Load()))[:2] == alone[:2]


@pytest.mark.req("B16")
def test_an_adapter_without_a_seed_begins_the_same_way_when_it_is_made_again(tmp_path):
    async def made(folder: Path) -> bytes:
        async with engine(folder) as target:
            unseeded = spec("run:train:0")
            lora = unseeded.lora.model_copy(update={"seed": None})
            await target.create_adapter(replace(unseeded, lora=lora))
            await target.save_adapter("run:train:0", "x", optimizer=True)
            return await asyncio.to_thread((folder / "saved" / "x.safetensors").read_bytes)

    assert asyncio.run(made(tmp_path / "a")) == asyncio.run(made(tmp_path / "b"))


def test_the_comparison_notices_one_operation_too_few(alone, tmp_path):
    async def shorter() -> bytes:
        async with engine(tmp_path, **SIZES) as target:
            await target.create_adapter(spec("m", 5, seed=4))
            await run(target, operations()[:-7] + operations()[-6:], Load())
            return await saved_file(target, tmp_path)

    assert asyncio.run(shorter()) != alone[1]
