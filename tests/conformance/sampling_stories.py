"""Samples in every form, and samplers that move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from story import BASE, DMEL, KEY, PNG, attempt, plain, trainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from story import Connection


def samples(sdk: Any, to: Connection) -> Any:
    service = to.service(sdk)
    sampler = service.create_sampling_client(base_model=BASE)
    prompt = sdk.ModelInput.from_ints([1, 2, 3, 4])
    params = sdk.SamplingParams
    every = params(max_tokens=2, seed=5, stop=["\n", "é"], temperature=0.5, top_k=3, top_p=0.9)
    target = sdk.TensorData(data=[1, -1, 2, -1, 3, 4], dtype="int64", shape=[3, 2])
    sparse = sdk.TensorData(
        data=[7],
        dtype="int64",
        shape=[3, 2],
        sparse_crow_indices=[0, 0, 1, 1],
        sparse_col_indices=[1],
    )
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: sampler.sample(prompt, 1, params(max_tokens=2)),
        "defaults": lambda: sampler.sample(prompt=prompt, num_samples=2, sampling_params=params()),
        "every parameter": lambda: sampler.sample(prompt, 3, every),
        "stop text": lambda: sampler.sample(prompt, 1, params(max_tokens=2, stop="END")),
        "stop ids": lambda: sampler.sample(prompt, 1, params(max_tokens=2, stop=[0, 2])),
        "never stop": lambda: sampler.sample(prompt, 1, params(max_tokens=2, stop=[])),
        "prompt logprobs": lambda: sampler.sample(
            prompt, 1, params(max_tokens=2), include_prompt_logprobs=True
        ),
        "last n": lambda: sampler.sample(
            prompt, 1, params(max_tokens=2), include_prompt_logprobs=True, prompt_logprobs_last_n=2
        ),
        "top k": lambda: sampler.sample(
            prompt,
            1,
            params(max_tokens=2),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=3,
        ),
        "targets": lambda: sampler.sample(
            prompt, 1, params(max_tokens=2), target_prompt_logprobs=target
        ),
        "alternatives": lambda: sampler.sample(
            prompt, 1, params(max_tokens=2), prompt_alt_tokens_k=2
        ),
        "logprobs": lambda: sampler.compute_logprobs(prompt),
        "last logprobs": lambda: sampler.compute_logprobs(prompt, prompt_logprobs_last_n=1),
    }
    seen = {title: plain(call().result()) for title, call in calls.items()}
    future = sampler.sample(prompt, 1, params(max_tokens=1), target_prompt_logprobs=sparse)
    seen["sparse targets"] = plain(future.result().target_prompt_logprobs.sparse_col_indices)
    seen["bad last n"] = attempt(
        lambda: sampler.sample(prompt, 1, params(), prompt_logprobs_last_n=0).result()
    )
    service.close("success").result()
    return seen


def samples_of_pictures(sdk: Any, to: Connection) -> Any:
    service, training = trainer(sdk, to)
    saved = training.save_weights_for_sampler("a").result()
    sampler = service.create_sampling_client(model_path=saved.path, record_stability_info=True)
    types = sdk.types
    prompt = sdk.ModelInput(
        chunks=[
            sdk.EncodedTextChunk(tokens=[1, 2]),
            types.ImageChunk(data=PNG, format="png", expected_tokens=4),
            types.ImageChunk(data=PNG, format="jpeg"),
            types.ImageAssetPointerChunk(location="asset://1", format="png", expected_tokens=2),
            types.ImageAssetPointerChunk(location="asset://2", format="jpeg"),
            sdk.DmelChunk(dmel=DMEL),
        ]
    )
    prompt = prompt.append_int(5).append(sdk.EncodedTextChunk(tokens=[]))
    result = sampler.sample(prompt, 1, sdk.SamplingParams(max_tokens=2)).result()
    service.close("success").result()
    return plain(result.sequences[0].tokens)


def samples_polled_together(sdk: Any, to: Connection) -> Any:
    service = to.service(sdk)
    sampler = service.create_sampling_client(base_model=BASE)
    prompt = sdk.ModelInput.from_ints([1, 2])
    futures = [
        sampler.sample(prompt, 1, sdk.SamplingParams(max_tokens=2, seed=n)) for n in range(3)
    ]
    seen = [plain(future.result()) for future in futures]
    service.close("success").result()
    return seen


def samples_after_waiting(sdk: Any, to: Connection) -> Any:
    service = to.service(sdk)
    sampler = service.create_sampling_client(base_model=BASE)
    prompt = sdk.ModelInput.from_ints([1, 2])
    result = sampler.sample(prompt, 1, sdk.SamplingParams(max_tokens=2)).result()
    service.close("success").result()
    return plain(result)


def cancelled_sample(sdk: Any, to: Connection) -> Any:
    service = to.service(sdk)
    sampler = service.create_sampling_client(base_model=BASE)
    prompt = sdk.ModelInput.from_ints([1, 2])
    future = sampler.sample(prompt, 1, sdk.SamplingParams(max_tokens=2))
    to.wait_for("/retrieve_future", 1)
    cancelled = future.cancel()
    to.wait_for("/cancel_future", 1)
    seen = [cancelled, future.cancelled()]
    service.close("success").result()
    return plain(seen)


def sampler_handed_over(sdk: Any, to: Connection) -> Any:
    service = to.service(sdk)
    sampler = service.create_sampling_client(base_model=BASE)
    copy = sdk.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=KEY)
    prompt = sdk.ModelInput.from_ints([1, 2])
    seen = [
        sampler.sample(prompt, 1, sdk.SamplingParams(max_tokens=2)).result(),
        copy.sample(prompt, 1, sdk.SamplingParams(max_tokens=2)).result(),
    ]
    service.close("success").result()
    return plain([item.sequences[0].tokens for item in seen])
