"""Accepting work: a request becomes an operation, the operation's id the future.

A training request that can be told apart but not understood is accepted too and fails
when its turn comes: refusing it would leave a hole in its model's order, and official
clients stop for ever when one chunk of a call is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tinkex.server.api.call import reply
from tinkex.server.store.records import Operation
from tinkex.types import UntypedAPIFuture

if TYPE_CHECKING:
    from starlette.responses import Response

    from tinkex.server.api.call import Call
    from tinkex.server.store.records import OpKind


def accepted(operation: Operation) -> Response:
    """The answer to every accepted request."""
    sequence_ids = list(operation.sequence_ids) if operation.kind == "sample" else None
    return reply(
        UntypedAPIFuture(
            request_id=operation.op_id,
            model_id=operation.model_id,
            sample_sequence_ids=sequence_ids,
        )
    )


async def submit_training(
    call: Call, kind: OpKind, model_id: str, seq_id: int | None, request: object
) -> Response:
    """Queue an operation of a model; one with a known seq_id is answered by the first.

    Clients that do not number their requests are ordered by arrival and recognised by
    their idempotency key.
    """
    model = await call.model(model_id)
    key = call.header("x-idempotency-key")
    if seq_id is None:
        known = await call.store.recall(call.owner, key) if key else None
        if known is not None:
            first = await call.store.get_operation(known)
            if first is not None:
                return accepted(first)
        seq_id = call.worker.next_seq(model_id)
        if key:
            await call.store.remember(call.owner, key, f"{model_id}:{seq_id}")
    op_id = f"{model_id}:{seq_id}"
    if await call.store.get_operation(op_id) is None:
        await call.live_session(model.session_id)
    now = call.now()
    await call.store.put_model(replace(model, last_request_at=now))
    operation = Operation(
        op_id=op_id,
        kind=kind,
        owner=call.owner,
        session_id=model.session_id,
        created_at=now,
        request=request,
        seq_id=seq_id,
        model_id=model_id,
    )
    return accepted(await call.worker.submit(operation))
