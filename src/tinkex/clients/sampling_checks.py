"""Checks around a sample: what is asked before it is sent, what came back after. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.clients.arguments import switch
from tinkex.clients.retry_config import RetryConfig
from tinkex.errors import InputError, InputTypeError, ResultError
from tinkex.types import ModelInput, SampleRequest, SamplingParams, TensorData
from tinkex.types.frozen import frozen

if TYPE_CHECKING:
    from tinkex.types import SampleResponse


def check_options(retry_config: object, record_stability_info: object) -> None:
    """The settings of a sampling client, before it is made."""
    if not (retry_config is None or isinstance(retry_config, RetryConfig)):
        kind = type(retry_config).__name__
        raise InputTypeError(f"must be a RetryConfig, not {kind}", "retry_config")
    switch(record_stability_info, "record_stability_info")


def build_request(
    prompt: object,
    num_samples: int,
    sampling_params: object,
    *,
    include_prompt_logprobs: bool,
    topk_prompt_logprobs: int,
    topk_sample_logprobs: int,
    target_prompt_logprobs: TensorData | None,
    prompt_alt_tokens_k: int,
    prompt_logprobs_last_n: int | None,
    record_stability_info: bool,
    sampling_session_id: str,
) -> SampleRequest:
    """The request of one `sample` call, or an error that names the argument."""
    if not isinstance(prompt, ModelInput):
        raise InputTypeError(
            f"must be a ModelInput (see ModelInput.from_ints), not {type(prompt).__name__}",
            "prompt",
        )
    if not isinstance(sampling_params, SamplingParams):
        raise InputTypeError(
            f"must be SamplingParams, not {type(sampling_params).__name__}", "sampling_params"
        )
    request = SampleRequest(
        num_samples=num_samples,
        prompt=prompt,
        sampling_params=sampling_params,
        sampling_session_id=sampling_session_id,
        prompt_logprobs=include_prompt_logprobs,
        topk_prompt_logprobs=topk_prompt_logprobs,
        topk_sample_logprobs=topk_sample_logprobs,
        target_prompt_logprobs=target_prompt_logprobs,
        prompt_alt_tokens_k=prompt_alt_tokens_k,
        prompt_logprobs_last_n=prompt_logprobs_last_n,
        record_stability_info=record_stability_info,
    )
    _check_numbers(request)
    # What is checked is what is sent, now and if it has to be sent again.
    request = frozen(request)
    _check_prompt(request)
    return request


def _check_numbers(request: SampleRequest) -> None:
    if request.num_samples < 1:
        raise InputError("must be at least 1", "num_samples")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if getattr(request, name) < 0:
            raise InputError("must not be negative; 0 asks for nothing", name)
    last_n = request.prompt_logprobs_last_n
    if last_n is not None:
        if last_n < 1:
            raise InputError("must be at least 1", "prompt_logprobs_last_n")
        if not request.prompt_logprobs:
            raise InputError("needs include_prompt_logprobs=True", "prompt_logprobs_last_n")
    params = request.sampling_params
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InputError("must be at least 1", "sampling_params.max_tokens")
    if params.temperature < 0 or params.temperature != params.temperature:
        raise InputError("must be 0 or more", "sampling_params.temperature")


def _check_prompt(request: SampleRequest) -> None:
    if not request.prompt.chunks or not any(_length(part) for part in request.prompt.chunks):
        raise InputError("must hold at least one token", "prompt")
    target = request.target_prompt_logprobs
    if target is None:
        return
    if target.dtype != "int64":
        raise InputError(f"must be int64, not {target.dtype}", "target_prompt_logprobs")
    if target.shape is None or len(target.shape) != 2:
        raise InputError("must be 2-D: [len(prompt) - 1, K]", "target_prompt_logprobs")


def _length(part: object) -> int:
    tokens = getattr(part, "tokens", None)
    return 1 if tokens is None else len(tokens)


def check_response(response: SampleResponse, request: SampleRequest) -> None:
    """Raise when the server left out, or got wrong, what `request` asked for."""
    if len(response.sequences) != request.num_samples:
        raise ResultError(
            f"{request.num_samples} samples were asked for, the server sent "
            f"{len(response.sequences)}"
        )
    if request.prompt_alt_tokens_k and response.prompt_alt_tokens is None:
        raise ResultError("the server ignored prompt_alt_tokens_k; it may be too old for it")
    last_n = request.prompt_logprobs_last_n
    scores = response.prompt_logprobs_np
    if last_n is not None and scores is not None:
        import numpy as np

        if not np.isnan(scores[: len(scores) - last_n]).all():
            raise ResultError("the server ignored prompt_logprobs_last_n; it may be too old for it")
