"""Turns the calls of a training client into requests: checks, chunks, encodings, usage."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from tinkex.clients.notices import QueueNotices
from tinkex.clients.training_queue import Outgoing, TrainingQueue, inside
from tinkex.errors import ResultError, TinkerError
from tinkex.futures.results import Result, charge, combine
from tinkex.types import DmelChunk, EncodedTextChunk, ImageChunk
from tinkex.types.datum import copy_datum
from tinkex.types.training import batch_to_send, loss_config
from tinkex.wire import json_codec, proto_codec, routes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    import msgspec

    from tinkex.clients.operations import Operations
    from tinkex.clients.session import Session
    from tinkex.clients.training_queue import QueuedCall
    from tinkex.futures.future import APIFuture
    from tinkex.types import Datum, ForwardBackwardOutput, LossFnType, ModelInput

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
        self._session = session
        self._operations = operations
        self._model_id = model_id
        # Known once the tokenizer has been loaded.
        self.vocab_size: int | None = None
        notices = QueueNotices(
            f"training run {model_id}", session.clock, on_queue_state_change, session.telemetry
        )
        self.queue = TrainingQueue(session, operations, notices, model_id, attached_at)

    def refuse(self, error: TinkerError) -> APIFuture[Any]:
        """A future that has failed already: errors have one way out."""
        promise = self._operations.promise()
        promise.fail(error)
        return promise.future

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
            return self.refuse(error)
        tokens = sum(text_tokens(datum.model_input) for datum in batch)
        kind = "prompt_tokens" if forward_only else "trained_tokens"

        def fold(results: list[Result]) -> ForwardBackwardOutput:
            whole = combine([result.value for result in results])
            self._session.add_usage(charge(_total(results), whole, **{kind: tokens}))
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
        flags = self._session.api.client_config
        chunks = chunk(
            batch,
            max_datums=flags.fwdbwd_max_chunk_len,
            max_bytes=flags.fwdbwd_max_chunk_bytes_count,
        )

        def request(part: list[Datum], size_bytes: int) -> Outgoing:
            # One request is written down at once, which copies all that the caller may change. Of
            # a large batch only the chunks under way are written, from copies.
            whole = len(chunks) == 1
            part = part if whole else [copy_datum(datum, "Datum") for datum in part]

            def write(seq_id: int) -> bytes:
                return proto_codec.encode_forward_backward(
                    model_id=self._model_id,
                    seq_id=seq_id,
                    data=part,
                    loss_fn=loss_fn,
                    loss_fn_config=config,
                    forward_only=forward_only,
                )

            # The number that it gets unless a call before it fails.
            expected = self.queue.expected_seq_id
            written = write(expected) if whole else b""

            def encode(seq_id: int) -> bytes:
                if not whole:
                    return write(seq_id)
                if seq_id == expected:
                    return written
                return proto_codec.renumber_forward_backward(
                    written, self._model_id, expected, seq_id
                )

            kind: routes.RequestType = "Forward" if forward_only else "ForwardBackward"
            return Outgoing(routes.FORWARD_BACKWARD, kind, encode, size_bytes)

        return [request(part, size) for part, size in chunks]

    def json_turn(
        self,
        route: routes.Route[Any, Any],
        make: Callable[[int], msgspec.Struct],
        convert: Callable[[Any], T],
    ) -> APIFuture[T]:
        """One JSON request in its turn; it is tried once now, so bad input never takes a turn."""
        try:
            snapshot = copy.deepcopy(make(1))
            json_codec.encode(snapshot)
        except TinkerError as error:
            return self.refuse(error)

        def fold(results: list[Result]) -> T:
            value = results[0].value
            self._session.add_usage(charge(results[0], value))
            return convert(value)

        assert route.request_type is not None
        request = Outgoing(
            route,
            route.request_type,
            lambda seq_id: json_codec.encode(replace(snapshot, seq_id=seq_id)),
        )
        return self.queue.take([request], fold)


def vocabulary(tokenizer: object) -> int | None:
    """How many ids a tokenizer knows, added tokens included; None when it does not say."""
    try:
        return len(tokenizer)  # pyright: ignore[reportArgumentType] - not all of them can
    except TypeError:
        size = getattr(tokenizer, "vocab_size", None)
        return size if isinstance(size, int) else None


def given(value: T | None, field: str, answer: str) -> T:
    """`value`, which the protocol says must be there."""
    if value is None:
        raise ResultError(f"the server's answer to {answer} lacks {field}")
    return value


def _total(results: list[Result]) -> Result:
    """The longest queue time and all device time of several results; None when not known."""
    queue = [result.queue_s for result in results if result.queue_s is not None]
    device = [result.device_s for result in results if result.device_s is not None]
    return Result(None, max(queue, default=None), sum(device) if device else None)


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
    tensors = sum(tensor.size_bytes for tensor in datum.loss_fn_inputs.values())
    return input_bytes(datum.model_input, per_token=4) + tensors


def input_bytes(model_input: ModelInput, *, per_token: int) -> int:
    """The protocol's estimate of an input's size, at so many bytes for each text token."""
    total = 0
    for part in model_input.chunks:
        if isinstance(part, EncodedTextChunk):
            total += per_token * len(part.tokens)
        elif isinstance(part, ImageChunk):
            total += len(part.data)
        elif isinstance(part, DmelChunk):
            total += len(part.dmel)
        else:
            total += len(part.location)
    return total


def text_tokens(model_input: ModelInput) -> int:
    """How many tokens of text there are; pictures and sound are counted by the server."""
    return sum(
        len(part.tokens) for part in model_input.chunks if isinstance(part, EncodedTextChunk)
    )
