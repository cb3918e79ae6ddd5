"""Stories that cross the clients: everything once in async, and telemetry."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from story import BASE, plain, text_datum

if TYPE_CHECKING:
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
