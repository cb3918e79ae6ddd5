"""The modules of the official package and their names, and where each is found in tinkex.

A module maps to the places where its attributes are looked up, in order: a tinkex module
(every public name of it), or a dictionary of names that have another home or name here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import TypeAlias

OFFICIAL_NAME = "tinker"

Source: TypeAlias = "str | dict[str, str]"

_PUBLIC_NAMES = """
ServiceClient TrainingClient SamplingClient RestClient AdminClient APIFuture LossHandle
PerDatumLossFn auth types AdamOptimizerConfig AdamParams Checkpoint CheckpointType Datum
DimuonOptimizerConfig DimuonParams DmelChunk EncodedTextChunk ForwardBackwardOutput LoraConfig
ModelID ModelInput ModelInputChunk OptimParams OptimStepRequest OptimStepResponse
ParsedCheckpointTinkerPath PromptProvenanceSpan SampledProvenanceSpan SampledSequence
SampleRequest SampleResponse SamplingParams StopReason TensorData TensorDtype TrainingRun Timeout
RequestOptions TinkerError APIError APIStatusError APITimeoutError APIConnectionError
APIResponseValidationError RequestFailedError BadRequestError AuthenticationError BillingError
PermissionDeniedError NotFoundError ConflictError UnprocessableEntityError RateLimitError
InternalServerError ExperimentalWarning __version__ __title__
"""
ALL = tuple(_PUBLIC_NAMES.split())
"""`tinker.__all__`."""


class QueueState(StrEnum):
    """What the server says about its queue; equal to the plain strings that tinkex uses."""

    ACTIVE = "active"
    PAUSED_RATE_LIMIT = "paused_rate_limit"
    PAUSED_CAPACITY = "paused_capacity"
    UNKNOWN = "unknown"


class QueueStateObserver(ABC):
    """Notified when the queue pauses or moves again."""

    @abstractmethod
    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        """Called on every change."""


def is_retryable_status_code(status_code: int) -> bool:
    """Whether a request answered with this status is worth sending again."""
    return status_code in (408, 409, 429) or 500 <= status_code < 600


# Names from inside the official package that scripts import and tinkex itself does not use.
_INTERNAL_NAMES = ("QueueState", "QueueStateObserver", "is_retryable_status_code")
_INTERNALS: Source = {name: f"{__name__}:{name}" for name in _INTERNAL_NAMES}
# One class stands for both of the official futures.
_FUTURE: Source = {"AwaitableConcurrentFuture": "tinkex:APIFuture"}
_PUBLIC = "tinker.lib.public_interfaces"

MODULES: dict[str, tuple[Source, ...]] = {
    "tinker": ("tinkex",),
    "tinker.auth": ("tinkex.auth",),
    "tinker._exceptions": ("tinkex.errors",),
    "tinker._version": (),
    "tinker.cli": (),
    "tinker.cli.__main__": ({"cli": "tinkex.cli.main:main"},),
    "tinker.lib": (),
    _PUBLIC: ("tinkex", _FUTURE),
    f"{_PUBLIC}.service_client": ("tinkex",),
    f"{_PUBLIC}.training_client": (
        "tinkex",
        {"CustomLossFnV1": "tinkex.clients.custom_loss:CustomLossFnV1"},
    ),
    f"{_PUBLIC}.sampling_client": ("tinkex",),
    f"{_PUBLIC}.rest_client": ("tinkex",),
    f"{_PUBLIC}.admin_client": ("tinkex",),
    f"{_PUBLIC}.api_future": ("tinkex", _FUTURE),
    f"{_PUBLIC}.custom_loss": ("tinkex",),
    "tinker.lib.retry_handler": ("tinkex", _INTERNALS),
    "tinker.lib.api_future_impl": ("tinkex", _INTERNALS),
    "tinker.lib.experimental": ("tinkex",),
    "tinker.types": ("tinkex.types",),
}
PACKAGES = frozenset({"tinker", "tinker.cli", "tinker.lib", _PUBLIC, "tinker.types"})
PROGRAMS = {"tinker.cli.__main__": "tinkex.cli.__main__"}
"""Modules that `python -m` runs, and what runs instead."""

_TYPE_MODULES = """
audit_log_entry audit_log_response auth_token_response billing_usage_request
billing_usage_response checkpoint checkpoints_list_response client_config_request
client_config_response client_dynamic_config_response copy_weights_request
copy_weights_response create_custom_loss_request create_custom_loss_response
create_model_request create_model_response create_sampling_session_request
create_sampling_session_response create_session_request create_session_response
current_checkpoint_storage_usage_request current_checkpoint_storage_usage_response cursor
custom_loss_graph custom_loss_input datum dmel_chunk encoded_text_chunk event_type
external_weights_urls_response forward_backward_input forward_backward_output
forward_backward_request forward_request future_completion future_retrieve_request
future_retrieve_response futures_retrieve_request futures_retrieve_response generic_event
get_info_request get_info_response get_sampler_response get_server_capabilities_response
get_session_response health_response image_asset_pointer_chunk image_chunk
join_sampling_session_request join_sampling_session_response list_sessions_response
load_weights_request load_weights_response lora_config loss_fn_inputs loss_fn_output
loss_fn_type model_id model_input model_input_chunk optim_step_request optim_step_response
optimizer prompt_alt_tokens provenance_spans request_error_category request_failed_response
request_id sample_request sample_response sampled_sequence sampling_params
save_weights_external_request save_weights_external_response save_weights_for_sampler_request
save_weights_for_sampler_response save_weights_request save_weights_response search_owner
session_end_event session_heartbeat_request session_heartbeat_response session_search_cursor
session_search_request session_search_response session_start_event session_status
session_status_query session_summary severity shared stop_reason telemetry_batch
telemetry_event telemetry_response telemetry_send_request tensor_data tensor_dtype
topk_logprobs training_run training_runs_response try_again_response unhandled_exception_event
unload_model_request unload_model_response weights_info_response whoami_response
"""
MODULES.update({f"tinker.types.{name}": ("tinkex.types",) for name in _TYPE_MODULES.split()})

ABSENT = {
    "tinker.resources": "the low-level resources; use ServiceClient and RestClient",
    "tinker._client": "the low-level client; use ServiceClient and RestClient",
    "tinker.proto": "the generated protobuf module; use tinkex.wire",
}
"""Parts of the official package that have no counterpart, and what to use instead."""
