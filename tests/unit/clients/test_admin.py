"""AdminClient: windows of usage, the audit log, storage."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest
from rest_fakes import Script

from tinkex.clients.admin import AdminClient
from tinkex.clients.portal import CurrentLoop
from tinkex.errors import InputError, InputTypeError
from tinkex.futures.future import APIFuture

EVENT = {
    "bucket_start": "2026-01-01T00:00:00Z",
    "bucket_end": "2026-01-01T01:00:00Z",
    "session_id": "session-1",
    "event_info": {"type": "sampling_prefill", "cached": True, "token_count": 3},
}
ANSWERS = {
    "GET /audit": {"entries": [{"timestamp": "2026-01-01T00:00:00Z", "event": "checkpoint.new"}]},
    "GET /billing/usage/events": {"data": [EVENT]},
    "GET /billing/usage/checkpoints/current": {
        "data": [{"checkpoint_count": 1, "size_bytes": 2, "size_gigabytes": 0.5}]
    },
}
START = datetime(2026, 1, 1, tzinfo=UTC)


def ask(name: str, *args: Any) -> tuple[list[Any], Script]:
    """Call both colours; the two ends, errors included."""
    script = Script(dict(ANSWERS))

    async def both() -> list[Any]:
        admin = AdminClient(script.connection(portal=CurrentLoop()))
        future = getattr(admin, name)(*args)
        assert isinstance(future, APIFuture)
        return await asyncio.gather(
            future, getattr(admin, f"{name}_async")(*args), return_exceptions=True
        )

    return asyncio.run(both()), script


@pytest.mark.parametrize(
    ("args", "query"),
    [
        ((), {"event_type": "all"}),
        (("teams", date(2026, 1, 2)), {"event_type": "teams", "day": "2026-01-02"}),
    ],
)
def test_the_audit_log_is_asked_for_by_kind_and_day(args: tuple[Any, ...], query: dict[str, str]):
    (first, second), script = ask("get_audit_log", *args)
    assert first == second
    assert first.entries[0].event == "checkpoint.new"
    assert [asked.query for asked in script.asked] == [query, query]
    assert {asked.headers["x-sdk-method"] for asked in script.asked} == {"get_audit_log"}


@pytest.mark.parametrize(
    ("start", "end", "query"),
    [
        (START, START + timedelta(days=14), ("2026-01-01T00:00:00Z", "2026-01-15T00:00:00Z")),
        ("2026-01-01T00:00:00Z", "2026-01-01T05:00:00+02:00", None),
        # Without a zone: UTC.
        (datetime(2026, 1, 1), "2026-01-02", ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")),
        # A full hour in UTC need not be one on the caller's wall.
        (
            START,
            datetime(2026, 1, 1, 5, 30, tzinfo=timezone(timedelta(hours=5, minutes=30)))
            + timedelta(hours=1),
            ("2026-01-01T00:00:00Z", "2026-01-01T06:30:00+05:30"),
        ),
    ],
)
def test_a_window_of_full_hours_is_sent_as_rfc_3339(start: Any, end: Any, query: Any):
    (first, second), script = ask("get_billing_usage", start, end)
    assert first == second
    assert first.data[0].event_info.token_count == 3
    starting_on, ending_before = query or (start, end)
    sent = {"starting_on": starting_on, "ending_before": ending_before}
    assert [asked.query for asked in script.asked] == [sent, sent]


@pytest.mark.parametrize(
    ("name", "args", "kind", "path"),
    [
        ("get_audit_log", ("everything",), InputError, "event_type"),
        ("get_audit_log", ("all", "2026-01-02"), InputTypeError, "day"),
        ("get_audit_log", ("all", START), InputTypeError, "day"),
        ("get_billing_usage", ("2026-01-01T00:30:00Z", START), InputError, "starting_on"),
        ("get_billing_usage", (START, "2026-01-01T01:00:00+05:30"), InputError, "ending_before"),
        ("get_billing_usage", ("yesterday", START), InputError, "starting_on"),
        ("get_billing_usage", (None, START), InputTypeError, "starting_on"),
        ("get_billing_usage", ("", START), InputError, "starting_on"),
        ("get_billing_usage", (START, START), InputError, "ending_before"),
        ("get_billing_usage", (START, START - timedelta(hours=1)), InputError, "ending_before"),
        (
            "get_billing_usage",
            (START, START + timedelta(days=14, hours=1)),
            InputError,
            "ending_before",
        ),
        ("get_current_checkpoint_storage_usage", ("",), InputError, "project_id"),
    ],
)
def test_bad_arguments_come_out_of_the_future_and_send_nothing(
    name: str, args: tuple[Any, ...], kind: type[InputError], path: str
):
    ends, script = ask(name, *args)
    assert [type(error) for error in ends] == [kind, kind]
    assert [error.path for error in ends] == [path, path]
    assert script.asked == []


def test_storage_is_asked_for_by_project():
    (first, _), script = ask("get_current_checkpoint_storage_usage", "project-1")
    assert first.data[0].size_bytes == 2
    assert script.asked[0].query == {"project_id": "project-1"}
