"""Bad arguments, one by one: the error names the place and the fix, and nothing is sent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.unit.clients.world import MODEL, World, datum
from tinkex import (
    AdamParams,
    Datum,
    InputError,
    InputTypeError,
    ModelInput,
    RetryConfig,
    SamplingParams,
    TensorData,
)
from tinkex.errors import NothingToTrain

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=3)
INT = TensorData(data=[1, 2], dtype="int64", shape=[2])


def made(tokens: int = 3, **inputs: Any) -> Datum:
    sound = {"target_tokens": [2] * tokens, "weights": [1.0] * tokens}
    return Datum(model_input=ModelInput.from_ints([1] * tokens), loss_fn_inputs={**sound, **inputs})


def refused(call: Callable[[Any], Any], kind: str = "training") -> InputError:
    """The error of a call, of which the server must not hear."""
    caught: list[InputError] = []

    async def scenario(world: World) -> None:
        async with world.service() as service:
            client: Any = service
            if kind == "training":
                client = await service.create_lora_training_client_async(MODEL, rank=2)
            elif kind == "sampling":
                client = await service.create_sampling_client_async(base_model=MODEL)
            before, started = len(world.server.requests), world.clock.now()
            with pytest.raises(InputError) as error:
                await call(client)
            assert world.clock.now() == started
            assert world.server.requests[before:] == []
            caught.append(error.value)
            if kind == "training":
                # And its turn was given back.
                await client.optim_step(AdamParams())
                assert [s.json["seq_id"] for s in world.server.seen("optim_step")] == [1]

    World().run(scenario)
    return caught[0]


BATCHES: list[tuple[Any, str, str]] = [
    ([], "data", "at least one"),
    (None, "data", "list of Datum"),
    (datum(), "data", "list of Datum"),
    ([datum(), 3], "data[1]", "Datum"),
    ([datum(), made(weights=[1.0])], 'data[1].loss_fn_inputs["weights"]', "length"),
    ([made(weights=[1.0, math.nan, 1.0])], 'data[0].loss_fn_inputs["weights"]', "finite"),
    ([made(weights=[1.0, math.inf, 1.0])], 'data[0].loss_fn_inputs["weights"]', "finite"),
    ([made(target_tokens=[-3, 1, 2])], 'data[0].loss_fn_inputs["target_tokens"]', "token id"),
    ([datum(), datum(), made(tokens=0)], "data[2]", ""),
]


@pytest.mark.req("B14")
@pytest.mark.parametrize(("data", "path", "words"), BATCHES)
def test_a_bad_batch_is_refused_with_the_place_and_the_fix(data: Any, path: str, words: str):
    error = refused(lambda training: training.forward_backward(data, "cross_entropy"))
    assert error.path.startswith(path)
    assert words in str(error)


@pytest.mark.req("B14")
def test_an_input_the_loss_needs_or_does_not_know_is_named():
    lacking = Datum(
        model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs={"weights": [1.0, 1.0]}
    )
    error = refused(lambda training: training.forward([lacking], "cross_entropy"))
    assert "target_tokens" in str(error)
    error = refused(lambda training: training.forward([made()], "importance_sampling"))
    assert error.path.startswith("data[0]")
    assert "logprobs" in str(error) or "advantages" in str(error)


Call = tuple[str, tuple[Any, ...], dict[str, Any], str]
D, OPTIM, NAN = [datum()], AdamParams(), math.nan


def named(calls: list[Call]) -> Any:
    """Each case under its method and the argument that is wrong."""
    ids = [f"{name} {path} {i}" for i, (name, _, _, path) in enumerate(calls)]
    return pytest.mark.parametrize(("name", "args", "kwargs", "path"), calls, ids=ids)


TRAINING: list[Call] = [
    ("forward", (D, "cross_entrpy"), {}, "loss_fn"),
    ("forward", (D, 3), {}, "loss_fn"),
    ("forward", (D, "cross_entropy", {"a": None}), {}, 'loss_fn_config["a"]'),
    ("forward", (D, "cross_entropy", {"a": NAN}), {}, 'loss_fn_config["a"]'),
    ("forward", (D, "cross_entropy", {"a": "\ud800"}), {}, 'loss_fn_config["a"]'),
    ("forward", (D, "cross_entropy", {3: 1.0}), {}, "loss_fn_config"),
    ("forward", (D, "cross_entropy", 7), {}, "loss_fn_config"),
    ("optim_step", ("adam",), {}, "optim_params"),
    ("optim_step", (), {}, "optim_params"),
    ("optim_step", (OPTIM,), {"adam_params": OPTIM}, "optim_params"),
    ("save_state", (b"name",), {}, "path"),
    ("save_state", ("\ud800",), {}, "path"),
    ("save_state", ("a",), {"ttl_seconds": "1 day"}, "ttl_seconds"),
    ("save_state", ("a",), {"user_metadata": {"a": 1}}, "user_metadata"),
    ("save_state", ("a",), {"user_metadata": {"a": "\ud800"}}, "user_metadata"),
    ("save_weights_external", ("a", None, "me"), {}, "age_encryption_recipients"),
    ("load", ("weights/a",), {"optimizer": False}, "path"),
    ("load", (None,), {"optimizer": False}, "path"),
    ("create_sampling_client_async", ("weights/a",), {}, "model_path"),
    ("save_weights_and_get_sampling_client_async", (), {"retry_config": 3}, "retry_config"),
]


@named(TRAINING)
def test_a_bad_argument_of_a_training_call_is_named(name: str, args: Any, kwargs: Any, path: str):
    assert path in refused(lambda client: getattr(client, name)(*args, **kwargs)).path


SAMPLING: list[Call] = [
    ("sample", ([1, 2], 1, PARAMS), {}, "prompt"),
    ("sample", (ModelInput.from_ints([]), 1, PARAMS), {}, "prompt"),
    ("sample", (PROMPT, 1, {"max_tokens": 3}), {}, "sampling_params"),
    ("sample", (PROMPT, 0, PARAMS), {}, "num_samples"),
    ("sample", (PROMPT, 1.5, PARAMS), {}, "num_samples"),
    ("sample", (PROMPT, 2**70, PARAMS), {}, "num_samples"),
    ("sample", (PROMPT, 1, SamplingParams(max_tokens=0)), {}, "max_tokens"),
    ("sample", (PROMPT, 1, PARAMS), {"topk_prompt_logprobs": -1}, "topk_prompt_logprobs"),
    ("sample", (PROMPT, 1, PARAMS), {"topk_sample_logprobs": -1}, "topk_sample_logprobs"),
    ("sample", (PROMPT, 1, PARAMS), {"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k"),
    ("sample", (PROMPT, 1, PARAMS), {"target_prompt_logprobs": INT}, "target_prompt_logprobs"),
    ("sample", (PROMPT, 1, PARAMS), {"target_prompt_logprobs": [1]}, "target_prompt_logprobs"),
    ("sample", (PROMPT, 1, PARAMS), {"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
    ("compute_logprobs", (PROMPT, 0), {}, "prompt_logprobs_last_n"),
    ("compute_logprobs", ("text",), {}, "prompt"),
]


@named(SAMPLING)
def test_a_bad_argument_of_a_sample_is_named(name: str, args: Any, kwargs: Any, path: str):
    assert path in refused(lambda client: getattr(client, name)(*args, **kwargs), "sampling").path


LORA, STATE = "create_lora_training_client_async", "create_training_client_from_state_async"
SAMPLER, PATH = "create_sampling_client_async", "tinker://run/weights/a"
SERVICE: list[Call] = [
    (LORA, (MODEL,), {"rank": 0}, "rank"),
    (LORA, (MODEL,), {"rank": "8"}, "rank"),
    (LORA, (MODEL,), {"seed": 1.5}, "seed"),
    (LORA, (None,), {}, "base_model"),
    (LORA, ("",), {}, "base_model"),
    (LORA, (MODEL,), {"train_mlp": np.ones(2)}, "train_mlp"),
    (LORA, (MODEL,), {"optimizer": ""}, "optimizer"),
    (LORA, (MODEL,), {"user_metadata": "text"}, "user_metadata"),
    (STATE, ("weights/a",), {}, "path"),
    (STATE, (3,), {}, "path"),
    (STATE, (PATH,), {"weights_access_token": "a\nb"}, "weights_access_token"),
    (STATE, (PATH,), {"optimizer": 3}, "optimizer"),
    (SAMPLER, (), {}, "model_path"),
    (SAMPLER, ("weights/a",), {}, "model_path"),
    (SAMPLER, (3,), {}, "model_path"),
    (SAMPLER, (None, MODEL, {}), {}, "retry_config"),
    (SAMPLER, (None, MODEL), {"record_stability_info": "yes"}, "record_stability_info"),
    ("copy_weights_async", ("weights/a",), {}, "path"),
]


@named(SERVICE)
def test_a_bad_argument_of_the_service_is_named_before_there_is_a_session(
    name: str, args: Any, kwargs: Any, path: str
):
    assert path in refused(lambda client: getattr(client, name)(*args, **kwargs), "service").path


def test_a_run_that_trains_nothing_is_refused_in_both_ways_of_saying_so():
    error = refused(
        lambda s: s.create_lora_training_client_async(
            MODEL, train_mlp=False, train_attn=False, train_unembed=False
        ),
        "service",
    )
    assert isinstance(error, NothingToTrain)
    assert isinstance(error, AssertionError)


@pytest.mark.req("B13")
@pytest.mark.parametrize(
    ("make", "nearest"),
    [
        (lambda: SamplingParams(max_token=3), "max_tokens"),
        (lambda: SamplingParams(temprature=0.5), "temperature"),
        (lambda: AdamParams(lr=0.1), "learning_rate"),
        (lambda: AdamParams(learning_rat=0.1), "learning_rate"),
    ],
)
def test_a_misspelled_field_is_refused_with_the_nearest_name(make: Any, nearest: str):
    with pytest.raises(InputError, match=nearest):
        make()


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("max_connections", 0, InputError),
        ("max_connections", "many", InputTypeError),
        ("progress_timeout", -1.0, InputError),
        ("retry_delay_base", math.nan, InputError),
        ("jitter_factor", None, InputTypeError),
        ("enable_retry_logic", 1, InputTypeError),
        ("retryable_exceptions", (int,), InputTypeError),
    ],
)
def test_a_retry_config_names_its_bad_field(field: str, value: Any, kind: type[InputError]):
    with pytest.raises(kind) as caught:
        RetryConfig(**{field: value})
    assert caught.value.path == field
