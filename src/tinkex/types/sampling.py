"""Sampling: parameters, requests, and the session they run in."""

from collections.abc import Sequence
from types import NoneType
from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from tinkex.errors import InputError, InputTypeError
from tinkex.types.inputs import ModelInput, copy_input
from tinkex.types.tensors import TensorData
from tinkex.types.value import Count, Int, NonNegative, Request, Response

StopReason = Literal["length", "stop"]
"""Why a sequence ended."""


class SamplingParams(Request):
    """How to generate. Temperature 0 takes the likeliest token; `top_k` -1 means all tokens.

    `stop` None means the model's own end of text, an empty list nothing at all, else these
    strings or these token ids.
    """

    max_tokens: Count | None = None
    seed: int | None = None
    stop: str | Sequence[str | int] | None = None
    temperature: NonNegative = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0

    def __post_init__(self) -> None:
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InputError("does not fit into 64 bits", "SamplingParams.seed")
        if self.stop is not None and self.stop.__class__ is not str:
            _check_stops(self.stop)


def _check_stops(stops: Sequence[str | int]) -> None:
    if len({stop.__class__ for stop in stops}) > 1:
        raise InputTypeError("strings and token ids cannot be mixed", "SamplingParams.stop")
    for i, stop in enumerate(stops):
        if isinstance(stop, int) and not 0 <= stop < 2**31:
            raise InputError(f"{stop} is not a token id", f"SamplingParams.stop[{i}]")


class SampleRequest(Request):
    """Ask for samples."""

    num_samples: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: Count = 0
    prompt_logprobs_last_n: Int | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


def copy_request(request: SampleRequest) -> SampleRequest:
    """A copy that does not change when the caller changes the lists and arrays inside `request`.

    A request is sent after the call that made it has returned, and sometimes twice.
    """
    params, target = request.sampling_params, request.target_prompt_logprobs
    return replace(
        request,
        prompt=copy_input(request.prompt, "SampleRequest.prompt"),
        sampling_params=params if params.stop.__class__ in (NoneType, str) else params.model_copy(),
        target_prompt_logprobs=None if target is None else target._copy(),  # pyright: ignore[reportPrivateUsage] -- same package
    )


class CreateSamplingSessionRequest(Request):
    """Open a sampler."""

    session_id: str
    sampling_session_seq_id: Int
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(Response):
    """The sampler's id."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSessionRequest(Request):
    """Register a copy of a sampling client."""

    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(Response):
    """The copy's number; the original is 0."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class GetSamplerResponse(Response):
    """What a sampler is."""

    sampler_id: str
    base_model: str
    model_path: str | None = None
