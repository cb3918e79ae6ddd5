"""The one list of endpoints, used by the client and by the server.

The client sends by these rows and the server mounts them. A row says how a call looks on the wire
and how long a client retries it; what the call means is decided elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack, cast
from urllib.parse import quote

from tinkex import types as t
from tinkex.errors import InputError, InputTypeError, quoted
from tinkex.wire import bodies as b

PREFIX = "/api/v1"
MEDIA_JSON = "application/json"
MEDIA_PROTOBUF = "application/x-protobuf"
MEDIA_TAR = "application/x-tar"
# The session of a program that has attached to a model, in every training request it sends.
SESSION_HEADER = "x-tinkex-session"

Method = Literal["GET", "POST", "PUT", "DELETE"]

# full:   retried until 300 s have passed; a 402 waits for the account to recover
# submit: ten retries at most; a 402 is raised at once
# none:   one attempt, the caller decides what a failure means
# sample: one attempt; 429 sets the shared sampling backoff and the sample is sent again
# poll:   one attempt; the future's poller decides
Retry = Literal["full", "submit", "none", "sample", "poll"]

Encoding = Literal["json", "protobuf", "tar", "none"]

# The value of X-Tinker-Request-Type, which also names the kind of a result.
RequestType = Literal[
    "Sample",
    "Forward",
    "ForwardBackward",
    "OptimStep",
    "SaveWeights",
    "SaveWeightsForSampler",
    "SaveWeightsExternal",
    "LoadWeights",
    "CreateModel",
    "CreateCustomLoss",
    "UnloadModel",
]

ReqT = TypeVar("ReqT")
RepT = TypeVar("RepT")

_PARAMETER = re.compile(r"\{(\w+)\}")


class Pool(StrEnum):
    """Traffic that must not wait for other traffic has connections of its own."""

    SESSION = "session"
    TRAIN = "train"
    SAMPLE = "sample"
    FUTURES = "futures"
    TELEMETRY = "telemetry"
    REST = "rest"


@dataclass(frozen=True, slots=True)
class Route(Generic[ReqT, RepT]):
    """One endpoint.

    `reply` is None when the body of a success says nothing, or is read by `wire.results`.
    `future` is the type of the result when the reply is a future, `query` the names a call
    without JSON understands, and `legacy` marks what only older clients call.
    """

    name: str
    method: Method
    path: str
    request: type[ReqT] | None
    reply: type[RepT] | None
    pool: Pool
    timeout_s: float = 60.0
    retry: Retry = "full"
    request_encoding: Encoding = "json"
    future: type[Any] | None = None
    request_type: RequestType | None = None
    query: tuple[str, ...] = ()
    follow_redirects: bool = False
    legacy: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names in the path template, in order."""
        return tuple(_PARAMETER.findall(self.path))

    def url(self, **params: str) -> str:
        """The path with its parameters filled in; raises InputError for one that cannot fit."""
        names = self.parameters
        if set(params) != set(names):
            wanted = ", ".join(names) or "none"
            raise InputTypeError(f"{self.name} takes the path parameters: {wanted}")
        return _PARAMETER.sub(lambda found: _fill(found[1], params[found[1]]), self.path)


def _fill(name: str, value: str) -> str:
    """One path parameter, escaped except for the colons and the checkpoint's own slash."""
    parts = value.split("/")
    expected = 2 if name == "ckpt" else 1
    if len(parts) != expected or any(part in ("", ".", "..") for part in parts):
        shape = "`<kind>/<name>`, such as `weights/final`" if expected == 2 else "without slashes"
        raise InputError(f"must be a non-empty id {shape}, not {quoted(value)}", name)
    return "/".join(quote(part, safe=":") for part in parts)


_RUN = f"{PREFIX}/training_runs/{{run}}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{ckpt}}"
_SESSION = f"{PREFIX}/sessions/{{session}}"


class _Options(TypedDict, total=False):
    timeout_s: float
    retry: Retry
    request_encoding: Encoding
    query: tuple[str, ...]
    follow_redirects: bool
    legacy: bool


def _post(
    name: str,
    request: type[ReqT],
    reply: type[RepT] | None,
    pool: Pool,
    *,
    path: str | None = None,
    **options: Unpack[_Options],
) -> Route[ReqT, RepT]:
    """A POST with a JSON body and a direct answer."""
    return Route(name, "POST", path or f"{PREFIX}/{name}", request, reply, pool, **options)


def _submit(
    name: str,
    request: type[ReqT],
    future: type[Any],
    request_type: RequestType,
    *,
    pool: Pool = Pool.TRAIN,
    **options: Unpack[_Options],
) -> Route[ReqT, t.UntypedAPIFuture]:
    """A POST that is answered with a future."""
    return Route(
        name,
        "POST",
        f"{PREFIX}/{name}",
        request,
        t.UntypedAPIFuture,
        pool,
        future=future,
        request_type=request_type,
        **options,
    )


def _rest(
    name: str,
    method: Method,
    path: str,
    reply: type[RepT] | None,
    **options: Unpack[_Options],
) -> Route[None, RepT]:
    """A call without a body."""
    options.setdefault("request_encoding", "none")
    return Route(name, method, path, None, reply, Pool.REST, **options)


def _nothing(
    name: str, method: Method, path: str, request: type[ReqT], pool: Pool = Pool.REST
) -> Route[ReqT, None]:
    """A JSON body answered by an empty result."""
    return Route(name, method, path, request, None, pool)


# Bootstrap and credentials.
CLIENT_CONFIG = _post(
    "client_config",
    t.ClientConfigRequest,
    t.ClientConfigResponse,
    Pool.SESSION,
    path=f"{PREFIX}/client/config",
)
CLIENT_DYNAMIC_CONFIG = _post(
    "client_dynamic_config",
    t.ClientConfigRequest,
    t.ClientDynamicConfigResponse,
    Pool.SESSION,
    path=f"{PREFIX}/client/dynamic_config",
    timeout_s=10.0,
)
AUTH_TOKEN = _post(
    "auth_token",
    b.AuthTokenRequest,
    t.AuthTokenResponse,
    Pool.SESSION,
    path=f"{PREFIX}/auth/token",
    retry="submit",
)
GET_API_KEY = _rest(
    "get_api_key",
    "GET",
    f"{PREFIX}/auth/apikey/me",
    b.ApiKeyResponse,
    timeout_s=30.0,
    retry="none",
)
DELETE_API_KEY: Route[None, None] = _rest(
    "delete_api_key", "DELETE", f"{PREFIX}/auth/apikey/me", None, timeout_s=30.0, retry="none"
)

# Sessions.
CREATE_SESSION = _post(
    "create_session", t.CreateSessionRequest, t.CreateSessionResponse, Pool.SESSION, retry="submit"
)
SESSION_HEARTBEAT = _post(
    "session_heartbeat",
    t.SessionHeartbeatRequest,
    t.SessionHeartbeatResponse,
    Pool.SESSION,
    timeout_s=10.0,
    retry="none",
)
SEARCH_SESSIONS = _post(
    "search_sessions",
    t.SessionSearchRequest,
    t.SessionSearchResponse,
    Pool.REST,
    path=f"{PREFIX}/sessions/search",
)
LIST_SESSIONS = _rest(
    "list_sessions",
    "GET",
    f"{PREFIX}/sessions",
    t.ListSessionsResponse,
    query=("limit", "offset", "access_scope"),
)
FINISH_SESSION = _nothing(
    "finish_session", "POST", f"{_SESSION}/finish", b.FinishSessionRequest, Pool.SESSION
)
SET_SESSION_PROJECT = _nothing(
    "set_session_project", "PUT", f"{_SESSION}/project", b.SetProjectRequest
)
EXPORT_TRACE = _rest("export_trace", "GET", f"{_SESSION}/trace_export", b.TraceExportResponse)
GET_SESSION = _rest("get_session", "GET", _SESSION, t.GetSessionResponse, query=("access_scope",))

# Training.
CREATE_MODEL = _submit(
    "create_model", t.CreateModelRequest, t.CreateModelResponse, "CreateModel", retry="submit"
)
FORWARD_BACKWARD = _submit(
    "forward_backward",
    t.ForwardBackwardRequest,
    t.ForwardBackwardOutput,
    "ForwardBackward",
    request_encoding="protobuf",
)
OPTIM_STEP = _submit("optim_step", t.OptimStepRequest, t.OptimStepResponse, "OptimStep")
CREATE_CUSTOM_LOSS = _submit(
    "create_custom_loss",
    t.CreateCustomLossRequest,
    t.CreateCustomLossResponse,
    "CreateCustomLoss",
)
GET_INFO = _post("get_info", t.GetInfoRequest, t.GetInfoResponse, Pool.REST)

# Weights.
SAVE_WEIGHTS = _submit("save_weights", t.SaveWeightsRequest, t.SaveWeightsResponse, "SaveWeights")
SAVE_WEIGHTS_FOR_SAMPLER = _submit(
    "save_weights_for_sampler",
    t.SaveWeightsForSamplerRequest,
    t.SaveWeightsForSamplerResponseInternal,
    "SaveWeightsForSampler",
)
SAVE_WEIGHTS_EXTERNAL = _submit(
    "save_weights_external",
    t.SaveWeightsExternalRequest,
    t.SaveWeightsExternalResponseInternal,
    "SaveWeightsExternal",
)
LOAD_WEIGHTS = _submit("load_weights", t.LoadWeightsRequest, t.LoadWeightsResponse, "LoadWeights")
WEIGHTS_INFO = _post("weights_info", b.WeightsInfoRequest, t.WeightsInfoResponse, Pool.REST)
COPY_WEIGHTS = _post("copy_weights", t.CopyWeightsRequest, t.CopyWeightsResponse, Pool.REST)
# Not part of the official protocol: other servers answer 404. An adapter is uploaded as a tar; how
# long that takes depends on its size, so the time-out is about silence.
IMPORT_WEIGHTS: Route[None, b.ImportWeightsResponse] = Route(
    "import_weights",
    "POST",
    f"{PREFIX}/import_weights",
    None,
    b.ImportWeightsResponse,
    Pool.REST,
    timeout_s=300.0,
    request_encoding="tar",
    query=("base_model", "name", "kind"),
)

# Sampling.
CREATE_SAMPLING_SESSION = _post(
    "create_sampling_session",
    t.CreateSamplingSessionRequest,
    t.CreateSamplingSessionResponse,
    Pool.SESSION,
    retry="submit",
)
JOIN_SAMPLING_SESSION = _post(
    "join_sampling_session",
    t.JoinSamplingSessionRequest,
    t.JoinSamplingSessionResponse,
    Pool.SESSION,
)
ASAMPLE = _submit(
    "asample", t.SampleRequest, t.SampleResponse, "Sample", pool=Pool.SAMPLE, retry="sample"
)
GET_SAMPLER = _rest("get_sampler", "GET", f"{PREFIX}/samplers/{{sampler}}", t.GetSamplerResponse)
# Not part of the official protocol: other servers answer 404.
GET_TOKENIZER = _rest(
    "get_tokenizer", "GET", f"{PREFIX}/tokenizer", b.TokenizerResponse, query=("base_model",)
)

# Futures.
RETRIEVE_FUTURE: Route[t.FutureRetrieveRequest, None] = Route(
    "retrieve_future",
    "POST",
    f"{PREFIX}/retrieve_future",
    t.FutureRetrieveRequest,
    None,
    Pool.FUTURES,
    timeout_s=45.0,
    retry="poll",
)
RETRIEVE_FUTURES = _post(
    "retrieve_futures",
    t.FuturesRetrieveRequest,
    t.FuturesRetrieveResponse,
    Pool.FUTURES,
    timeout_s=45.0,
    retry="poll",
)
CANCEL_FUTURE: Route[b.CancelFutureRequest, None] = Route(
    "cancel_future",
    "POST",
    f"{PREFIX}/cancel_future",
    b.CancelFutureRequest,
    None,
    Pool.FUTURES,
    timeout_s=30.0,
)

# Only tinkex servers have these two; official clients never ask.
RELEASE_NUMBERS: Route[b.ReleaseNumbersRequest, None] = Route(
    "release_numbers",
    "POST",
    f"{PREFIX}/tinkex/release_numbers",
    b.ReleaseNumbersRequest,
    None,
    Pool.TRAIN,
)
ATTACH_MODEL = _post(
    "attach_model",
    b.AttachModelRequest,
    b.AttachModelResponse,
    Pool.TRAIN,
    path=f"{PREFIX}/tinkex/attach_model",
)
# Telemetry keeps a failed batch itself, so the call is not retried underneath.
TELEMETRY = _post(
    "telemetry",
    t.TelemetrySendRequest,
    t.TelemetryResponse,
    Pool.TELEMETRY,
    timeout_s=5.0,
    retry="none",
)

# Service.
GET_SERVER_CAPABILITIES = _rest(
    "get_server_capabilities",
    "GET",
    f"{PREFIX}/get_server_capabilities",
    t.GetServerCapabilitiesResponse,
)
HEALTHZ = _rest("healthz", "GET", f"{PREFIX}/healthz", t.HealthResponse, retry="submit")

# Runs and checkpoints.
LIST_TRAINING_RUNS = _rest(
    "list_training_runs",
    "GET",
    f"{PREFIX}/training_runs",
    t.TrainingRunsResponse,
    query=("limit", "offset", "access_scope", "project_id"),
)
LIST_RUN_CHECKPOINTS = _rest(
    "list_run_checkpoints", "GET", f"{_RUN}/checkpoints", t.CheckpointsListResponse
)
GET_TRAINING_RUN = _rest("get_training_run", "GET", _RUN, t.TrainingRun, query=("access_scope",))
LIST_CHECKPOINTS = _rest(
    "list_checkpoints",
    "GET",
    f"{PREFIX}/checkpoints",
    t.CheckpointsListResponse,
    query=("limit", "offset"),
)
PUBLISH_CHECKPOINT: Route[None, None] = _rest(
    "publish_checkpoint", "POST", f"{_CHECKPOINT}/publish", None
)
UNPUBLISH_CHECKPOINT: Route[None, None] = _rest(
    "unpublish_checkpoint", "DELETE", f"{_CHECKPOINT}/publish", None
)
SET_CHECKPOINT_TTL = _nothing("set_checkpoint_ttl", "PUT", f"{_CHECKPOINT}/ttl", b.SetTtlRequest)
GET_EXTERNAL_WEIGHTS_URLS = _rest(
    "get_external_weights_urls",
    "GET",
    f"{_CHECKPOINT}/external_weights_urls",
    t.ExternalWeightsUrlsResponse,
)
GET_CHECKPOINT_ARCHIVE = _rest(
    "get_checkpoint_archive", "GET", f"{_CHECKPOINT}/archive", b.ArchiveUrlResponse, legacy=True
)
DELETE_CHECKPOINT: Route[None, None] = _rest("delete_checkpoint", "DELETE", _CHECKPOINT, None)

# Administration.
GET_AUDIT_LOG = _rest(
    "get_audit_log",
    "GET",
    f"{PREFIX}/audit",
    t.AuditLogResponse,
    query=("event_type", "day"),
    follow_redirects=True,
)
GET_BILLING_USAGE = _rest(
    "get_billing_usage",
    "GET",
    f"{PREFIX}/billing/usage/events",
    t.BillingUsageResponse,
    query=("starting_on", "ending_before"),
)
GET_CHECKPOINT_STORAGE_USAGE = _rest(
    "get_checkpoint_storage_usage",
    "GET",
    f"{PREFIX}/billing/usage/checkpoints/current",
    t.CurrentCheckpointStorageUsageResponse,
    query=("project_id",),
)

# Only older clients call these; see the JSON bodies in `json_codec.decode_request`.
FORWARD = _submit("forward", t.ForwardRequest, t.ForwardBackwardOutput, "Forward", legacy=True)
UNLOAD_MODEL = _submit(
    "unload_model", t.UnloadModelRequest, t.UnloadModelResponse, "UnloadModel", legacy=True
)
LIST_MODEL_CHECKPOINTS = _rest(
    "list_model_checkpoints",
    "GET",
    f"{PREFIX}/models/{{run}}/checkpoints",
    t.CheckpointsListResponse,
    legacy=True,
)

# In the order of their definition: a fixed path comes before a template that would match it, too.
ROUTES: tuple[Route[Any, Any], ...] = tuple(
    cast("Route[Any, Any]", route)
    for route in tuple(globals().values())
    if isinstance(route, Route)
)
