"""Downloads behind signed links, which need no key: exports, archives, traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from tinkex.server.api.checkpoints import make_tar
from tinkex.server.api.errors import refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.server.api.call import Parts
    from tinkex.server.store.records import Operation


async def download(parts: Parts, token: str, name: str) -> Response:
    """What a signed link stands for."""
    claims = parts.identity.open_link(token)
    if claims["kind"] == "trace":
        return _bytes(trace(await parts.store.operations(claims["session"])), "application/json")
    files = await parts.engine.export_saved(claims["location"])
    if claims["kind"] == "archive":
        return _bytes(make_tar(files), "application/x-tar")
    if name not in files:
        raise refuse(404, "There is nothing to download here.")
    return _bytes(files[name], "application/octet-stream")


def _bytes(data: bytes, media_type: str) -> Response:
    return Response(data, media_type=media_type)


def trace(operations: Sequence[Operation]) -> bytes:
    """The operations of a session as a trace that Perfetto reads: queue, then compute."""
    events: list[dict[str, object]] = []
    for operation in operations:
        started, finished = operation.started_at, operation.finished_at
        lane = operation.model_id or operation.sampler_id or "session"
        spans = [("queue", operation.created_at, started or finished), ("run", started, finished)]
        events.extend(
            {
                "name": f"{operation.kind} {phase}",
                "cat": phase,
                "ph": "X",
                "ts": begin * 1e6,
                "dur": (end - begin) * 1e6,
                "pid": 1,
                "tid": lane,
                "args": {"request_id": operation.op_id, "seq_id": operation.seq_id},
            }
            for phase, begin, end in spans
            if begin is not None and end is not None
        )
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})
