"""The public names of tinkex; `tinkex.lazy_imports` reads them from here."""

from tinkex import auth as auth, types as types
from tinkex._version import __version__ as __version__
from tinkex.clients.admin import AdminClient as AdminClient
from tinkex.clients.custom_loss import LossHandle as LossHandle, PerDatumLossFn as PerDatumLossFn
from tinkex.clients.rest import RestClient as RestClient
from tinkex.clients.sampling import SamplingClient as SamplingClient
from tinkex.clients.sampling_checks import RetryConfig as RetryConfig
from tinkex.clients.service import ServiceClient as ServiceClient
from tinkex.clients.training import TrainingClient as TrainingClient
from tinkex.config import Config as Config
from tinkex.errors import (
    APIConnectionError as APIConnectionError,
    APIError as APIError,
    APIResponseValidationError as APIResponseValidationError,
    APIStatusError as APIStatusError,
    APITimeoutError as APITimeoutError,
    AuthenticationError as AuthenticationError,
    BadRequestError as BadRequestError,
    BillingError as BillingError,
    ChatTemplateError as ChatTemplateError,
    ClosedError as ClosedError,
    ConflictError as ConflictError,
    CredentialError as CredentialError,
    DataError as DataError,
    EngineDiedError as EngineDiedError,
    ExperimentalWarning as ExperimentalWarning,
    ForkedError as ForkedError,
    InputError as InputError,
    InputTypeError as InputTypeError,
    InternalServerError as InternalServerError,
    MissingPackageError as MissingPackageError,
    ModelError as ModelError,
    NotFoundError as NotFoundError,
    NothingToTrain as NothingToTrain,
    PermissionDeniedError as PermissionDeniedError,
    PromiseLostError as PromiseLostError,
    ProxyError as ProxyError,
    RateLimitError as RateLimitError,
    RequestFailedError as RequestFailedError,
    ResultError as ResultError,
    ServerSilentError as ServerSilentError,
    StorageError as StorageError,
    TinkerError as TinkerError,
    TokenizerError as TokenizerError,
    UnprocessableEntityError as UnprocessableEntityError,
)
from tinkex.futures.future import (
    APIFuture as APIFuture,
    AwaitableConcurrentFuture as AwaitableConcurrentFuture,
    FutureStatus as FutureStatus,
)
from tinkex.http_options import RequestOptions as RequestOptions, Timeout as Timeout
from tinkex.types import (
    AdamOptimizerConfig as AdamOptimizerConfig,
    AdamParams as AdamParams,
    Checkpoint as Checkpoint,
    CheckpointType as CheckpointType,
    Datum as Datum,
    DimuonOptimizerConfig as DimuonOptimizerConfig,
    DimuonParams as DimuonParams,
    DmelChunk as DmelChunk,
    EncodedTextChunk as EncodedTextChunk,
    ForwardBackwardOutput as ForwardBackwardOutput,
    ImageAssetPointerChunk as ImageAssetPointerChunk,
    ImageChunk as ImageChunk,
    LoraConfig as LoraConfig,
    LossFnType as LossFnType,
    ModelID as ModelID,
    ModelInput as ModelInput,
    ModelInputChunk as ModelInputChunk,
    OptimParams as OptimParams,
    OptimStepRequest as OptimStepRequest,
    OptimStepResponse as OptimStepResponse,
    ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath,
    PromptProvenanceSpan as PromptProvenanceSpan,
    RequestErrorCategory as RequestErrorCategory,
    SampledProvenanceSpan as SampledProvenanceSpan,
    SampledSequence as SampledSequence,
    SampleRequest as SampleRequest,
    SampleResponse as SampleResponse,
    SamplingParams as SamplingParams,
    StopReason as StopReason,
    TensorData as TensorData,
    TensorDtype as TensorDtype,
    TrainingRun as TrainingRun,
)
from tinkex.types.value import Usage as Usage

__title__: str
