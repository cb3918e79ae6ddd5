"""Custom losses over log-probabilities.

A callable, or a handle that the server does not run, is evaluated in the caller's own thread
between a forward and a backward pass (`local_loss`). A handle the server runs is one ordinary
pass. Tracing and encoding are in `loss_graph`.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Concatenate

from tinkex.clients.arguments import one_of
from tinkex.clients.local_loss import LocalLoss, datums_of, numbers
from tinkex.clients.loss_graph import load_torch, trace
from tinkex.clients.portal import wait_for
from tinkex.errors import InputError, InputTypeError, TinkerError
from tinkex.futures.call_results import given
from tinkex.spans import span
from tinkex.types import CreateCustomLossRequest, CustomLossInput, Datum
from tinkex.wire import routes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.fx

    from tinkex.clients.portal import Operations
    from tinkex.clients.session import Session
    from tinkex.clients.training import TrainingClient
    from tinkex.clients.training_requests import TrainingRequests
    from tinkex.futures.future import APIFuture
    from tinkex.types import CustomLossInputRank, ForwardBackwardOutput

CustomLossFnV1 = Callable[
    [list[Datum], "list[torch.Tensor]"], "tuple[torch.Tensor, dict[str, float]]"
]
"""A loss of a whole batch: the data and the log-probabilities of each datum in, the loss (one
number, a tensor) and metrics out."""

PerDatumLossFn = Callable[
    Concatenate["torch.Tensor", ...], "tuple[torch.Tensor, Mapping[str, torch.Tensor]]"
]
"""A loss of one datum: log-probabilities and named inputs in, loss and metrics out. It is traced,
so it must consist of torch operations only."""


@dataclass(frozen=True)
class LossHandle:
    """A loss made by `create_custom_loss`, for `forward_backward_custom` in the same session.

    `inputs` begins with `logprobs`; the others name what the loss reads from `loss_fn_inputs`.
    The traced `graph` is what runs. `loss_id` is None where the server does not run it.
    """

    name: str
    inputs: tuple[CustomLossInput, ...]
    session_id: str
    graph: torch.fx.GraphModule = field(repr=False, compare=False)
    loss_id: str | None = None

    @property
    def key(self) -> str:
        """Names what was traced: the SHA-256 of its code and inputs."""
        inputs = [f"{one.name}:{one.rank}" for one in self.inputs]
        return hashlib.sha256("\n".join([*inputs, self.graph.code]).encode()).hexdigest()

    @property
    def input_names(self) -> tuple[str, ...]:
        """What the loss reads besides `logprobs`, in the order of its parameters."""
        return tuple(one.name for one in self.inputs[1:])


# -- making a handle ------------------------------------------------------------------------------


def create_custom_loss(
    session: Session,
    operations: Operations,
    fn: PerDatumLossFn,
    input_ranks: Mapping[str, CustomLossInputRank],
) -> APIFuture[LossHandle]:
    """Trace `fn` now, and upload it where the server runs such losses.

    A function that cannot be traced raises at once; the same traced loss a second time in one
    session fails the future.
    """
    traced = trace(fn, input_ranks)

    async def work(_: object) -> LossHandle:
        api = await session.opened()
        session_id = given(session.session_id, "session_id", "create_session")
        handle = LossHandle(traced.name, traced.inputs, session_id, traced.module)
        if handle.key in session.custom_losses:
            raise InputError("was created in this session already; use the first handle", "fn")
        # Known from here on, so that a second call at the same time is refused as well.
        session.custom_losses.add(handle.key)
        if not api.client_config.custom_loss_server_side:
            return handle
        request = CreateCustomLossRequest(
            session_id=session_id,
            custom_loss_seq_id=next(session.custom_loss_seq_ids),
            name=handle.name,
            inputs=list(handle.inputs),
            graph=traced.graph,
        )
        try:
            with span("custom_loss.create", session_id=session_id):
                return replace(handle, loss_id=await _upload(session, request))
        except BaseException:
            session.custom_losses.discard(handle.key)
            raise

    return operations.start(work)


async def _upload(session: Session, request: CreateCustomLossRequest) -> str:
    route = routes.CREATE_CUSTOM_LOSS
    made = await session.request(route, request, "the custom loss", "CreateCustomLoss")
    return made.loss_id


# -- training with a custom loss ------------------------------------------------------------------


def run_custom(
    client: TrainingClient,
    requests: TrainingRequests,
    data: Sequence[Datum],
    loss_fn: CustomLossFnV1 | LossHandle,
    loss_type_input: str | None,
) -> APIFuture[ForwardBackwardOutput]:
    """Wait for the forward pass, run the loss on this thread, and start the backward pass.

    Errors of the client come out of the future; what `loss_fn` itself raises is raised here.
    """
    _check_loss_type(loss_type_input)
    try:
        begun = _begin(client, data, loss_fn)
        if not isinstance(begun, LocalLoss):
            return begun
        with requests.forward_then_backward(begun.forward_data()) as (forward, backward):
            weighted = begun.evaluate(wait_for(forward))
            return backward(weighted.data).then(weighted.fold)
    except TinkerError as error:
        return client.operations.refuse(error)


async def run_custom_async(
    client: TrainingClient,
    requests: TrainingRequests,
    data: Sequence[Datum],
    loss_fn: CustomLossFnV1 | LossHandle,
    loss_type_input: str | None,
) -> APIFuture[ForwardBackwardOutput]:
    """As `run_custom`, awaiting the forward pass; the loss runs on the caller's loop."""
    _check_loss_type(loss_type_input)
    try:
        begun = _begin(client, data, loss_fn)
        if not isinstance(begun, LocalLoss):
            return begun
        with requests.forward_then_backward(begun.forward_data()) as (forward, backward):
            weighted = begun.evaluate(await forward)
            return backward(weighted.data).then(weighted.fold)
    except TinkerError as error:
        return client.operations.refuse(error)


def _begin(
    client: TrainingClient, data: Sequence[Datum], loss_fn: CustomLossFnV1 | LossHandle
) -> LocalLoss | APIFuture[ForwardBackwardOutput]:
    """The call itself where the server runs the loss, else the loss to evaluate here."""
    if not isinstance(loss_fn, LossHandle):
        load_torch()
        datums = datums_of(data)
        if not callable(loss_fn):
            raise InputTypeError(
                f"must be a function or a LossHandle, not {type(loss_fn).__name__}", "loss_fn"
            )
        return LocalLoss(datums, loss_fn)
    if loss_fn.loss_id is not None:
        _check_handle(client, loss_fn, datums_of(data))
        return client.forward_backward(data, "custom", {"loss_id": loss_fn.loss_id})
    load_torch()
    datums = datums_of(data)
    _check_handle(client, loss_fn, datums)
    return LocalLoss(datums, _loss_of(loss_fn))


# -- checks ---------------------------------------------------------------------------------------


def _check_loss_type(loss_type_input: str | None) -> None:
    if loss_type_input is None:
        return
    warnings.warn("loss_type_input is deprecated; leave it out", DeprecationWarning, stacklevel=4)
    one_of(loss_type_input, ("logprobs",), "loss_type_input")


def _check_handle(client: TrainingClient, handle: LossHandle, data: list[Datum]) -> None:
    if handle.session_id != client.holder.session_id:
        raise InputError(
            f"belongs to session {handle.session_id}; create the loss with the ServiceClient that "
            "made this training client",
            "loss_fn",
        )
    for index, datum in enumerate(data):
        for one in handle.inputs:
            _check_input(datum, one, f"data[{index}]")


def _check_input(datum: Datum, one: CustomLossInput, place: str) -> None:
    # Log-probabilities come back in the shape of the targets.
    name = "target_tokens" if one.name == "logprobs" else one.name
    place = f'{place}.loss_fn_inputs["{name}"]'
    tensor = datum.loss_fn_inputs.get(name)
    if tensor is None:
        raise InputError("is missing; the loss reads it", place)
    rank = tensor.to_numpy().ndim
    if rank != one.rank:
        raise InputError(f"has rank {rank}; the loss declared {one.name} with {one.rank}", place)


def _loss_of(handle: LossHandle) -> CustomLossFnV1:
    """The handle's loss over a batch: losses and `:sum` metrics add up, `:mean` metrics average."""

    def loss_fn(
        data: list[Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        losses: list[torch.Tensor] = []
        totals: dict[str, float] = {}
        for datum, leaf in zip(data, logprobs, strict=True):
            inputs = [datum.loss_fn_inputs[name].to_torch() for name in handle.input_names]
            loss, metrics = handle.graph(leaf, *inputs)
            if loss.ndim:
                raise InputError(f"must return one number, not {tuple(loss.shape)}", "loss_fn")
            losses.append(loss)
            for name, number in numbers(metrics).items():
                totals[name] = totals.get(name, 0.0) + number
        for name in totals:
            if name.endswith(":mean"):
                totals[name] /= len(data)
        return sum(losses[1:], start=losses[0]), totals

    return loss_fn
