"""Turns the calls of a training client into requests: checks, chunks, encodings, usage."""

from __future__ import annotations

import copy
import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from tinkex.clients.training_queue import Outgoing, TrainingQueue, inside
from tinkex.errors import TinkerError
from tinkex.futures.admission import input_bytes, text_tokens
from tinkex.futures.call_results import TimedResult, combine
from tinkex.futures.lifecycle import charge
from tinkex.futures.queue_notices import QueueNotices
from tinkex.types.datum import copy_datum
from tinkex.types.training import batch_to_send, loss_config
from tinkex.wire import json_codec, routes
from tinkex.wire.proto_training import encode_forward_backward, renumber_forward_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    import msgspec

    from tinkex.clients.portal import Operations
    from tinkex.clients.session import Session
    from tinkex.clients.training_queue import QueuedCall
    from tinkex.futures.future import APIFuture
    from tinkex.types import Datum, ForwardBackwardOutput, LossFnType

    Backward = Callable[[Sequence[Datum]], APIFuture[ForwardBackwardOutput]]

T = TypeVar("T")


class TrainingRequests:
    """Everything a training client sends, in its turn."""

    def __init__(
        self,
        session: Session,
        operations: Operations,
        model_id: str,
        on_queue_state_change: Callable[[str, str | None], None],
        attached_at: int | None = None,
    ) -> None:
        assert session.context is not None  # a training client is made on an open session
        self._session = session
        self._api = session.context.api
        self._operations = operations
        self._model_id = model_id
        # Known once the tokenizer has been loaded.
        self.vocab_size: int | None = None
        notices = QueueNotices(
            f"training run {model_id}", session.clock, on_queue_state_change, session.telemetry
        )
        self.queue = TrainingQueue(session, operations, notices, model_id, attached_at)

    def run_pass(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
        place: QueuedCall | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """A forward or forward-backward pass over `data`, in as many requests as it takes.

        With `place` it is sent where that was reserved.
        """
        try:
            batch = batch_to_send(data, loss_fn, self.vocab_size)
            config = loss_config(loss_fn_config, "loss_fn_config")
            requests = self._pass_requests(batch, loss_fn, config, forward_only)
        except TinkerError as error:
            return self._operations.refuse(error)
        tokens = 0
        for datum in batch:
            tokens += text_tokens(datum.model_input)
        kind = "prompt_tokens" if forward_only else "trained_tokens"

        def fold(results: list[TimedResult]) -> ForwardBackwardOutput:
            outputs: list[ForwardBackwardOutput] = []
            # The longest queue time and all device time; None when the server gives none.
            queue_s = device_s = None
            for result in results:
                outputs.append(result.value)
                if result.queue_s is not None:
                    queue_s = max(queue_s or 0.0, result.queue_s)
                if result.device_s is not None:
                    device_s = (device_s or 0.0) + result.device_s
            whole = combine(outputs)
            self._session.usage += charge(TimedResult(whole, queue_s, device_s), **{kind: tokens})
            return whole

        if place is not None:
            return self.queue.fill(place, requests, fold)
        return self.queue.take(requests, fold)

    @contextmanager
    def forward_then_backward(
        self, data: Sequence[Datum]
    ) -> Generator[tuple[APIFuture[ForwardBackwardOutput], Backward]]:
        """A forward pass, and the place right behind it for the backward pass it leads to.

        Calls made in between are sent after the backward pass, except those of the body itself,
        which would otherwise wait for themselves.
        """
        forward = self.run_pass(data, "cross_entropy", None, forward_only=True)
        place = self.queue.reserve()
        token = inside.set(place)
        try:
            yield (
                forward,
                lambda data: self.run_pass(
                    data, "cross_entropy", None, forward_only=False, place=place
                ),
            )
        finally:
            inside.reset(token)
            self.queue.give_up(place)

    def _pass_requests(
        self,
        batch: list[Datum],
        loss_fn: LossFnType,
        config: dict[str, float | str] | None,
        forward_only: bool,
    ) -> list[Outgoing]:
        kind: routes.RequestType = "Forward" if forward_only else "ForwardBackward"
        write = functools.partial(
            encode_forward_backward,
            model_id=self._model_id,
            loss_fn=loss_fn,
            loss_fn_config=config,
            forward_only=forward_only,
        )
        flags = self._api.client_config
        chunks = chunk(
            batch,
            max_datums=flags.fwdbwd_max_chunk_len,
            max_bytes=flags.fwdbwd_max_chunk_bytes_count,
        )
        if len(chunks) == 1:
            # Written now, which copies all that the caller may change, under the number that it
            # gets unless a call before it fails.
            expected = self.queue.expected_seq_id
            body = write(seq_id=expected, data=batch)
            encode = functools.partial(renumber_forward_backward, body, self._model_id, expected)
            return [Outgoing(routes.FORWARD_BACKWARD, kind, encode, chunks[0][1])]
        # Of a large batch only the chunks under way are written, from copies.
        return [
            Outgoing(
                routes.FORWARD_BACKWARD,
                kind,
                functools.partial(write, data=[copy_datum(datum, "Datum") for datum in part]),
                size_bytes,
            )
            for part, size_bytes in chunks
        ]

    def json_turn(
        self,
        route: routes.Route[Any, Any],
        make: Callable[[int], msgspec.Struct],
        convert: Callable[[Any], T] | None = None,
    ) -> APIFuture[T]:
        """One JSON request in its turn; it is tried once now, so bad input never takes a turn."""
        try:
            snapshot = copy.deepcopy(make(1))
            json_codec.encode(snapshot)
        except TinkerError as error:
            return self._operations.refuse(error)

        def fold(results: list[TimedResult]) -> T:
            self._session.usage += charge(results[0])
            value = results[0].value
            return value if convert is None else convert(value)

        def encode(seq_id: int) -> bytes:
            return json_codec.encode(replace(snapshot, seq_id=seq_id))

        assert route.request_type is not None
        request = Outgoing(route, route.request_type, encode)
        return self.queue.take([request], fold)


def vocabulary(tokenizer: object) -> int | None:
    """How many ids a tokenizer knows, added tokens included; None when it does not say."""
    try:
        return len(tokenizer)  # pyright: ignore[reportArgumentType] - not all of them can
    except TypeError:
        size = getattr(tokenizer, "vocab_size", None)
        return size if isinstance(size, int) else None


# -- sizes ------------------------------------------------------------------------------------


def chunk(
    data: Sequence[Datum], *, max_datums: int, max_bytes: int
) -> list[tuple[list[Datum], int]]:
    """Greedy runs of datums with their estimated bytes; an oversized datum stands alone."""
    chunks: list[tuple[list[Datum], int]] = []
    current: list[Datum] = []
    total = 0
    for datum in data:
        size = datum_bytes(datum)
        if current and (total + size > max_bytes or len(current) >= max_datums):
            chunks.append((current, total))
            current, total = [], 0
        current.append(datum)
        total += size
    chunks.append((current, total))
    return chunks


def datum_bytes(datum: Datum) -> int:
    """The protocol's estimate of a datum's uncompressed size."""
    total = input_bytes(datum.model_input, per_token=4)
    for tensor in datum.loss_fn_inputs.values():
        total += tensor.size_bytes
    return total
