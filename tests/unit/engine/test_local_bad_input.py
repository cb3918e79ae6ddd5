"""What cannot be run is refused by its path before any tensor work, and disturbs nothing."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec.structs import force_setattr

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
from tinkex.engine.protocol import AdapterSpec, Weights
from tinkex.errors import RequestFailedError
from tinkex.types import (
    AdamOptimizerConfig,
    Datum,
    DimuonOptimizerConfig,
    DimuonParams,
    ImageChunk,
    LoraConfig,
    ModelInput,
    TensorData,
)

TEN = {"target_tokens": [1, 2, 3], "weights": [1.0, 1.0, 1.0]}
RL = {"target_tokens": [1, 2, 3], "logprobs": [-1.0] * 3, "advantages": [1.0] * 3}


def forced(value, **changes):
    """A value that its type would refuse, as it might come from elsewhere."""
    for name, new in changes.items():
        force_setattr(value, name, new)
    return value


def _datum(ids=(1, 2, 3), base=TEN, **inputs):
    kept = {name: value for name, value in {**base, **inputs}.items() if value is not None}
    return Datum(ModelInput.from_ints(list(ids)), kept)


def _train(*examples, loss="cross_entropy", model_id="m", **fields):
    return replace(train_op(model_id, examples, loss), **fields)


IMAGE = Datum(ModelInput(chunks=[ImageChunk(data=b"x", format="png")]), TEN)
WEIGHTS, ADVANTAGES = 'loss_fn_inputs["weights"]', 'loss_fn_inputs["advantages"]'
TRAIN = {
    "no data": (_train(), "data: is empty"),
    "no tokens": (_train(_datum(())), "data[0].model_input: is empty"),
    "id too large": (
        _train(data(), _datum((1, 5000, 3))),
        "data[1].model_input: token 5000 at position 1 is outside",
    ),
    "target too large": (
        _train(_datum(target_tokens=[1, 2, 9999])),
        'data[0].loss_fn_inputs["target_tokens"]: token 9999 at [2]',
    ),
    "negative target": (
        _train(_datum(target_tokens=[-1, 2, 3])),
        'data[0].loss_fn_inputs["target_tokens"]: token -1 at [0]',
    ),
    "context too long": (
        _train(_datum([1] * 8193)),
        "data[0].model_input: has 8193 tokens; tinkex/tiny reads at most 8192",
    ),
    "an image": (_train(IMAGE), "data[0].model_input.chunks[0]: tinkex/tiny reads text only"),
    "targets of another length": (
        _train(_datum(target_tokens=[1, 2])),
        'data[0].loss_fn_inputs["target_tokens"]: has shape [2]',
    ),
    "weights of another length": (
        _train(_datum(weights=[1.0])),
        f"data[0].{WEIGHTS}: has shape [1]",
    ),
    "weights of another shape": (
        _train(_datum(weights=np.ones((3, 2), np.float32))),
        f"data[0].{WEIGHTS}: has shape [3, 2]",
    ),
    "NaN weight": (_train(_datum(weights=[1.0, math.nan, 1.0])), f"data[0].{WEIGHTS}: is nan"),
    "infinite weight": (_train(_datum(weights=[math.inf, 1, 1])), f"data[0].{WEIGHTS}: is inf"),
    "NaN advantage": (
        _train(_datum(base=RL, advantages=[0.0, 0.0, math.nan]), loss="ppo"),
        f"data[0].{ADVANTAGES}: is nan at [2]",
    ),
    "NaN logprob": (
        _train(_datum(base=RL, logprobs=[math.nan] * 3), loss="importance_sampling"),
        'data[0].loss_fn_inputs["logprobs"]: is nan at [0]',
    ),
    "missing advantages": (
        _train(_datum(base=RL, advantages=None), loss="ppo"),
        f"data[0].{ADVANTAGES}: is missing",
    ),
    "unknown input": (
        _train(_datum(wieghts=[1.0] * 3)),
        'data[0].loss_fn_inputs["wieghts"]: cross_entropy does not read it; did you mean weights',
    ),
    "unknown loss": (_train(data(), loss="crossentropy"), "loss_fn: 'crossentropy' is not a loss"),
    "a loss that is not offered": (_train(data(), loss="stable_reinforce"), "stable_reinforce"),
    "unknown setting": (
        _train(_datum(base=RL), loss="ppo", loss_fn_config={"clip_lo": 0.1}),
        'loss_fn_config["clip_lo"]: ppo has no such setting',
    ),
    "setting that is no number": (
        _train(_datum(base=RL), loss="ppo", loss_fn_config={"clip_low_threshold": math.nan}),
        'loss_fn_config["clip_low_threshold"]: must be finite',
    ),
    "unknown model": (_train(data(), model_id="nobody"), "model 'nobody' is not loaded"),
}

OPTIM = {
    "NaN rate": ({"learning_rate": math.nan}, "optim_params.learning_rate: nan"),
    "infinite rate": ({"learning_rate": math.inf}, "optim_params.learning_rate: inf"),
    "NaN clip": ({"grad_clip_norm": math.nan}, "optim_params.grad_clip_norm: nan"),
    "infinite decay": ({"weight_decay": math.inf}, "optim_params.weight_decay: inf"),
    "negative rate": ({"learning_rate": -1.0}, "optim_params.learning_rate: -1.0"),
    "beta of one": ({"beta1": 1.0}, "optim_params.beta1: 1.0"),
    "negative beta": ({"beta2": -0.1}, "optim_params.beta2: -0.1"),
    "no eps": ({"eps": 0.0}, "optim_params.eps: 0.0"),
    "negative decay": ({"weight_decay": -0.1}, "optim_params.weight_decay: -0.1"),
}


def _lora(rank=2, **fields):
    return forced(LoraConfig(rank=2, **fields), rank=rank)


def _spec(lora=None, base="tinkex/tiny", model_id="fresh", optimizer=None):
    return AdapterSpec(
        model_id=model_id,
        base_model=base,
        lora=lora or _lora(),
        optimizer=optimizer or AdamOptimizerConfig(),
    )


CREATE = {
    "rank 0": (_spec(_lora(0)), "lora_config.rank: must be between 1 and 256, got 0"),
    "rank 257": (_spec(_lora(257)), "lora_config.rank: must be between 1 and 256, got 257"),
    "rank 10,000": (_spec(_lora(10_000)), "lora_config.rank: must be between 1 and 256, got 10000"),
    "unknown base": (_spec(base="who/ever"), "no base model 'who/ever' here; there are: tinkex/ti"),
    "a name twice": (_spec(model_id="m"), "model 'm' exists already"),
    "another optimizer": (
        _spec(optimizer=DimuonOptimizerConfig()),
        "optimizer_config.type: 'dimuon' is not offered",
    ),
}


def _sample(ids=(1, 2, 3), params=None, **fields):
    made = replace(sample_op(), prompt=ModelInput.from_ints(list(ids)), **fields)
    forced(made.params, **(params or {}))
    return made


SAMPLE = {
    "empty prompt": (_sample(()), "prompt: must hold at least one token"),
    "id too large": (_sample((1, 9999)), "prompt.chunks[0].tokens[1]: 9999 is not a token"),
    "prompt too long": (_sample([1] * 8193), "prompt: has 8193 tokens"),
    "an image": (
        replace(sample_op(), prompt=IMAGE.model_input),
        "prompt.chunks[0]: tinkex/tiny takes text only",
    ),
    "no samples": (replace(sample_op(), sequence_ids=[]), "num_samples: at least one"),
    "NaN temperature": (
        _sample(params={"temperature": math.nan}),
        "sampling_params.temperature: must be a number",
    ),
    "top_p of two": (_sample(params={"top_p": 2.0}), "sampling_params.top_p: must lie between"),
    "top_k of -2": (_sample(params={"top_k": -2}), "sampling_params.top_k: must be -1"),
    "negative max_tokens": (
        _sample(params={"max_tokens": -1}),
        "sampling_params.max_tokens: must not be negative",
    ),
    "last_n too large": (_sample(prompt_logprobs_last_n=9), "prompt_logprobs_last_n: must lie"),
    "targets of another shape": (
        _sample(target_prompt_logprobs=TensorData.from_numpy(np.zeros((3, 1), np.int64))),
        "target_prompt_logprobs: must have shape [2, K]",
    ),
    "negative top-k": (_sample(topk_sample_logprobs=-1), "topk_sample_logprobs: must not be neg"),
    "stop token of another model": (
        _sample(params={"stop": [99_999]}),
        "sampling_params.stop",
    ),
    "unknown base": (
        replace(sample_op(), weights=Weights(base_model="who/ever")),
        "no base model 'who/ever' here",
    ),
    "unknown snapshot": (sample_op(snapshot="nix"), "snapshot 'nix' is not published"),
    "unknown location": (sample_op(location="nix"), "nothing is saved at 'nix'"),
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """An engine with one adapter that has a step behind it and a gradient waiting."""
    loop = asyncio.new_event_loop()
    model, decoder = noting_model()
    target = engine(tmp_path_factory.mktemp("engine"), model)

    async def prepare():
        await target.create_adapter(spec("m"))
        await trained(target, train_op("m", [data()]))
        await target.optim_step([optim_op("m")])
        await trained(target, train_op("m", [data(seed=1)]))
        await target.save_adapter("m", "weights", optimizer=False)

    loop.run_until_complete(prepare())

    def refused(call):
        """Run a call that must be refused; nothing is computed and nothing changes."""
        (served,) = target._served.values()
        before = served.trainer.adapters["m"]
        copies = [before.weights.flat_P.clone(), before.gradient_P.clone()]
        passes = len(decoder.notes)
        error = loop.run_until_complete(call(target))
        assert isinstance(error, RequestFailedError)
        assert error.category == "user"
        assert len(decoder.notes) == passes
        assert served.trainer.adapters["m"] is before
        assert torch.equal(before.weights.flat_P, copies[0])
        assert torch.equal(before.gradient_P, copies[1])
        return error

    yield refused
    loop.run_until_complete(target.close())
    loop.close()


async def _raised(call):
    with pytest.raises(RequestFailedError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize("name", TRAIN)
def test_training_on_bad_input_is_refused(stage, name):
    operation, message = TRAIN[name]

    async def call(target):
        (answer,) = await target.train([operation])
        return answer

    error = stage(call)
    assert message in str(error)
    assert error.request_id == operation.op_id


@pytest.mark.parametrize("name", OPTIM)
def test_a_step_with_bad_settings_is_refused(stage, name):
    fields, message = OPTIM[name]

    async def call(target):
        operation = optim_op("m")
        forced(operation.params, **fields)
        (answer,) = await target.optim_step([operation])
        return answer

    assert message in str(stage(call))


def test_a_step_of_another_optimizer_or_an_unknown_model_is_refused(stage):
    async def other(target):
        (answer,) = await target.optim_step(
            [replace(optim_op("m"), params=DimuonParams(learning_rate=0.1))]
        )
        return answer

    async def unknown(target):
        (answer,) = await target.optim_step([optim_op("nobody")])
        return answer

    assert "optim_params.type: 'dimuon' is not offered" in str(stage(other))
    assert "model 'nobody' is not loaded" in str(stage(unknown))


@pytest.mark.parametrize("name", CREATE)
def test_an_adapter_that_cannot_be_made_is_refused(stage, name):
    wanted, message = CREATE[name]
    assert message in str(stage(lambda target: _raised(target.create_adapter(wanted))))


def test_an_adapter_that_would_train_nothing_is_refused(stage):
    lora = _lora(train_attn=False, train_mlp=False, train_unembed=False)
    error = stage(lambda target: _raised(target.create_adapter(_spec(lora))))
    assert "lora_config: switch on at least one of" in str(error)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_that_cannot_run_is_refused(stage, name):
    operation, message = SAMPLE[name]
    assert message in str(stage(lambda target: _raised(target.sample(operation))))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.load_adapter("m", "nowhere", optimizer=False), "nothing is saved at 'nowh"),
        (lambda t: t.load_adapter("m", "weights", optimizer=True), "has no optimizer state"),
        (lambda t: t.load_adapter("nobody", "weights", optimizer=False), "'nobody' is not loaded"),
        (lambda t: t.save_adapter("nobody", "x", optimizer=False), "'nobody' is not loaded"),
        (lambda t: t.publish("nobody", "x"), "'nobody' is not loaded"),
        (lambda t: t.copy_saved("nowhere", "x"), "nothing is saved at 'nowhere'"),
        (lambda t: t.export_saved("nowhere"), "nothing is saved at 'nowhere'"),
    ],
)
def test_names_of_nothing_are_refused(stage, call, message):
    assert message in str(stage(lambda target: _raised(call(target))))


def test_one_bad_operation_leaves_the_others_of_its_batch_as_they_would_be_alone(tmp_path):
    async def scenario(folder, *, bad):
        async with engine(folder) as target:
            for name in "ab":
                await target.create_adapter(spec(name))
            batch = [train_op("a", [data(9, 1)]), train_op("b", [data(8, 2)])]
            if bad:
                batch.insert(1, replace(TRAIN["NaN weight"][0], model_id="a"))
                batch.append(TRAIN["unknown model"][0])
            found = [a for a in await target.train(batch) if not isinstance(a, Exception)]
            steps = await target.optim_step([optim_op("a"), optim_op("b")])
            return [answer.output for answer in found], [step.metrics for step in steps]

    alone = asyncio.run(scenario(tmp_path / "alone", bad=False))
    assert asyncio.run(scenario(tmp_path / "mixed", bad=True)) == alone
