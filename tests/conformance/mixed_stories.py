"""Stories that cross the clients: everything once in async, tokens, mistakes, telemetry."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from story import BASE, KEY, attempt, plain, text_datum, trainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from story import Connection


async def _train_async(sdk: Any, to: Connection) -> Any:
    service = to.service(sdk)
    models = await service.get_server_capabilities_async()
    training = await service.create_lora_training_client_async(base_model=BASE, rank=8)
    backward = await training.forward_backward_async([text_datum(sdk, [1, 2])], "cross_entropy")
    step = await training.optim_step_async(sdk.AdamParams())
    forward = await training.forward_async([text_datum(sdk, [1])], "cross_entropy")
    seen = [models, await backward, await step, await forward.result_async()]
    # One at a time: the official client numbers a sampler save only once it is being sent.
    for save in ("save_state", "save_weights_for_sampler", "save_weights_external"):
        seen.append((await (await getattr(training, f"{save}_async")("a"))).path)
    info = await training.get_info_async()
    sampler = await training.save_weights_and_get_sampling_client_async()
    prompt = sdk.ModelInput.from_ints([1, 2])
    sample = await sampler.sample_async(prompt, 1, sdk.SamplingParams(max_tokens=2))
    logprobs = await sampler.compute_logprobs_async(prompt)
    resumed = await service.create_training_client_from_state_async(seen[4])
    other = await service.create_sampling_client_async(base_model=BASE)
    seen += [info, sample, logprobs, resumed.model_id, await other.get_base_model_async()]
    await service.close("success")
    return plain(seen)


def everything_async(sdk: Any, to: Connection) -> Any:
    return asyncio.run(_train_async(sdk, to))


def telemetry_of_a_session(sdk: Any, to: Connection) -> Any:
    service = to.service(sdk)
    training = service.create_lora_training_client(base_model=BASE)
    service.close("success").result()
    return plain(training.model_id)


def session_with_an_exchanged_token(sdk: Any, to: Connection) -> Any:
    service, training = trainer(sdk, to)
    step = training.optim_step(sdk.AdamParams()).result()
    rest = sdk.RestClient(base_url=to.base_url, api_key=KEY)
    who = rest.whoami().result()
    service.close("success").result()
    return plain([training.model_id, step, who.email])


def mistakes(sdk: Any, to: Connection) -> Any:
    """Everything here is refused; what matters is which `except` clause catches it."""
    service, training = trainer(sdk, to)
    rest = sdk.RestClient(base_url=to.base_url, api_key=KEY)
    sampler = service.create_sampling_client(base_model=BASE)
    prompt, params = sdk.ModelInput.from_ints([1, 2]), sdk.SamplingParams(max_tokens=2)
    nowhere = "tinker://nobody:train:0/weights/a"
    training.save_state("a").result()
    calls: dict[str, Callable[[], Any]] = {
        "no such model": lambda: service.create_lora_training_client(base_model="no/such"),
        "no such sampler": lambda: service.create_sampling_client(base_model="no/such"),
        "no such weights": lambda: service.create_sampling_client(model_path=nowhere),
        "not a path": lambda: service.create_sampling_client(model_path="weights/a"),
        "nothing to sample": lambda: service.create_sampling_client(),
        "nothing to train": lambda: service.create_lora_training_client(
            BASE, train_mlp=False, train_attn=False, train_unembed=False
        ),
        "no such state": lambda: service.create_training_client_from_state(nowhere),
        "no such run": lambda: rest.get_training_run("nobody:train:0").result(),
        "no such checkpoint": lambda: rest.delete_checkpoint_from_tinker_path(nowhere).result(),
        "not an export": lambda: rest.get_external_weights_urls(nowhere).result(),
        "no such session": lambda: rest.get_session("nobody").result(),
        "no run": lambda: rest.list_checkpoints("").result(),
        "same name": lambda: training.save_state("a").result(),
        "too short a life": lambda: training.save_state("b", ttl_seconds=1).result(),
        "both optimizers": lambda: training.optim_step(
            sdk.AdamParams(), adam_params=sdk.AdamParams()
        ).result(),
        "no data": lambda: training.forward_backward([], "cross_entropy").result(),
        "flat targets": lambda: sampler.sample(
            prompt,
            1,
            params,
            target_prompt_logprobs=sdk.TensorData(data=[1], dtype="int64", shape=[1]),
        ).result(),
        "negative k": lambda: sampler.sample(prompt, 1, params, prompt_alt_tokens_k=-1).result(),
        "last n alone": lambda: sampler.sample(
            prompt, 1, params, prompt_logprobs_last_n=1
        ).result(),
        "no torch shape": lambda: sdk.TensorData(data=[1, 2], dtype="int64", shape=[3]),
        "no dtype": lambda: sdk.TensorData(data=[1, 2], dtype="int8"),
    }
    seen = {title: attempt(call) for title, call in calls.items()}
    service.close("errored").result()
    seen["after the end"] = attempt(lambda: service.create_sampling_client(base_model=BASE))
    seen["sample after the end"] = attempt(lambda: sampler.sample(prompt, 1, params).result())
    return seen
