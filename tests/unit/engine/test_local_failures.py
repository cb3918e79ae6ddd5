"""Whatever goes wrong on the device fails the request at fault alone, and holds no memory."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace

import pytest
import torch

from tests.unit.engine.local_kit import (
    TINY,
    data,
    engine,
    optim_op,
    sample_op,
    spec,
    train_op,
    trained,
)
from tests.unit.engine.training.kit import add, datum, gradient, op, run, step, trainer
from tinkex.engine.models.loader import load_model
from tinkex.engine.protocol import OptimResult, SampleResult, TrainResult
from tinkex.errors import RequestFailedError
from tinkex.types import Datum, ModelInput

HEAVY = 250
"""The token on which the device runs out of memory."""


class Fragile:
    """A decoder that fails on one token while `armed`, holding a large tensor as it does."""

    def __init__(self, inner, heavy=HEAVY):
        self._inner = inner
        self._heavy = heavy
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.in_the_way: list[int] = []
        self.armed = True

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def hidden(self, tokens_T, *others):
        self.in_the_way.append(sum(ref() is not None for ref in self.alive))
        if self.armed and self._heavy in tokens_T.tolist():
            large = torch.zeros(10)
            self.alive.append(weakref.ref(large))
            raise torch.OutOfMemoryError("no room for it")
        return self._inner.hidden(tokens_T, *others)


def _heavy_datum(heavy=HEAVY):
    return Datum(ModelInput.from_ints([heavy, 1, 2]), {"target_tokens": [1, 2, 3]})


def test_a_failed_pass_has_let_go_of_its_memory_before_anything_else_runs():
    made = trainer()
    for name in "abc":
        add(made, name)
    fragile = Fragile(made._context.decoder, heavy=96)
    made._context = replace(made._context, decoder=fragile)
    light = datum(9)
    light = Datum(
        ModelInput.from_ints([token % 90 for token in light.model_input.to_ints()]),
        light.loss_fn_inputs,
    )
    answers = made.train([op("a", [light]), op("b", [_heavy_datum(96)]), op("c", [light])])
    assert [type(answer) for answer in answers] == [TrainResult, RequestFailedError, TrainResult]
    assert len(fragile.in_the_way) == 5  # all, a, b, b once more with less memory, c
    assert set(fragile.in_the_way) == {0}
    gc.collect()
    assert answers[1].__cause__.__traceback__ is None


def test_the_engine_survives_each_kind_of_request_running_out_of_memory(tmp_path):
    async def scenario():
        model = load_model(TINY)
        fragile = Fragile(model.decoder)
        async with engine(tmp_path, replace(model, decoder=fragile)) as target:
            for name in "ab":
                await target.create_adapter(spec(name))
            await trained(target, train_op("a", [data()]), train_op("b", [data()]))
            answers = await target.train(
                [train_op("a", [_heavy_datum()]), train_op("b", [data(seed=1)])]
            )
            sampled = await asyncio.gather(
                target.sample(replace(sample_op(), prompt=ModelInput.from_ints([HEAVY, 1]))),
                target.sample(replace(sample_op(), prompt=ModelInput.from_ints([1, 2]))),
                return_exceptions=True,
            )
            # What a had gathered before is still there, and all that fails works next time.
            stepped = await target.optim_step([optim_op("a"), optim_op("b")])
            fragile.armed = False
            again = await target.train([train_op("a", [_heavy_datum()])])
            return answers, sampled, stepped, again

    answers, sampled, stepped, again = asyncio.run(scenario())
    assert isinstance(answers[0], RequestFailedError)
    assert answers[0].category == "server"
    assert answers[0].request_id == "train-a"
    assert "ran out of memory on a sequence of 3 tokens: no room for it" in str(answers[0])
    assert isinstance(answers[1], TrainResult)
    assert isinstance(sampled[0], RequestFailedError)
    assert "no room for it" in str(sampled[0])
    assert sampled[0].category == "server"
    assert isinstance(sampled[1], SampleResult)
    assert all(isinstance(found, OptimResult) for found in stepped)
    assert stepped[0].metrics["grad_norm"] > 0
    assert isinstance(again[0], TrainResult)


class _NoRoom(torch.overrides.TorchFunctionMode):
    """Some functions run out of memory when they are given a vector of one size."""

    def __init__(self, size, *names):
        super().__init__()
        self._size = size
        self._names = names

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in self._names and args[0].numel() == self._size:
            raise MemoryError("no room for a vector")
        return func(*args, **(kwargs or {}))


def test_no_room_while_adding_up_fails_the_operation_and_keeps_what_was_there():
    made = trainer()
    add(made, "a", 3)
    add(made, "b", 4)
    run(made, op("a", [datum(5)]), op("b", [datum(5)]))
    before = made.adapters["a"]
    with _NoRoom(before.weights.flat_P.numel(), "add", "__add__"):
        answers = made.train([op("a", [datum(6)]), op("b", [datum(6)])])
    assert isinstance(answers[0], RequestFailedError)
    assert "ran out of memory while accumulating the gradient: no room" in str(answers[0])
    assert isinstance(answers[0].__cause__, MemoryError)
    assert made.adapters["a"] is before
    assert isinstance(answers[1], TrainResult)


def test_no_room_in_a_step_fails_the_operation_and_keeps_what_was_there():
    made = trainer()
    add(made, "a", 3)
    add(made, "b", 4)
    run(made, op("a", [datum(5)]), op("b", [datum(5)]))
    before, kept = made.adapters["a"], gradient(made, "a").clone()
    with _NoRoom(before.weights.flat_P.numel(), "empty_like"):
        answers = made.optim_step([optim_op("a"), optim_op("b")])
    assert isinstance(answers[0], RequestFailedError)
    assert "ran out of memory in an optimizer step" in str(answers[0])
    assert answers[0].request_id == "step-a"
    assert made.adapters["a"] is before
    assert torch.equal(gradient(made, "a"), kept)
    assert isinstance(answers[1], OptimResult)
    assert step(made, "a")["step"] == 1.0  # works once there is room


def test_no_room_for_a_new_adapter_or_a_snapshot_is_that_requests_failure(tmp_path, monkeypatch):
    async def scenario():
        async with engine(tmp_path) as target:
            await target.create_adapter(spec("m"))

            def full(*args):
                raise torch.OutOfMemoryError("no room at all")

            for place, call in (
                (
                    "tinkex.engine.training.trainer.initial",
                    lambda: target.create_adapter(spec("new")),
                ),
                (
                    "tinkex.engine.training.trainer.Trainer.weights",
                    lambda: target.publish("m", "snap"),
                ),
                (
                    "tinkex.engine.checkpoints.adapter_file.write",
                    lambda: target.save_adapter("m", "x", optimizer=True),
                ),
            ):
                with monkeypatch.context() as patch:
                    patch.setattr(place, full)
                    with pytest.raises(RequestFailedError, match="ran out of memory") as caught:
                        await call()
                assert caught.value.category == "server"
                assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
                await call()

    asyncio.run(scenario())


def test_a_sampler_step_that_breaks_altogether_fails_all_samples_and_the_engine_continues(
    tmp_path, monkeypatch
):
    async def scenario():
        async with engine(tmp_path) as target:
            (served,) = target._served.values()
            await target.create_adapter(spec("m"))
            await target.publish("m", "snap")
            with monkeypatch.context() as patch:
                patch.setattr(type(served._sampler), "step", lambda _: 1 // 0)
                broken = await asyncio.gather(
                    target.sample(sample_op(snapshot="snap")),
                    target.sample(sample_op()),
                    return_exceptions=True,
                )
            assert all(isinstance(found, RequestFailedError) for found in broken)
            assert all(isinstance(found.__cause__, ZeroDivisionError) for found in broken)
            await target.drop_snapshot("snap")
            assert len(served.versions) == 0
            assert (await target.sample(sample_op())).generated_tokens == 6

    asyncio.run(scenario())
