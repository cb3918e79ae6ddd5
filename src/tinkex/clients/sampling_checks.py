"""Settings of a sampling client, and checks of its requests and answers. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from tinkex.clients.arguments import switch, whole_number
from tinkex.errors import (
    APIConnectionError,
    InputError,
    InputTypeError,
    PromiseLostError,
    ResultError,
)
from tinkex.types import EncodedTextChunk, ModelInput, SampleRequest, SamplingParams, TensorData
from tinkex.types.sampling import copy_request

if TYPE_CHECKING:
    from tinkex.types import SampleResponse, TensorData


@dataclass(unsafe_hash=True)
class RetryConfig:
    """Settings of a sampling client's retries, with the official fields and defaults.

    `max_connections` is replaced by the server's own limit. `progress_timeout` is the longest
    time, in seconds, without any sample of the client finishing.
    """

    max_connections: int | None = 1000
    progress_timeout: float = 7200.0
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[Exception], ...] = (
        TimeoutError,
        APIConnectionError,
        PromiseLostError,
    )

    def __post_init__(self) -> None:
        if (
            self.max_connections is not None
            and whole_number(self.max_connections, "max_connections") <= 0
        ):
            raise InputError("must be positive, or None for no limit", "max_connections")
        for name in ("progress_timeout", "retry_delay_base", "retry_delay_max", "jitter_factor"):
            _check_amount(getattr(self, name), name)
        switch(self.enable_retry_logic, "enable_retry_logic")
        switch(self.enable_stuck_detection, "enable_stuck_detection")
        if not _are_exceptions(self.retryable_exceptions):
            raise InputTypeError("must be a tuple of exception classes", "retryable_exceptions")

    def delay_s(self, attempt: int, draw: float) -> float:
        """The wait before retry number `attempt` (from 0); `draw` is uniform in [0, 1)."""
        delay = min(self.retry_delay_base * 2.0 ** min(attempt, 30), self.retry_delay_max)
        jitter = delay * self.jitter_factor * (2.0 * draw - 1.0)
        return min(max(delay + jitter, 0.0), self.retry_delay_max)


def _check_amount(value: object, name: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InputTypeError(f"must be a number, not {type(value).__name__}", name)
    if not (value >= 0 and math.isfinite(value)):
        raise InputError("must be finite and not negative", name)


def _are_exceptions(kinds: object) -> bool:
    return isinstance(kinds, tuple) and all(
        isinstance(kind, type) and issubclass(kind, Exception)
        for kind in cast("tuple[object, ...]", kinds)
    )


def check_options(retry_config: object, record_stability_info: object) -> None:
    """The settings of a sampling client, before it is made."""
    if not (retry_config is None or isinstance(retry_config, RetryConfig)):
        kind = type(retry_config).__name__
        raise InputTypeError(f"must be a RetryConfig, not {kind}", "retry_config")
    switch(record_stability_info, "record_stability_info")


def check_kinds(prompt: object, sampling_params: object) -> None:
    """Check the types of the two main arguments; the error names the argument."""
    if not isinstance(prompt, ModelInput):
        raise InputTypeError(
            f"must be a ModelInput (see ModelInput.from_ints), not {type(prompt).__name__}",
            "prompt",
        )
    if not isinstance(sampling_params, SamplingParams):
        raise InputTypeError(
            f"must be SamplingParams, not {type(sampling_params).__name__}", "sampling_params"
        )


def checked_copy(request: SampleRequest) -> SampleRequest:
    """A copy that the caller cannot change, or an error that names the argument."""
    _check_numbers(request)
    # What is checked is what is sent, now and if it has to be sent again.
    request = copy_request(request)
    for part in request.prompt.chunks:
        if not isinstance(part, EncodedTextChunk) or len(part.tokens):
            break
    else:
        raise InputError("must hold at least one token", "prompt")
    if request.target_prompt_logprobs is not None:
        _check_target(request.target_prompt_logprobs)
    return request


def _check_numbers(request: SampleRequest) -> None:
    if request.num_samples < 1:
        raise InputError("must be at least 1", "num_samples")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if getattr(request, name) < 0:
            raise InputError("must not be negative; 0 asks for nothing", name)
    if request.prompt_logprobs_last_n is not None:
        if request.prompt_logprobs_last_n < 1:
            raise InputError("must be at least 1", "prompt_logprobs_last_n")
        if not request.prompt_logprobs:
            raise InputError("needs include_prompt_logprobs=True", "prompt_logprobs_last_n")
    params = request.sampling_params
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InputError("must be at least 1", "sampling_params.max_tokens")
    if params.temperature < 0 or params.temperature != params.temperature:
        raise InputError("must be 0 or more", "sampling_params.temperature")


def _check_target(target: TensorData) -> None:
    if target.dtype != "int64":
        raise InputError(f"must be int64, not {target.dtype}", "target_prompt_logprobs")
    if target.shape is None or len(target.shape) != 2:
        raise InputError("must be 2-D: [len(prompt) - 1, K]", "target_prompt_logprobs")


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
