"""The public names, compared with a stored list: nothing appears or goes away by accident."""

from __future__ import annotations

import importlib
import inspect

import pytest

import tinkex

TINKEX = [
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
    "Datum",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "DmelChunk",
    "EncodedTextChunk",
    "EngineDiedError",
    "ExperimentalWarning",
    "ForkedError",
    "ForwardBackwardOutput",
    "FutureStatus",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "InputError",
    "InputTypeError",
    "InternalServerError",
    "LoraConfig",
    "LossFnType",
    "LossHandle",
    "MissingPackageError",
    "ModelError",
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

TYPES = [
    "AccessibleSearchOwner",
    "ActiveSessionStatusQuery",
    "AdamOptimizerConfig",
    "AdamParams",
    "AuditLogEntry",
    "AuditLogResponse",
    "AuthTokenResponse",
    "BillingEventInfo",
    "BillingUsageEvent",
    "BillingUsageResponse",
    "BillingUsageSession",
    "CancelledSessionStatusQuery",
    "Checkpoint",
    "CheckpointBillingEvent",
    "CheckpointType",
    "CheckpointsListResponse",
    "ClientConfigRequest",
    "ClientConfigResponse",
    "ClientDynamicConfigResponse",
    "ClientFinishedSessionStatusQuery",
    "ClientSessionFinishErrored",
    "ClientSessionFinishInterrupted",
    "ClientSessionFinishReason",
    "ClientSessionFinishReasonType",
    "ClientSessionFinishSuccess",
    "ClientSessionFinished",
    "CopyWeightsRequest",
    "CopyWeightsResponse",
    "CreateCustomLossRequest",
    "CreateCustomLossResponse",
    "CreateModelRequest",
    "CreateModelResponse",
    "CreateSamplingSessionRequest",
    "CreateSamplingSessionResponse",
    "CreateSessionRequest",
    "CreateSessionResponse",
    "CurrentCheckpointStorageUsageItem",
    "CurrentCheckpointStorageUsageResponse",
    "Cursor",
    "CustomLossGraph",
    "CustomLossInput",
    "CustomLossInputRank",
    "CustomLossNode",
    "CustomLossNodeOp",
    "Datum",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "DmelChunk",
    "EncodedTextChunk",
    "EventType",
    "ExternalWeightsUrlsResponse",
    "FailedSessionStatusQuery",
    "ForwardBackwardInput",
    "ForwardBackwardOutput",
    "ForwardBackwardRequest",
    "ForwardRequest",
    "FutureCompletion",
    "FutureFailed",
    "FutureFinished",
    "FutureRetrieveRequest",
    "FutureRetrieveResponse",
    "FuturesRetrieveRequest",
    "FuturesRetrieveResponse",
    "GenericEvent",
    "GetBillingUsageRequest",
    "GetCurrentCheckpointStorageUsageRequest",
    "GetInfoRequest",
    "GetInfoResponse",
    "GetSamplerResponse",
    "GetServerCapabilitiesResponse",
    "GetSessionResponse",
    "HealthResponse",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "JoinSamplingSessionRequest",
    "JoinSamplingSessionResponse",
    "ListSessionsResponse",
    "LoadWeightsRequest",
    "LoadWeightsResponse",
    "LoraConfig",
    "LossFnInputs",
    "LossFnOutput",
    "LossFnType",
    "MASK_LOGPROB",
    "ModelData",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "OptimParams",
    "OptimParamsBase",
    "OptimStepRequest",
    "OptimStepResponse",
    "OptimizerConfig",
    "OptimizerConfigBase",
    "OwnSearchOwner",
    "ParsedCheckpointTinkerPath",
    "PromptAltTokens",
    "PromptProvenanceSpan",
    "ProvenanceSpans",
    "RequestErrorCategory",
    "RequestFailedResponse",
    "RequestID",
    "SampleRequest",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingParams",
    "SamplingPrefillBillingEvent",
    "SamplingSampleBillingEvent",
    "SamplingSessionFuturesTarget",
    "SaveWeightsExternalRequest",
    "SaveWeightsExternalResponse",
    "SaveWeightsExternalResponseInternal",
    "SaveWeightsForSamplerRequest",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsForSamplerResponseInternal",
    "SaveWeightsRequest",
    "SaveWeightsResponse",
    "SearchOwner",
    "SessionActive",
    "SessionCancelled",
    "SessionEndEvent",
    "SessionFailed",
    "SessionFailedReason",
    "SessionFailedRequestReason",
    "SessionFailedSamplingSessionReason",
    "SessionFailedTrainingRunReason",
    "SessionHeartbeatRequest",
    "SessionHeartbeatResponse",
    "SessionSearchCursor",
    "SessionSearchRequest",
    "SessionSearchResponse",
    "SessionStartEvent",
    "SessionStatus",
    "SessionStatusQuery",
    "SessionSummary",
    "Severity",
    "StopReason",
    "StorageBillingEvent",
    "SupportedModel",
    "TelemetryBatch",
    "TelemetryEvent",
    "TelemetryResponse",
    "TelemetrySendRequest",
    "TensorData",
    "TensorDtype",
    "TopkLogprobs",
    "TrainingBillingEvent",
    "TrainingRun",
    "TrainingRunsResponse",
    "TryAgainResponse",
    "UnhandledExceptionEvent",
    "UnloadModelRequest",
    "UnloadModelResponse",
    "UntypedAPIFuture",
    "Usage",
    "UserSearchOwner",
    "WeightsInfoResponse",
    "WhoamiResponse",
]

TESTING = [
    "API_KEY",
    "Delays",
    "EngineCall",
    "FakeClock",
    "FakeEngine",
    "FakeServer",
    "Faults",
    "InProcessTransport",
    "SeenRequest",
    "faults",
]


CHAT = [
    "ChatExample",
    "CompletionExample",
    "PreferenceExample",
    "Rendered",
    "Renderer",
    "tokenizer_for",
    "tokenizer_for_async",
]

DATA = [
    "ChatExample",
    "CompletionExample",
    "PreferenceExample",
    "kind_of",
    "read_examples",
    "render_all",
    "render_pairs",
]

LOOPS = [
    "DpoJob",
    "DpoSettings",
    "Job",
    "Outcome",
    "RlJob",
    "RlSettings",
    "Settings",
    "SftJob",
    "SftSettings",
    "run",
]

SEEING = [
    "Progress",
    "Sink",
    "follow",
    "open_sinks",
    "plot",
    "read_metrics",
    "series_of",
    "write_picture",
]

STORED = {
    "tinkex": TINKEX,
    "tinkex.types": TYPES,
    "tinkex.testing": TESTING,
    "tinkex.chat": CHAT,
    "tinkex.data": DATA,
    "tinkex.loops": LOOPS,
    "tinkex.tracking": SEEING,
}


@pytest.mark.parametrize("module", STORED)
def test_the_public_names_are_those_of_the_stored_list(module: str):
    names = importlib.import_module(module).__all__
    assert len(names) == len(set(names))
    assert sorted(names) == sorted(STORED[module])


@pytest.mark.parametrize("module", STORED)
def test_every_public_name_resolves_and_is_listed_by_dir(module: str):
    home = importlib.import_module(module)
    for name in STORED[module]:
        assert getattr(home, name) is not None, name
    assert set(STORED[module]) <= set(dir(home))


@pytest.mark.parametrize("module", STORED)
def test_a_name_that_is_not_public_is_an_attribute_error_that_names_it(module: str):
    with pytest.raises(AttributeError, match="no_such_name"):
        importlib.import_module(module).no_such_name  # noqa: B018


def test_star_imports_give_exactly_the_public_names():
    space: dict[str, object] = {}
    exec("from tinkex import *", space)
    assert set(space) - {"__builtins__"} == set(TINKEX)


def test_every_public_class_and_function_is_documented():
    for module, names in STORED.items():
        home = importlib.import_module(module)
        for name in names:
            value = getattr(home, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert value.__doc__, f"{module}.{name}"


def test_every_error_a_user_can_catch_is_public():
    from tinkex import errors

    raised = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.TinkerError)
    }
    missing = raised - set(tinkex.__all__)
    # Raised where the standard class that it also is says enough.
    assert missing <= {"MissingPackageError", "NothingToTrain", "TokenizerError"}, missing
