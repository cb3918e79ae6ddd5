"""The trace of a session is what Perfetto's importer of Chrome traces wants to read."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tinkex.server.api.trace import merged, trace
from tinkex.server.observability.requests import Poll, Polls
from tinkex.server.store.records import Operation, OperationOutcome
from tinkex.testing.fake_engine import Delays

from .conftest import Api

if TYPE_CHECKING:
    from .conftest import Start

pytestmark = pytest.mark.anyio


def check(body: bytes) -> list[dict[str, Any]]:
    """The rules of the format; gives the slices, each with the names of its process and thread."""
    document = msgspec.json.decode(body)
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    names: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert type(event["ts"]) is int
        assert isinstance(event["name"], str)
        if event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in names
            names[event["pid"], event["tid"]] = event["args"]["name"]
        if event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in slices:
        assert type(event["dur"]) is int
        assert event["dur"] >= 0
        assert event["cat"] == processes[event["pid"]]
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
    assert set(rows) == set(names)
    for row in rows.values():
        for one, two in pairwise(row):
            assert one["ts"] + one["dur"] <= two["ts"]
    return [{**event, "lane": names[event["pid"], event["tid"]]} for event in slices]


async def download(api: Api, session: str) -> bytes:
    export = await api.get(f"/sessions/{session}/trace_export")
    assert export["status"] == "ready"
    reply = await Api(api.server, api.clock, key="").call(
        "GET", export["url"].split("/api/v1", 1)[1]
    )
    assert reply.status == 200
    return reply.body


async def test_a_session_s_trace_shows_queue_compute_and_polls_of_its_operations(
    start: Start,
) -> None:
    async with start(delays=Delays(train_s=2.0), long_poll_s=1.5) as api:
        session = await api.session()
        model = await api.model(session)
        await api.result(await api.train(model, 1))
        slices = check(await download(api, session))
        assert {(s["cat"], s["name"], s["lane"]) for s in slices} == {
            ("queue", "create_model", model),
            ("compute", "create_model", model),
            ("queue", "forward_backward", model),
            ("compute", "forward_backward", model),
            ("poll", "poll", model),
        }
        (compute,) = [s for s in slices if (s["cat"], s["name"]) == ("compute", "forward_backward")]
        assert compute["dur"] == pytest.approx(2e6, abs=10)
        polls = [s for s in slices if s["cat"] == "poll"]
        assert [p["dur"] for p in polls[-2:]] == pytest.approx([1.5e6, 0.5e6], abs=10)
        assert all(p["args"]["status"] == 200 for p in polls)


async def test_another_session_s_polls_and_operations_are_not_in_it(api: Api) -> None:
    session, other = await api.session(), await api.session()
    model = await api.model(session)
    await api.result(await api.train(model, 1))
    assert check(await download(api, other)) == []


def operation(number: int, created: float, started: float | None, finished: float | None):
    return Operation(
        op_id=f"s:sample:0:{number}",
        kind="sample",
        owner="o",
        session_id="s",
        created_at=created,
        started_at=started,
        finished_at=finished,
        sampler_id="s:sample:0",
        seq_id=number,
        outcome=None if finished is None else OperationOutcome(error="x", category="user"),
    )


def test_operations_that_overlap_lie_on_as_many_rows_as_ran_at_once() -> None:
    body = trace(
        [operation(0, 0, 1, 5), operation(1, 0, 2, 4), operation(2, 0, 4.5, 6)],
        [Poll("s", "s:sample:0:0", 0, 5, 200), Poll("s", "s:sample:0", 1, 2, 200)],
    )
    slices = check(body)
    lanes = [(s["lane"], s["args"]["seq_id"]) for s in slices if s["cat"] == "compute"]
    assert lanes == [("s:sample:0", 0), ("s:sample:0 (2)", 1), ("s:sample:0 (2)", 2)]
    assert len({s["tid"] for s in slices if s["cat"] == "queue"}) == 3
    assert {s["args"]["error"] for s in slices if s["cat"] != "poll"} == {"user"}


def test_what_waits_or_runs_has_no_slice_yet_and_what_never_ran_only_waited() -> None:
    body = trace([operation(0, 0, None, None), operation(1, 0, 2, None), operation(2, 0, None, 3)])
    assert [(s["cat"], s["args"]["seq_id"]) for s in check(body)] == [("queue", 1), ("queue", 2)]


def test_only_the_latest_polls_are_kept() -> None:
    polls = Polls(kept=2)
    for number in range(4):
        polls.add(Poll("s" if number else "t", str(number), 0, 1, 200))
    assert [poll.target for poll in polls.of("s")] == ["2", "3"]
    assert polls.of("t") == []


def test_traces_of_several_nodes_are_one() -> None:
    def op(name: str, model: str, began: float) -> Operation:
        return Operation(
            op_id=name,
            kind="optim_step",
            owner="o",
            session_id="s",
            created_at=began,
            model_id=model,
            state="done",
            started_at=began + 0.5,
            finished_at=began + 2.0,
        )

    # Two that overlap on one model, which all nodes know, and one more on each of two nodes.
    stored = [op("one", "m", 1.0), op("two", "m", 1.25)]
    here = trace([*stored, op("three", "n", 3.0)])
    there = trace([op("four", "m", 1.125), *stored])
    found = check(merged([here, there]))
    assert sorted(each["args"]["request_id"] for each in found if each["cat"] == "compute") == [
        "four",
        "one",
        "three",
        "two",
    ]
    assert len(found) == 8
    assert sorted(msgspec.json.decode(merged([here]))["traceEvents"], key=str) == sorted(
        msgspec.json.decode(here)["traceEvents"], key=str
    )
