"""`TrainingClient`: one training run.

Every operation returns an `APIFuture` at once and is sent in the order of the calls. Bad data is
refused before anything is sent; the error comes out of the future like any other.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any, Literal

from tinkex.clients.arguments import given_text
from tinkex.clients.base_client import BaseClient
from tinkex.clients.sampling import SamplingClient, open_sampler
from tinkex.clients.sampling_checks import check_options
from tinkex.clients.session import Session, training_run_url
from tinkex.clients.training_requests import TrainingRequests, vocabulary
from tinkex.clients.twins import blocking, deferred, hint_async, on_loop
from tinkex.errors import APIError, InputError, InputTypeError, TinkerError
from tinkex.futures.call_results import given
from tinkex.futures.future import APIFuture, requests_in
from tinkex.types import (
    AdamParams,
    ForwardBackwardOutput,
    GetInfoRequest,
    GetInfoResponse,
    LoadWeightsRequest,
    LoadWeightsResponse,
    OptimParamsBase,
    OptimStepRequest,
    OptimStepResponse,
    ParsedCheckpointTinkerPath,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
)
from tinkex.wire import json_codec, routes
from tinkex.wire.bodies import CancelFutureRequest

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from tinkex.clients.connection import Lease
    from tinkex.clients.custom_loss import CustomLossFnV1, LossHandle
    from tinkex.clients.sampling_checks import RetryConfig
    from tinkex.tokenizers import Tokenizer
    from tinkex.types import Datum, LossFnType, OptimParams

_log = logging.getLogger(__name__)


class TrainingClient(BaseClient[Session]):
    """Trains one LoRA adapter. Made by `ServiceClient`, never directly."""

    def __init__(
        self,
        lease: Lease[Session],
        model_seq_id: int,
        model_id: str,
        *,
        attached_at: int | None = None,
    ) -> None:
        self.model_id = model_id
        self.model_seq_id = model_seq_id
        self._lease = lease
        super().__init__(lease.connection, lease.operations())
        self._calls = TrainingRequests(
            lease.connection,
            self._operations,
            model_id,
            # Looked up at each change, so that replacing the hook on the object works.
            lambda state, reason: self.on_queue_state_change(state, reason),
            attached_at,
        )

    @property
    def next_seq_id(self) -> int:
        """The number of the next request that is sent. The run's first request has number 1."""
        return self._calls.queue.next_seq_id

    # -- training -----------------------------------------------------------------------------

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss without gradients."""
        return self._calls.run_pass(data, loss_fn, loss_fn_config, forward_only=True)

    forward_async = deferred(forward)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss and add its gradients to those already accumulated."""
        return self._calls.run_pass(data, loss_fn, loss_fn_config, forward_only=False)

    forward_backward_async = deferred(forward_backward)

    def optim_step(
        self, optim_params: OptimParams | None = None, *, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        """Apply the accumulated gradients."""
        try:
            params = _one_of(optim_params, adam_params)
        except TinkerError as error:
            return self._operations.refuse(error)
        return self._calls.json_turn(
            routes.OPTIM_STEP,
            lambda seq_id: OptimStepRequest(
                optim_params=params, model_id=self.model_id, seq_id=seq_id
            ),
        )

    optim_step_async = deferred(optim_step)

    # Not a coroutine function: programs that wrap those of the official client, which has no
    # such method, would not know what to do with one more.
    def withdraw_async(self, future: APIFuture[Any]) -> Coroutine[Any, Any, bool]:
        """Take an operation of this run out of the server's queue; says whether that was done.

        False when the operation has begun or ended, was split into several requests, or when the
        server cannot withdraw it. A withdrawn operation ends with `RequestFailedError`.
        """
        if not isinstance(future, APIFuture):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may not type-check
            kind = type(future).__name__
            raise InputTypeError(f"expected the future of a training call, got {kind}", "future")
        return self._operations.run(lambda: self._withdraw(future))

    withdraw = blocking(withdraw_async)

    async def _withdraw(self, future: APIFuture[Any]) -> bool:
        api, request_id = await self.holder.opened(), future.status().request_id
        # Of several requests the first may run before the last is withdrawn.
        if request_id is None or requests_in(future) > 1:
            return False
        if not api.dynamic_config.sample_cancel_enabled:  # its answer is not protocol then
            return False
        body = json_codec.encode(CancelFutureRequest(request_id=request_id))
        try:
            reply = await api.send(routes.CANCEL_FUTURE, body)
            answer = json_codec.decode_object(reply.body)
        except (APIError, InputError):
            return False
        return answer.get("cancelled") is True

    # -- weights ------------------------------------------------------------------------------

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Save a checkpoint that training can resume from."""
        return self._calls.json_turn(
            routes.SAVE_WEIGHTS,
            lambda seq_id: SaveWeightsRequest(
                model_id=self.model_id,
                path=name,
                seq_id=seq_id,
                ttl_seconds=ttl_seconds,
                overwrite=overwrite,
                user_metadata=user_metadata,
            ),
        )

    save_state_async = deferred(save_state)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Save weights that a sampling client can be made from."""
        return self._calls.json_turn(
            routes.SAVE_WEIGHTS_FOR_SAMPLER,
            lambda seq_id: SaveWeightsForSamplerRequest(
                model_id=self.model_id,
                path=name,
                seq_id=seq_id,
                ttl_seconds=ttl_seconds,
                user_metadata=user_metadata,
            ),
            lambda value: SaveWeightsForSamplerResponse(
                path=given(value.path, "path", routes.SAVE_WEIGHTS_FOR_SAMPLER.name),
                usage=value.usage,
            ),
        )

    save_weights_for_sampler_async = deferred(save_weights_for_sampler)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> APIFuture[SaveWeightsExternalResponse]:
        """Export weights in the Hugging Face layout, encrypted if recipients are given."""
        return self._calls.json_turn(
            routes.SAVE_WEIGHTS_EXTERNAL,
            lambda seq_id: SaveWeightsExternalRequest(
                model_id=self.model_id,
                path=name,
                seq_id=seq_id,
                ttl_seconds=ttl_seconds,
                age_encryption_recipients=age_encryption_recipients,
            ),
            lambda value: SaveWeightsExternalResponse(
                path=given(value.path, "path", routes.SAVE_WEIGHTS_EXTERNAL.name),
                usage=value.usage,
            ),
        )

    save_weights_external_async = deferred(save_weights_external)

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Load weights into this run. Deprecated: create a client from the state instead."""
        _deprecated("load_state", "create_training_client_from_state")
        return self.load(path, optimizer=False, weights_access_token=weights_access_token)

    load_state_async = deferred(load_state)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Load weights and optimizer state. Deprecated: create a client from the state instead."""
        _deprecated("load_state_with_optimizer", "create_training_client_from_state_with_optimizer")
        return self.load(path, optimizer=True, weights_access_token=weights_access_token)

    load_state_with_optimizer_async = deferred(load_state_with_optimizer)

    def load(
        self, path: str, *, optimizer: bool, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Load a checkpoint into this run in its turn."""
        try:
            ParsedCheckpointTinkerPath.from_tinker_path(given_text(path, "path"))
        except TinkerError as error:
            return self._operations.refuse(error)
        return self._calls.json_turn(
            routes.LOAD_WEIGHTS,
            lambda seq_id: LoadWeightsRequest(
                model_id=self.model_id,
                seq_id=seq_id,
                path=path,
                optimizer=optimizer,
                weights_access_token=weights_access_token,
            ),
        )

    # -- sampling -----------------------------------------------------------------------------

    async def save_weights_and_get_sampling_client_async(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Publish the weights as they are now and return a client that samples from them."""
        check_options(retry_config, record_stability_info)
        if name is not None:
            warnings.warn("name is ignored: the weights are not kept", DeprecationWarning, 2)
        # One number for all attempts; the turn is taken now, so that the snapshot has its place
        # among the other operations.
        number = next(self.holder.sampling_session_seq_ids)
        saved = self._calls.json_turn(
            routes.SAVE_WEIGHTS_FOR_SAMPLER,
            lambda seq_id: SaveWeightsForSamplerRequest(
                model_id=self.model_id,
                sampling_session_seq_id=number,
                seq_id=seq_id,
            ),
            lambda value: given(value.sampling_session_id, "sampling_session_id", "the save"),
        )
        return SamplingClient(
            self._lease,
            await saved,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    save_weights_and_get_sampling_client = blocking(save_weights_and_get_sampling_client_async)

    async def create_sampling_client_async(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """A client that samples from saved weights."""
        return await open_sampler(
            self._lease,
            model_path=model_path,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    create_sampling_client = blocking(create_sampling_client_async)

    # -- custom losses ------------------------------------------------------------------------

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLossFnV1 | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Train on a loss of your own over log-probabilities; needs torch.

        A callable, or a handle the server does not run, is evaluated here on the calling thread,
        between a forward and a backward pass; the returned future is that of the backward pass.
        """
        from tinkex.clients.custom_loss import run_custom

        hint_async("forward_backward_custom")
        return run_custom(self, self._calls, data, loss_fn, loss_type_input)

    async def forward_backward_custom_async(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLossFnV1 | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward_backward_custom`; the loss runs on the caller's loop."""
        from tinkex.clients.custom_loss import run_custom_async

        return await run_custom_async(self, self._calls, data, loss_fn, loss_type_input)

    # -- about this run -----------------------------------------------------------------------

    @on_loop
    async def get_info_async(self) -> GetInfoResponse:
        """What the server knows about this run."""
        api = await self.holder.opened()
        info = await api.call(routes.GET_INFO, GetInfoRequest(model_id=self.model_id))
        tokenizer_id = info.model_data.tokenizer_id
        if tokenizer_id is None or ":" not in tokenizer_id:
            return info
        cut = info.model_data.model_copy(update={"tokenizer_id": tokenizer_id.split(":")[0]})
        return info.model_copy(update={"model_data": cut})

    get_info = blocking(get_info_async)

    # Not a coroutine function: see withdraw_async.
    def get_tokenizer_async(self) -> Coroutine[Any, Any, Tokenizer]:
        """The model's tokenizer; from `transformers` where installed, else `tokenizers`."""
        return self._load_tokenizer()

    async def _load_tokenizer(self) -> Tokenizer:
        from tinkex.tokenizers import tokenizer_of

        data = (await self.get_info_async()).model_data
        name = given(data.model_name, "model_data.model_name", "get_info")
        tokenizer = await tokenizer_of(await self.holder.opened(), name, data.tokenizer_id)
        # From now on ids that the model cannot know are refused before they are sent.
        self._calls.vocab_size = vocabulary(tokenizer)
        return tokenizer

    get_tokenizer = blocking(get_tokenizer_async)

    def get_console_url(self) -> str:
        """Where this run can be looked at."""
        return training_run_url(self.model_id)

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        """Called whenever the server's queue pauses or moves again; override or replace it."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a TrainingClient belongs to its process and cannot be pickled; save its state and "
            "create a client from it there, or send a SamplingClient"
        )


def _one_of(optim_params: object, adam_params: object) -> OptimParams:
    if optim_params is not None and adam_params is not None:
        raise InputError("give either optim_params or adam_params, not both", "optim_params")
    params = optim_params if optim_params is not None else adam_params
    if not isinstance(params, (AdamParams, OptimParamsBase)):
        raise InputTypeError(
            f"must be AdamParams or another optimizer's parameters, not {type(params).__name__}",
            "optim_params",
        )
    return params


def _deprecated(old: str, new: str) -> None:
    message = f"{old} is deprecated; use ServiceClient.{new}, which makes a new run"
    warnings.warn(message, FutureWarning, stacklevel=3)
    _log.error("%s", message)
