"""Checkpoints: saving, loading, copying and naming them."""

from datetime import datetime
from typing import Any, Final, Literal, Self
from urllib.parse import quote

from tinkex.errors import InputError, InputTypeError, quoted
from tinkex.types.optimizers import OptimizerConfigField, set_optimizer_config
from tinkex.types.value import Int, Request, Response, Result, Usage

CheckpointType = Literal["training", "sampler", "external"]
"""What a checkpoint is for."""

CONSOLE_URL: Final = "https://tinker.thinkingmachines.ai"

_SCHEME: Final = "tinker://"
_TYPES: Final[dict[str, CheckpointType]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


class Checkpoint(Response):
    """A stored checkpoint."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


class Cursor(Response):
    """The position of a page in a list."""

    offset: int
    limit: int
    total_count: int


class CheckpointsListResponse(Response):
    """A page of checkpoints."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class ParsedCheckpointTinkerPath(Response):
    """The parts of `tinker://<run>/<kind>/<name>`."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """Split a checkpoint path, or raise `InputError`."""
        if not isinstance(tinker_path, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may not type-check
            raise InputTypeError(f"expected str, got {type(tinker_path).__name__}", "tinker_path")
        parts = tinker_path.removeprefix(_SCHEME).split("/")
        if (
            not tinker_path.startswith(_SCHEME)
            or len(parts) != 3
            or not all(parts)
            or parts[1] not in _TYPES
        ):
            kinds = ", ".join(_TYPES)
            raise InputError(
                f"{quoted(tinker_path)} is not tinker://<run>/<kind>/<name> with a kind of {kinds}",
                "tinker_path",
            )
        run, kind, name = parts
        return cls(
            tinker_path=tinker_path,
            training_run_id=run,
            checkpoint_type=_TYPES[kind],
            checkpoint_id=f"{kind}/{name}",
        )


def _console_url(path: str) -> str:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    run = quote(parsed.training_run_id, safe="")
    return f"{CONSOLE_URL}/checkpoints/{run}/{quote(parsed.checkpoint_id, safe='')}"


class SaveWeightsRequest(Request):
    """Save a model so that training can resume from it."""

    model_id: str
    path: str | None = None
    seq_id: Int | None = None
    ttl_seconds: Int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(Result, eq=False):
    """Where the checkpoint is."""

    path: str
    type: Literal["save_weights"] | None = None
    usage: Usage | None = None

    def get_console_url(self) -> str:
        """The checkpoint's page on the hosted service's console."""
        return _console_url(self.path)


class SaveWeightsForSamplerRequest(Request):
    """Save a model for inference: under a name, or for one new sampling session."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: Int | None = None
    seq_id: Int | None = None
    ttl_seconds: Int | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponse(Result, eq=False):
    """Where the checkpoint is."""

    path: str
    type: Literal["save_weights_for_sampler"] | None = None
    usage: Usage | None = None

    def get_console_url(self) -> str:
        """The checkpoint's page on the hosted service's console."""
        return _console_url(self.path)

    def get_playground_url(self) -> str:
        """A page of the hosted service where the checkpoint can be tried."""
        return f"{CONSOLE_URL}/playground?mode=checkpoint&checkpoint={quote(self.path, safe='')}"


class SaveWeightsForSamplerResponseInternal(Result, eq=False):
    """The server's own answer to that save: a path, or a ready sampling session."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None
    usage: Usage | None = None


class SaveWeightsExternalRequest(Request):
    """Export a model's weights."""

    model_id: str
    path: str
    seq_id: Int | None = None
    ttl_seconds: Int | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponse(Result, eq=False):
    """Where the export is."""

    path: str
    type: Literal["save_weights_external"] | None = None
    usage: Usage | None = None


class SaveWeightsExternalResponseInternal(Result, eq=False):
    """The server's own answer to an export."""

    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None
    usage: Usage | None = None


class LoadWeightsRequest(Request):
    """Load a checkpoint into a model, or make a model from one.

    `model_id` and `seq_id` name an existing model; `session_id` and `model_seq_id` a new one.
    """

    model_id: str | None = None
    seq_id: Int | None = None
    session_id: str | None = None
    model_seq_id: Int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerConfigField | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"

    def __post_init__(self) -> None:
        if self.optimizer_config is not None:
            set_optimizer_config(self)

    def __repr__(self) -> str:
        return _hide_token(self)


class LoadWeightsResponse(Result, eq=False):
    """The checkpoint is loaded."""

    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] | None = None
    usage: Usage | None = None


class CopyWeightsRequest(Request):
    """Copy a checkpoint into a project, or into a session's new model."""

    session_id: str | None = None
    model_seq_id: Int | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: Int | None = None
    weights_access_token: str | None = None

    def __repr__(self) -> str:
        return _hide_token(self)


def _hide_token(request: LoadWeightsRequest | CopyWeightsRequest) -> str:
    shown = {} if request.weights_access_token is None else {"weights_access_token": "<hidden>"}
    return request._repr_with(**shown)  # pyright: ignore[reportPrivateUsage] -- same package


class CopyWeightsResponse(Response):
    """Where the copy is."""

    tinker_path: str


class ExternalWeightsUrlsResponse(Response):
    """A signed URL for each file of an export."""

    urls: dict[str, str]
    expires: datetime


class TrainingRun(Response):
    """A training run."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRunsResponse(Response):
    """A page of training runs."""

    training_runs: list[TrainingRun]
    cursor: Cursor
