"""A session as a trace that Perfetto and chrome://tracing open: queue, compute and polls.

One process per phase, one thread per row. Slices of one thread must nest, so operations that
overlap are spread over as many rows as ran at once. The format: ts and dur in microseconds, pid
and tid whole numbers, names in metadata events.
"""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tinkex.server.observability.requests import Poll
    from tinkex.server.store.records import Operation

_Phase = Literal["queue", "compute", "poll"]
# What the second and later rows of a lane add to its name.
_ROW = re.compile(r" \(\d+\)$")
_PIDS: dict[_Phase, int] = {"queue": 1, "compute": 2, "poll": 3}


@dataclass(frozen=True, slots=True)
class _Slice:
    phase: _Phase
    lane: str
    name: str
    begin: float
    end: float
    args: dict[str, Any] = field(default_factory=dict[str, Any])


def trace(operations: Sequence[Operation], polls: Iterable[Poll] = ()) -> bytes:
    """The trace of one session as JSON."""
    lanes = {op.op_id: _lane(op) for op in operations}
    slices = [piece for op in operations for piece in _slices(op)]
    slices += [
        _Slice(
            "poll",
            lanes.get(poll.target, poll.target),
            "poll",
            poll.began_at,
            poll.ended_at,
            {"target": poll.target, "status": poll.status},
        )
        for poll in polls
    ]
    return _encoded(slices)


def merged(traces: Iterable[bytes]) -> bytes:
    """The traces of one session by several nodes as one; what several of them have is in it once.

    Every node has the operations that are stored, and its own samples and polls.
    """
    slices: dict[bytes, _Slice] = {}
    for text in traces:
        events: list[dict[str, Any]] = msgspec.json.decode(text)["traceEvents"]
        lanes = {
            (event["pid"], event["tid"]): _ROW.sub("", event["args"]["name"])
            for event in events
            if event["name"] == "thread_name"
        }
        for event in events:
            if event["ph"] == "X":
                piece = _Slice(
                    event["cat"],
                    lanes[event["pid"], event["tid"]],
                    event["name"],
                    event["ts"] / 1e6,
                    (event["ts"] + event["dur"]) / 1e6,
                    event["args"],
                )
                slices[msgspec.json.encode(piece)] = piece
    return _encoded(slices.values())


def _encoded(slices: Iterable[_Slice]) -> bytes:
    events = [*_process_names(), *_events(slices)]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _lane(op: Operation) -> str:
    return op.model_id or op.sampler_id or "session"


def _slices(op: Operation) -> Iterator[_Slice]:
    """What has happened so far; an operation that waits or runs has no end yet and no slice."""
    args: dict[str, Any] = {"request_id": op.op_id, "seq_id": op.seq_id}
    if op.outcome is not None and op.outcome.error is not None:
        args["error"] = op.outcome.category
    begun = op.started_at if op.started_at is not None else op.finished_at
    if begun is not None:
        yield _Slice("queue", _lane(op), op.kind, op.created_at, begun, args)
    if op.started_at is not None and op.finished_at is not None:
        yield _Slice("compute", _lane(op), op.kind, op.started_at, op.finished_at, args)


def _process_names() -> Iterator[dict[str, Any]]:
    for phase, pid in _PIDS.items():
        yield _metadata("process_name", pid, 0, name=phase)
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)


def _events(slices: Iterable[_Slice]) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[_Phase, str], list[_Slice]] = {}
    for piece in slices:
        groups.setdefault((piece.phase, piece.lane), []).append(piece)
    tids = count(1)
    for (phase, lane), pieces in groups.items():
        for number, row in enumerate(_rows(pieces)):
            pid, tid = _PIDS[phase], next(tids)
            yield _metadata(
                "thread_name", pid, tid, name=f"{lane} ({number + 1})" if number else lane
            )
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
            for piece in row:
                yield _complete(piece, pid, tid)


def _rows(pieces: Iterable[_Slice]) -> list[list[_Slice]]:
    """As few rows as possible, in each of which one slice ends before the next begins."""
    rows: list[list[_Slice]] = []
    free: list[tuple[float, int]] = []
    for piece in sorted(pieces, key=lambda p: (p.begin, p.end)):
        if free and free[0][0] <= piece.begin:
            row = heapq.heappop(free)[1]
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(piece)
        heapq.heappush(free, (max(piece.end, piece.begin), row))
    return rows


def _complete(piece: _Slice, pid: int, tid: int) -> dict[str, Any]:
    begin, end = _us(piece.begin), _us(max(piece.end, piece.begin))
    return {
        "name": piece.name,
        "cat": piece.phase,
        "ph": "X",
        "ts": begin,
        "dur": end - begin,
        "pid": pid,
        "tid": tid,
        "args": piece.args,
    }


def _metadata(event: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": event, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
