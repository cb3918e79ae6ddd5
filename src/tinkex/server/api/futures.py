"""Results: one by one, as a stream of completions, and withdrawing what is not wanted.

A poll is held until there is a result. Delivering a result does not delete it: a client whose
connection broke asks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import anyio.to_thread
from starlette.responses import Response

from tinkex.errors import quoted
from tinkex.server.api.call import reply
from tinkex.server.api.errors import refuse
from tinkex.server.api.sampling import own_sampler
from tinkex.server.api.submit import check_program
from tinkex.server.observability.requests import request_record
from tinkex.server.store.ownership import claim_key
from tinkex.types import (
    FutureFailed,
    FutureFinished,
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
)
from tinkex.wire import results, routes
from tinkex.wire.bodies import CancelFutureRequest, ReleaseNumbersRequest
from tinkex.wire.json_codec import encode

if TYPE_CHECKING:
    from tinkex.server.api.call import Call
    from tinkex.server.store.records import Operation, OperationOutcome, OpKind
    from tinkex.types import FutureCompletion
    from tinkex.wire.routes import RequestType

# Our own clients read what a result used from this header; others ignore it.
USAGE_HEADER = "x-tinkex-usage"
# A client gives numbers up one call at a time, and a call has fewer chunks.
_MOST_RELEASED = 10_000
LOOP_BYTES = 256 << 10
"""Larger results are decoded and written as JSON in a thread, which takes many milliseconds."""

REQUEST_TYPES: dict[OpKind, RequestType] = {
    "create_model": "CreateModel",
    "load_weights": "LoadWeights",
    "forward": "Forward",
    "forward_backward": "ForwardBackward",
    "optim_step": "OptimStep",
    "save_weights": "SaveWeights",
    "save_weights_for_sampler": "SaveWeightsForSampler",
    "save_weights_external": "SaveWeightsExternal",
    "unload_model": "UnloadModel",
    "create_custom_loss": "CreateCustomLoss",
    "sample": "Sample",
}


def encode_value(kind: OpKind, value: object) -> bytes:
    """A result as it is stored: protobuf where the protocol has it, else JSON."""
    return results.encode_value(REQUEST_TYPES[kind], value)[1]


async def retrieve_future(call: Call) -> Response:
    """Wait for one result."""
    request = await call.json(FutureRetrieveRequest)

    async def look() -> Operation | None:
        operation = await _own_operation(call, request.request_id)
        request_record(call.request.scope).polled = (operation.session_id, operation.op_id)
        return operation if operation.state == "done" else None

    done = await call.parts.waiters.until(request.request_id, look, call.settings.long_poll_s)
    if done is None:
        return await _try_again(call, request.request_id)
    outcome = cast("OperationOutcome", done.outcome)
    headers = {USAGE_HEADER: encode(outcome.usage).decode()}
    if outcome.error is not None:
        failed = results.FailedResult(outcome.error, outcome.category)
        return _answer(done, failed, headers)
    if outcome.body is None:
        raise refuse(410, f"The result of {quoted(done.op_id)} is no longer kept.")
    large = outcome.size_bytes > call.settings.inline_result_bytes
    if large and request.allow_metadata_only:
        return _answer(done, results.MetadataOnly(outcome.size_bytes), headers)
    media, body = await _payload(done, outcome.body, call.header("accept"))
    return Response(body, media_type=media, headers=headers)


async def _own_operation(call: Call, op_id: str) -> Operation:
    operation = await call.store.get_operation(op_id)
    if operation is None or operation.state != "done":
        await _at_owner(call, op_id.rpartition(":")[0])
        if operation is None and call.parts.member is not None:
            operation = await call.store.get_operation(op_id)
    if operation is not None:
        if operation.owner != call.owner:
            raise refuse(404, f"There is no request {quoted(op_id)}.")
        if call.access.project_id is not None:
            await call.session(operation.session_id)
        return operation
    # A sampler or model that is still known had this request before a restart.
    source = op_id.rpartition(":")[0]
    holder = await call.store.get_sampler(source) or await call.store.get_model(source)
    if holder is not None and holder.owner == call.owner:
        raise refuse(410, f"Request {quoted(op_id)} was lost; send it again.")
    raise refuse(404, f"There is no request {quoted(op_id)}.")


async def _at_owner(call: Call, source: str) -> None:
    """Go on only at the owner of a model or sampler: it knows what has not ended."""
    if call.parts.member is not None:
        sampler = await call.store.get_sampler(source)
        await call.at_owner(source if sampler is None else claim_key(sampler))


async def _try_again(call: Call, op_id: str) -> Response:
    operation = await _own_operation(call, op_id)
    progress = await call.worker.progress(operation)
    state, reason = call.parts.limits.queue_state(operation)
    return reply(
        {
            "type": "try_again",
            "request_id": op_id,
            "queue_state": state,
            **({} if reason is None else {"queue_state_reason": reason}),
            # Beyond the protocol: where the operation stands, for clients that show it.
            "progress": {
                "state": progress.state,
                "position": progress.position,
                "since": progress.since,
            },
        }
    )


def _answer(operation: Operation, outcome: results.Outcome, headers: dict[str, str]) -> Response:
    media, body = results.encode_result(
        REQUEST_TYPES[operation.kind], outcome, request_id=operation.op_id
    )
    return Response(body, media_type=media, headers=headers)


async def _payload(operation: Operation, body: bytes, accept: str) -> tuple[str, bytes]:
    if REQUEST_TYPES[operation.kind] not in results.PROTOBUF_RESULTS:
        return routes.MEDIA_JSON, body
    if routes.MEDIA_PROTOBUF in accept.lower():
        return routes.MEDIA_PROTOBUF, body
    if len(body) <= LOOP_BYTES:
        return _converted(operation, body, accept)
    return await anyio.to_thread.run_sync(_converted, operation, body, accept)


def _converted(operation: Operation, body: bytes, accept: str) -> tuple[str, bytes]:
    """A result that is stored as protobuf, for a client that does not read that."""
    kind = REQUEST_TYPES[operation.kind]
    ready = results.decode_result(kind, routes.MEDIA_PROTOBUF, body, operation.sequence_ids)
    return results.encode_result(kind, ready, request_id=operation.op_id, accept=accept)


async def retrieve_futures(call: Call) -> Response:
    """Wait for completions of one sampling client after its cursor."""
    request = await call.json(FuturesRetrieveRequest)
    target = request.target
    sampler = await own_sampler(call, target.sampling_session_id)
    request_record(call.request.scope).polled = (sampler.session_id, sampler.sampler_id)
    await call.own(claim_key(sampler), sampler.base_model)
    await call.store.drop_results(
        [
            op_id
            for op_id in request.retrieved_request_ids
            if op_id.startswith(f"{sampler.sampler_id}:")
        ]
    )

    clone, lost = target.cloned_sampler_id, call.worker.lost
    gone = await lost.since(request.prev_cursor, sampler, clone)
    if gone:
        announced: list[FutureCompletion] = [FutureFailed(request_id=op_id) for op_id in gone]
        return reply(FuturesRetrieveResponse(completions=announced, cursor=lost.cursor(0, sampler)))

    async def look() -> FuturesRetrieveResponse | None:
        await call.at_owner(claim_key(sampler))
        ended, position = await call.store.completions(
            sampler.sampler_id, clone, lost.position(request.prev_cursor, sampler)
        )
        if not ended:
            return None
        completions = [_completion(operation) for operation in ended]
        return FuturesRetrieveResponse(
            completions=completions, cursor=lost.cursor(position, sampler)
        )

    timeout_s = call.settings.long_poll_s
    if request.timeout is not None:
        timeout_s = min(timeout_s, request.timeout)
    found = await call.parts.waiters.until((sampler.sampler_id, clone), look, timeout_s)
    return reply(found or FuturesRetrieveResponse(completions=[], cursor=request.prev_cursor))


def _completion(operation: Operation) -> FutureCompletion:
    outcome = operation.outcome
    if outcome is None or outcome.error is not None:
        return FutureFailed(request_id=operation.op_id)
    return FutureFinished(
        request_id=operation.op_id, response_payload_uncompressed_size=outcome.size_bytes
    )


async def cancel_future(call: Call) -> Response:
    """Stop a sample, or withdraw a training operation that has not started.

    Always a success: what has run, or runs and cannot be stopped, keeps its result.
    """
    request = await call.json(CancelFutureRequest)
    operation = await _own_operation(call, request.request_id)
    cancelled = operation.state != "done" and await call.worker.cancel(operation)
    return reply({"cancelled": cancelled})


async def release_numbers(call: Call) -> Response:
    """Let a model continue without requests that their client has given up.

    What has arrived all the same is withdrawn unless it has started.
    """
    request = await call.json(ReleaseNumbersRequest)
    model = await call.model(request.model_id)
    check_program(call, model)
    await call.own(model.model_id, model.base_model)
    for seq_id in request.seq_ids[:_MOST_RELEASED]:
        operation = await call.store.get_operation(f"{model.model_id}:{seq_id}")
        if operation is None:
            call.worker.give_turn_back(model.model_id, seq_id)
        elif operation.state != "done":
            await call.worker.cancel(operation)
    return reply()
