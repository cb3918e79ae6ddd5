"""`ServiceClient`: makes the other clients, and ends their session."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, Self

from tinkex.clients.arguments import given_text, header_text, named_values, optional_text
from tinkex.clients.base_client import ClosableClient
from tinkex.clients.connection import Lease
from tinkex.clients.sampling import SamplingClient, open_sampler
from tinkex.clients.session import Session, session_url
from tinkex.clients.training import TrainingClient
from tinkex.clients.twins import awaited, blocking, on_loop
from tinkex.config import Config
from tinkex.errors import APIStatusError, InputError, NotFoundError, NothingToTrain
from tinkex.futures.call_results import given
from tinkex.types import (
    AdamOptimizerConfig,
    CreateModelRequest,
    LoadWeightsRequest,
    LoraConfig,
    ParsedCheckpointTinkerPath,
)
from tinkex.wire import bodies, routes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.clients.custom_loss import LossHandle, PerDatumLossFn
    from tinkex.clients.rest import RestClient
    from tinkex.clients.sampling_checks import RetryConfig
    from tinkex.futures.future import APIFuture
    from tinkex.transport.api import Api
    from tinkex.types import (
        CustomLossInputRank,
        GetServerCapabilitiesResponse,
        OptimizerConfig,
        Usage,
        WeightsInfoResponse,
    )

# What a server answers to a route that it does not have.
_NO_SUCH_ROUTE = (404, 405, 501)

CloseStatus = Literal["success", "errored", "interrupted"]


class ServiceClient(ClosableClient[Session]):
    """A connection to a Tinker server; does nothing until it is used.

    `config` replaces the settings that would be taken from the arguments and the environment.
    Use it as a context manager, blocking or async, or call `close()`: both finish the session.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | Literal["embedded"] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        proxy: str | None = None,
        config: Config | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            names = ", ".join(sorted(kwargs))
            warnings.warn(f"ServiceClient ignores unknown arguments: {names}", FutureWarning, 2)
        if isinstance(user_metadata, str) and user_metadata == "embedded":
            user_metadata, base_url = None, "embedded"
        if config is None:
            config = Config.load(
                base_url=base_url,
                api_key=api_key,
                project_id=project_id,
                headers=default_headers_overrides,
                proxy=proxy,
            )
        elif any((base_url, api_key, project_id, default_headers_overrides, proxy)):
            raise InputError("says all of it already; put the other settings into it", "config")
        self._begin(
            Session(
                config,
                user_metadata=named_values(user_metadata, "user_metadata"),
                display_name=optional_text(display_name, "display_name"),
                project_id=config.project_id,
            )
        )

    @classmethod
    def over(cls, session: Session) -> Self:
        """A client on a session made elsewhere: with a clock, loop or transport of your own."""
        client = cls.__new__(cls)
        client._begin(session)
        return client

    def _begin(self, session: Session) -> None:
        self._lease = Lease(session)
        super().__init__(session, self._lease.operations())
        # Runs that this client has attached to: two clients of one run would share its numbers.
        self._attached: set[str] = set()

    # -- what the server has ------------------------------------------------------------------

    @on_loop
    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        """The models this server offers; needs no session."""
        api = await self.holder.connected()
        return await api.call(routes.GET_SERVER_CAPABILITIES)

    get_server_capabilities = blocking(get_server_capabilities_async)

    # -- training -----------------------------------------------------------------------------

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        """Start a training run with a fresh LoRA adapter."""
        lora = LoraConfig(
            rank=rank,
            seed=seed,
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
        )
        if not (train_mlp or train_attn or train_unembed):
            raise NothingToTrain(
                "at least one of train_mlp, train_attn, train_unembed must be true"
            )
        return await self._operations.run(
            lambda: self._create_model(base_model, lora, user_metadata, optimizer)
        )

    create_lora_training_client = blocking(create_lora_training_client_async)

    async def _create_model(
        self,
        base_model: str,
        lora: LoraConfig,
        user_metadata: dict[str, str] | None,
        optimizer: OptimizerConfig | None,
    ) -> TrainingClient:
        # Made before anything is sent, so that bad arguments never are.
        draft = CreateModelRequest(
            session_id="",
            model_seq_id=0,
            base_model=given_text(base_model, "base_model"),
            user_metadata=user_metadata,
            lora_config=lora,
            optimizer_config=AdamOptimizerConfig() if optimizer is None else optimizer,
        )
        session = self.holder
        await session.opened()
        number = next(session.model_seq_ids)
        session_id = given(session.session_id, "session_id", "create_session")
        request = draft.model_copy(update={"session_id": session_id, "model_seq_id": number})
        created = await self._submit(routes.CREATE_MODEL, request)
        return TrainingClient(self._lease, number, created.model_id)

    async def create_training_client_from_state_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        """Start a new run from saved weights, with a fresh optimizer."""
        return await self._operations.run(
            lambda: self._resume(
                path, base_model, user_metadata, weights_access_token, optimizer, False
            )
        )

    create_training_client_from_state = blocking(create_training_client_from_state_async)

    async def create_training_client_from_state_with_optimizer_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        """Start a new run from saved weights and optimizer state."""
        return await self._operations.run(
            lambda: self._resume(path, base_model, user_metadata, weights_access_token, None, True)
        )

    create_training_client_from_state_with_optimizer = blocking(
        create_training_client_from_state_with_optimizer_async
    )

    async def _resume(
        self,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        token: str | None,
        optimizer: OptimizerConfig | None,
        with_optimizer: bool,
    ) -> TrainingClient:
        ParsedCheckpointTinkerPath.from_tinker_path(given_text(path, "path"))
        if token is not None:
            header_text(token, "weights_access_token")
        # Made before anything is sent, so that bad arguments never are.
        draft = LoadWeightsRequest(
            session_id="",
            model_seq_id=0,
            base_model=optional_text(base_model, "base_model"),
            user_metadata=user_metadata,
            path=path,
            optimizer=with_optimizer,
            optimizer_config=None if with_optimizer else optimizer,
            weights_access_token=token,
        )
        api = await self.holder.opened()
        if api.client_config.create_model_via_load_weights:
            return await self._create_by_loading(draft)
        info = await self._weights_info(path, token)
        if not info.is_lora or info.lora_rank is None:
            raise InputError("is not a LoRA checkpoint, so no LoRA run can start from it", "path")
        lora = LoraConfig(
            rank=info.lora_rank,
            train_unembed=info.train_unembed is not False,
            train_mlp=info.train_mlp is not False,
            train_attn=info.train_attn is not False,
        )
        client = await self._create_model(
            base_model or info.base_model,
            lora,
            user_metadata,
            info.optimizer_config if with_optimizer else optimizer,
        )
        await client.load(path, optimizer=with_optimizer, weights_access_token=token)
        return client

    async def _create_by_loading(self, draft: LoadWeightsRequest) -> TrainingClient:
        session = self.holder
        session_id = given(session.session_id, "session_id", "create_session")
        number = next(session.model_seq_ids)
        request = draft.model_copy(update={"session_id": session_id, "model_seq_id": number})
        loaded = await self._submit(routes.LOAD_WEIGHTS, request)
        # The protocol fixes the id of a run that is created this way.
        return TrainingClient(
            self._lease, number, loaded.model_id or f"{session_id}:train:{number}"
        )

    @on_loop
    async def attach_training_client_async(self, model_id: str) -> TrainingClient:
        """Continue a run whose own program has ended, at the next `seq_id`.

        What that program had submitted runs first. Needs a tinkex server, and that the program
        has been silent for half a minute and its session is not over. `ConflictError`: another
        program trains the run. `PromiseLostError`: it is closed; the message names its last
        checkpoint.
        """
        # Refuses a bad id before anything is sent.
        routes.GET_TRAINING_RUN.url(run=given_text(model_id, "model_id"))
        session = self.holder
        api = await session.opened()
        session_id = given(session.session_id, "session_id", "create_session")
        if model_id in self._attached or model_id.startswith(f"{session_id}:"):
            raise InputError("this client trains the run already", "model_id")
        self._attached.add(model_id)
        try:
            attached = await api.call(
                routes.ATTACH_MODEL,
                bodies.AttachModelRequest(model_id=model_id, session_id=session_id),
            )
        except BaseException as error:
            self._attached.discard(model_id)
            if isinstance(error, APIStatusError) and error.status_code in _NO_SUCH_ROUTE:
                raise await _cannot_attach(api, model_id, error) from error
            raise
        number = model_id.rpartition(":")[2]
        return TrainingClient(
            self._lease,
            int(number) if number.isdecimal() else 0,
            model_id,
            attached_at=attached.next_seq_id,
        )

    attach_training_client = blocking(attach_training_client_async)

    async def _weights_info(self, path: str, token: str | None) -> WeightsInfoResponse:
        api = await self.holder.connected()
        request = bodies.WeightsInfoRequest(tinker_path=path)
        headers = {} if token is None else {"X-API-Key": token}
        return await api.call(routes.WEIGHTS_INFO, request, headers=headers)

    async def _submit(self, route: routes.Route[Any, Any], request: Any) -> Any:
        """Send a request outside the order of any run and wait for its result."""
        kind: routes.RequestType = given(route.request_type, "type", route.name)
        return await self.holder.request(route, request, "the new training run", kind)

    # -- sampling -----------------------------------------------------------------------------

    async def create_sampling_client_async(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """A client that samples from a base model or from saved weights."""
        return await open_sampler(
            self._lease,
            model_path=model_path,
            base_model=base_model,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    create_sampling_client = blocking(create_sampling_client_async)

    # -- the rest -----------------------------------------------------------------------------

    def create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]
    ) -> APIFuture[LossHandle]:
        """Trace a loss over log-probabilities, and upload it where the server runs such losses."""
        from tinkex.clients.custom_loss import create_custom_loss

        return create_custom_loss(self.holder, self._operations, fn, input_ranks)

    create_custom_loss_async = awaited(create_custom_loss)

    def copy_weights(
        self,
        path: str,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint into this client's project; the result is the path of the copy."""
        return self._rest().copy_weights(
            path,
            self.holder.project_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
        )

    copy_weights_async = awaited(copy_weights)

    def create_rest_client(self) -> RestClient:
        """Deprecated: `RestClient()` needs no session."""
        warnings.warn("create_rest_client is deprecated; use RestClient()", FutureWarning, 2)
        return self._rest()

    def _rest(self) -> RestClient:
        from tinkex.clients.rest import RestClient

        return RestClient(self._lease)

    def usage(self) -> Usage:
        """Tokens, queue time and device seconds of this session so far."""
        return self.holder.usage

    def get_console_url(self) -> str:
        """Where this session can be looked at; the list of sessions before there is one."""
        return session_url(self.holder.session_id)

    # -- the end ------------------------------------------------------------------------------

    def close(self, status: CloseStatus = "success", detail: str | None = None) -> APIFuture[None]:
        """Finish the session and close its connections; pending calls end with `ClosedError`."""
        if self._closing is None:
            self._closing = self.holder.close(status, detail)
        return self._closing

    close_async = awaited(close)

    def _leave(self, error: BaseException | None) -> APIFuture[None]:
        if error is None:
            return self.close()
        telemetry = self.get_telemetry()
        if telemetry is not None:
            # The session ends with this error, so it is the last chance to report it.
            telemetry.exception(error)
        return self.close("errored" if isinstance(error, Exception) else "interrupted")

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a ServiceClient belongs to its process and cannot be pickled; send a SamplingClient, "
            "or make a new ServiceClient there"
        )


async def _cannot_attach(api: Api, model_id: str, error: APIStatusError) -> APIStatusError:
    """The error for a server without the route, or for a run that the server does not know."""
    try:
        run = await api.call(routes.GET_TRAINING_RUN, params={"run": model_id})
    except NotFoundError:
        return error
    advice = "it has no checkpoint to continue from"
    if run.last_checkpoint is not None:
        advice = (
            f"its last checkpoint is {run.last_checkpoint.tinker_path}: load it with "
            "create_training_client_from_state_with_optimizer"
        )
    message = f"this server cannot attach a program to the run {model_id}; {advice}"
    return type(error)(message, error.response, error.body)
