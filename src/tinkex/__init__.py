"""A Tinker-compatible SDK: write the training loop, run it anywhere.

Scripts written for the official package run after `import tinkex as tinker`. Names are loaded
when they are first used, so importing this package costs next to nothing and never loads torch,
transformers or numpy.
"""

from __future__ import annotations

from tinkex._version import __version__

TYPE_CHECKING = (
    False  # type checkers take it for true; importing typing for it costs more than all of this
)

__title__ = "tinkex"

if TYPE_CHECKING:
    from tinkex import auth, types
    from tinkex.clients.admin import AdminClient
    from tinkex.clients.custom_loss import LossHandle, PerDatumLossFn
    from tinkex.clients.rest import RestClient
    from tinkex.clients.sampling import SamplingClient
    from tinkex.clients.sampling_checks import RetryConfig
    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient
    from tinkex.config import Config
    from tinkex.errors import (
        APIConnectionError,
        APIError,
        APIResponseValidationError,
        APIStatusError,
        APITimeoutError,
        AuthenticationError,
        BadRequestError,
        BillingError,
        ChatTemplateError,
        ClosedError,
        ConflictError,
        CredentialError,
        DataError,
        EngineDiedError,
        ExperimentalWarning,
        ForkedError,
        InputError,
        InputTypeError,
        InternalServerError,
        MissingPackageError,
        ModelError,
        NotFoundError,
        NothingToTrain,
        PermissionDeniedError,
        PromiseLostError,
        ProxyError,
        RateLimitError,
        RequestFailedError,
        ResultError,
        ServerSilentError,
        StorageError,
        TinkerError,
        TokenizerError,
        UnprocessableEntityError,
    )
    from tinkex.futures.future import APIFuture, AwaitableConcurrentFuture, FutureStatus
    from tinkex.http_options import RequestOptions, Timeout
    from tinkex.types import (
        AdamOptimizerConfig,
        AdamParams,
        Checkpoint,
        CheckpointType,
        Datum,
        DimuonOptimizerConfig,
        DimuonParams,
        DmelChunk,
        EncodedTextChunk,
        ForwardBackwardOutput,
        ImageAssetPointerChunk,
        ImageChunk,
        LoraConfig,
        LossFnType,
        ModelID,
        ModelInput,
        ModelInputChunk,
        OptimParams,
        OptimStepRequest,
        OptimStepResponse,
        ParsedCheckpointTinkerPath,
        PromptProvenanceSpan,
        RequestErrorCategory,
        SampledProvenanceSpan,
        SampledSequence,
        SampleRequest,
        SampleResponse,
        SamplingParams,
        StopReason,
        TensorData,
        TensorDtype,
        TrainingRun,
    )
    from tinkex.types.usage import Usage

_HOMES = {
    "tinkex": ("auth", "types"),
    "tinkex.clients.admin": ("AdminClient",),
    "tinkex.clients.custom_loss": ("LossHandle", "PerDatumLossFn"),
    "tinkex.clients.rest": ("RestClient",),
    "tinkex.clients.sampling_checks": ("RetryConfig",),
    "tinkex.clients.sampling": ("SamplingClient",),
    "tinkex.clients.service": ("ServiceClient",),
    "tinkex.clients.training": ("TrainingClient",),
    "tinkex.config": ("Config",),
    "tinkex.errors": (
        "APIConnectionError",
        "APIError",
        "APIResponseValidationError",
        "APIStatusError",
        "APITimeoutError",
        "AuthenticationError",
        "BadRequestError",
        "BillingError",
        "ChatTemplateError",
        "ClosedError",
        "ConflictError",
        "CredentialError",
        "DataError",
        "EngineDiedError",
        "ExperimentalWarning",
        "ForkedError",
        "InputError",
        "InputTypeError",
        "InternalServerError",
        "MissingPackageError",
        "ModelError",
        "NotFoundError",
        "NothingToTrain",
        "PermissionDeniedError",
        "PromiseLostError",
        "ProxyError",
        "RateLimitError",
        "RequestFailedError",
        "ResultError",
        "ServerSilentError",
        "StorageError",
        "TinkerError",
        "TokenizerError",
        "UnprocessableEntityError",
    ),
    "tinkex.futures.future": ("APIFuture", "AwaitableConcurrentFuture", "FutureStatus"),
    "tinkex.http_options": ("RequestOptions", "Timeout"),
    "tinkex.types": (
        "AdamOptimizerConfig",
        "AdamParams",
        "Checkpoint",
        "CheckpointType",
        "Datum",
        "DimuonOptimizerConfig",
        "DimuonParams",
        "DmelChunk",
        "EncodedTextChunk",
        "ForwardBackwardOutput",
        "ImageAssetPointerChunk",
        "ImageChunk",
        "LoraConfig",
        "LossFnType",
        "ModelID",
        "ModelInput",
        "ModelInputChunk",
        "OptimParams",
        "OptimStepRequest",
        "OptimStepResponse",
        "ParsedCheckpointTinkerPath",
        "PromptProvenanceSpan",
        "RequestErrorCategory",
        "SampleRequest",
        "SampleResponse",
        "SampledProvenanceSpan",
        "SampledSequence",
        "SamplingParams",
        "StopReason",
        "TensorData",
        "TensorDtype",
        "TrainingRun",
    ),
    "tinkex.types.usage": ("Usage",),
}

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIFuture",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AdamOptimizerConfig",
    "AdamParams",
    "AdminClient",
    "AuthenticationError",
    "AwaitableConcurrentFuture",
    "BadRequestError",
    "BillingError",
    "ChatTemplateError",
    "Checkpoint",
    "CheckpointType",
    "ClosedError",
    "Config",
    "ConflictError",
    "CredentialError",
    "DataError",
    "EngineDiedError",
    "Datum",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "DmelChunk",
    "EncodedTextChunk",
    "ExperimentalWarning",
    "ForkedError",
    "ForwardBackwardOutput",
    "FutureStatus",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "InputError",
    "InputTypeError",
    "InternalServerError",
    "MissingPackageError",
    "ModelError",
    "LoraConfig",
    "LossFnType",
    "LossHandle",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "NotFoundError",
    "NothingToTrain",
    "OptimParams",
    "OptimStepRequest",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PerDatumLossFn",
    "PermissionDeniedError",
    "PromiseLostError",
    "ProxyError",
    "PromptProvenanceSpan",
    "RateLimitError",
    "RequestErrorCategory",
    "RequestFailedError",
    "RequestOptions",
    "RestClient",
    "ResultError",
    "RetryConfig",
    "SampleRequest",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServerSilentError",
    "ServiceClient",
    "StopReason",
    "StorageError",
    "TensorData",
    "TensorDtype",
    "Timeout",
    "TinkerError",
    "TokenizerError",
    "TrainingClient",
    "TrainingRun",
    "UnprocessableEntityError",
    "Usage",
    "__title__",
    "__version__",
    "auth",
    "types",
]


if not TYPE_CHECKING:  # a module __getattr__ would make checkers accept any name

    def __getattr__(name: str) -> object:
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'tinkex' has no attribute {name!r}")
        import importlib

        if home == "tinkex":
            return importlib.import_module(f"tinkex.{name}")
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
