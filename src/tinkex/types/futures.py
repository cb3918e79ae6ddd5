"""Accepted requests, their states and their results."""

from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from msgspec import field

from tinkex.types.checkpoints import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from tinkex.types.models import CreateModelResponse, UnloadModelResponse
from tinkex.types.optimizers import OptimStepResponse
from tinkex.types.training import ForwardBackwardOutput
from tinkex.types.value import Count, Finite, Request, Response

RequestID = str
"""The id under which a result can be fetched."""


class UntypedAPIFuture(Response):
    """The server accepted a request."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class FutureRetrieveRequest(Request):
    """Ask for a result."""

    request_id: str
    allow_metadata_only: bool = False


class TryAgainResponse(Response):
    """The result is not ready yet."""

    type: Literal["try_again"] = "try_again"
    request_id: str = ""
    queue_state: str | None = None
    queue_state_reason: str | None = None


class SamplingSessionFuturesTarget(Request):
    """A sampling session, and which copy of its client."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: Count = 0


class FuturesRetrieveRequest(Request):
    """Ask which requests of a sampling session are done."""

    target: SamplingSessionFuturesTarget
    prev_cursor: Count = 0
    timeout: Finite | None = None
    retrieved_request_ids: list[str] = field(default_factory=list[str])


class FutureFinished(Response, tag_field="state", tag="finished"):
    """A request is done."""

    request_id: str
    response_payload_uncompressed_size: int | None = None
    if TYPE_CHECKING:
        state: Literal["finished"] = "finished"


class FutureFailed(Response, tag_field="state", tag="failed"):
    """A request failed."""

    request_id: str
    if TYPE_CHECKING:
        state: Literal["failed"] = "failed"


FutureCompletion = FutureFinished | FutureFailed
"""How a request ended."""


class FuturesRetrieveResponse(Response):
    """The requests that ended since the last cursor."""

    completions: list[FutureCompletion]
    cursor: int


class RequestErrorCategory(StrEnum):
    """The side that caused a failure."""

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def _missing_(cls, value: object) -> "RequestErrorCategory":
        if isinstance(value, str):
            for member in cls:
                if member.value == value.lower():
                    return member
        return cls.Unknown


class RequestFailedResponse(Response):
    """A request failed, and why."""

    error: str
    category: RequestErrorCategory


FutureRetrieveResponse = (
    TryAgainResponse
    | ForwardBackwardOutput
    | OptimStepResponse
    | SaveWeightsResponse
    | LoadWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | CreateModelResponse
    | UnloadModelResponse
    | RequestFailedResponse
)
"""Everything that a request for a result can return."""
