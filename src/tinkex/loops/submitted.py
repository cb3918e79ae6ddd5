"""A step on its way: the pass and the optimizer step that were submitted, and taking them back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tinkex.errors import APIError
from tinkex.futures.future import requests_in
from tinkex.wire import json_codec, routes
from tinkex.wire.bodies import CancelFutureRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.clients.training import TrainingClient
    from tinkex.futures.future import APIFuture
    from tinkex.types import AdamParams, Datum, LossFnType


class Submitted:
    """A forward-backward pass and the optimizer step behind it."""

    def __init__(
        self,
        training: TrainingClient,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        adam: AdamParams,
    ) -> None:
        self._training = training
        self._adam = adam
        self.passed = training.forward_backward(data, loss_fn)
        # Mutable: submitted again when only this half could be withdrawn.
        self.stepped = training.optim_step(adam)

    def withdraw(self) -> bool:
        """Take the step back; False when the server has begun it, so that it must be finished."""
        # The optimizer step goes first: without its pass it would apply gradients of nothing,
        # while a pass that runs without its optimizer step can still get one.
        if not _withdrawn(self._training, self.stepped):
            return False
        if _withdrawn(self._training, self.passed):
            return True
        self.stepped = self._training.optim_step(self._adam)
        return False


def _withdrawn(training: TrainingClient, future: APIFuture[Any]) -> bool:
    """Whether the server has taken an operation out of its queue, as it says itself."""
    request_id = future.status().request_id
    api = training.holder.api
    # Of several requests the first may run before the last is withdrawn.
    if request_id is None or requests_in(future) > 1:
        return False
    if not api.dynamic_config.sample_cancel_enabled:  # what is sent then is not protocol
        return False
    body = json_codec.encode(CancelFutureRequest(request_id=request_id))
    try:
        reply = training.operations.block(lambda: api.send(routes.CANCEL_FUTURE, body))
        answer: Any = msgspec.json.decode(reply.body)
    except (APIError, msgspec.DecodeError):
        return False
    return isinstance(answer, dict) and answer.get("cancelled") is True  # pyright: ignore[reportUnknownMemberType] - a server's free-form JSON
