"""Usage and audit: tokens, device seconds and storage per hour, never money."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, date, datetime, time, timedelta
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from tinkex.errors import quoted
from tinkex.server.api.call import reply
from tinkex.server.api.errors import refuse
from tinkex.server.api.sessions import when
from tinkex.server.store.records import HOUR_S
from tinkex.types import (
    AuditLogEntry,
    AuditLogResponse,
    BillingUsageEvent,
    BillingUsageSession,
    CheckpointBillingEvent,
    CurrentCheckpointStorageUsageItem,
    CurrentCheckpointStorageUsageResponse,
    SamplingPrefillBillingEvent,
    SamplingSampleBillingEvent,
    StorageBillingEvent,
    TrainingBillingEvent,
)
from tinkex.types.bounds import LISTED_RECORDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from starlette.responses import Response

    from tinkex.server.api.call import Call
    from tinkex.server.store.records import HourOfUsage, StoredCheckpoint
    from tinkex.types import BillingEventInfo

MOST_AUDITED = 10_000
"""Entries of the audit log in one answer."""

_LONGEST = timedelta(days=14)
_TOPICS = ("all", "checkpoints", "projects", "teams", "organizations")


class MeasuredUsageEvent(BillingUsageEvent):
    """Usage with what it cost here, which the protocol has no member for; clients skip it."""

    device_seconds: float | None = None


class MeasuredStorageUsage(CurrentCheckpointStorageUsageResponse):
    """Stored checkpoints with all that counts towards the quota; clients skip what is new."""

    kept_bytes: dict[str, int]
    max_stored_bytes: int


async def get_billing_usage(call: Call) -> Response:
    """Tokens, device time and storage per hour and kind; this server knows no prices."""
    start, end = _hour(call, "starting_on"), _hour(call, "ending_before")
    if not timedelta(0) < end - start <= _LONGEST:
        raise refuse(400, "ending_before must follow starting_on by 14 days at most.")
    hours = await call.store.usage(call.owner, start.timestamp(), end.timestamp())
    checkpoints = await _all_checkpoints(call)
    events = [*_events(hours, call.owner), *_storage_events(call, checkpoints, start, end)]
    sessions: dict[str, BillingUsageSession] = {}
    for session_id in {hour.session_id for hour in hours}:
        session = await call.store.get_session(session_id)
        if session is not None:
            metadata = dict(session.user_metadata)
            sessions[session_id] = BillingUsageSession(user_metadata=metadata)
    return reply({"data": events, "sessions": sessions})


async def _all_checkpoints(call: Call) -> list[StoredCheckpoint]:
    """What is stored now, read in parts: other requests come in between."""
    found: list[StoredCheckpoint] = []
    now = call.now()
    while True:
        part = await call.store.checkpoints(
            owner=call.owner, live_at=now, offset=len(found), limit=LISTED_RECORDS
        )
        found.extend(part)
        if len(part) < LISTED_RECORDS:
            return found


def _storage_events(
    call: Call, checkpoints: Iterable[StoredCheckpoint], start: datetime, end: datetime
) -> Iterator[MeasuredUsageEvent]:
    times = start.timestamp(), end.timestamp(), call.now()
    for stored in sorted(stored_hours(checkpoints, *times), key=lambda s: s.hour):
        yield MeasuredUsageEvent(
            bucket_start=when(stored.hour),
            bucket_end=when(stored.hour + HOUR_S),
            base_model=stored.base_model,
            user_id=call.owner,
            project_id=stored.project_id,
            event_info=StorageBillingEvent(gigabyte_hours=stored.gigabyte_hours),
        )


def _hour(call: Call, name: str) -> datetime:
    text = call.request.query_params.get(name, "")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise refuse(400, f"{name} must be a time such as 2026-01-31T12:00:00Z.") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    if moment.timestamp() % HOUR_S:
        raise refuse(400, f"{name} must be a full hour, not {quoted(text)}.")
    return moment


def _events(hours: Iterable[HourOfUsage], owner: str) -> Iterator[MeasuredUsageEvent]:
    sums: dict[tuple[int, str, str | None, str | None, str], int] = defaultdict(int)
    device_s: dict[tuple[int, str, str | None, str | None, str], float] = defaultdict(float)
    for each in hours:
        place = each.hour, each.session_id, each.base_model, each.project_id
        for kind, amount in _amounts(each):
            sums[*place, kind] += amount
        # An operation has one device time; a sample's goes with what it generated.
        device_s[*place, "sample" if each.kind == "sample" else "training"] += (
            each.usage.device_s or 0.0
        )
    for key, amount in sorted(sums.items(), key=lambda item: (item[0][0], item[0][1], item[0][4])):
        hour, session_id, base_model, project_id, kind = key
        yield MeasuredUsageEvent(
            bucket_start=when(hour),
            bucket_end=when(hour + HOUR_S),
            base_model=base_model,
            user_id=owner,
            session_id=session_id,
            project_id=project_id,
            event_info=_info(kind, amount),
            device_seconds=device_s.get(key),
        )


def _amounts(hour: HourOfUsage) -> list[tuple[str, int]]:
    usage = hour.usage
    # The forward pass of a training run counts as training, although it changes no weights.
    forward = usage.prompt_tokens if hour.kind == "forward" else 0
    amounts = [
        ("training", usage.trained_tokens + forward),
        ("prefill", usage.prompt_tokens - usage.cached_tokens - forward),
        ("prefill_cached", usage.cached_tokens),
        ("sample", usage.generated_tokens),
        ("checkpoint", hour.count if hour.kind.startswith("save_weights") else 0),
    ]
    return [(kind, amount) for kind, amount in amounts if amount > 0]


def _info(kind: str, amount: int) -> BillingEventInfo:
    match kind:
        case "training":
            return TrainingBillingEvent(token_count=amount)
        case "prefill" | "prefill_cached":
            cached = kind == "prefill_cached"
            return SamplingPrefillBillingEvent(cached=cached, token_count=amount)
        case "sample":
            return SamplingSampleBillingEvent(token_count=amount)
        case _:
            return CheckpointBillingEvent(count=amount)


async def get_checkpoint_storage_usage(call: Call) -> Response:
    """Stored bytes per project, and of everything that is kept for the tenant, by part."""
    project = call.request.query_params.get("project_id")
    found = await call.store.stored_by_project(call.owner, live_at=call.now(), project_id=project)
    items = [
        CurrentCheckpointStorageUsageItem(
            project_id=project_id,
            org_user_urn=call.owner,
            checkpoint_count=stored.count,
            size_bytes=stored.size_bytes,
            size_gigabytes=stored.size_bytes / 1e9,
        )
        for project_id, stored in found.items()
    ]
    kept: dict[str, int] = {**await call.worker.room.used(call.owner)}
    most = call.settings.max_stored_bytes
    return reply(MeasuredStorageUsage(data=items, kept_bytes=kept, max_stored_bytes=most))


async def get_audit_log(call: Call) -> Response:
    """What happened to the caller's things, by topic and day; of all days only the newest."""
    topic = call.request.query_params.get("event_type", "all")
    if topic not in _TOPICS:
        raise refuse(400, f"event_type must be one of {', '.join(_TOPICS)}, not {quoted(topic)}.")
    start, end = _day(call.request.query_params.get("day"))
    log = await call.store.audit_log(
        call.owner,
        topic=None if topic == "all" else topic,
        start=start,
        end=end,
        limit=MOST_AUDITED,
    )
    entries = [
        AuditLogEntry(
            timestamp=when(entry.at),
            event=entry.event,
            event_details=dict(entry.details),
            model_id=_text(entry.details.get("model_id")),
            tinker_path=_text(entry.details.get("tinker_path")),
        )
        for entry in log
    ]
    return reply(AuditLogResponse(entries=entries))


def _day(text: str | None) -> tuple[float | None, float | None]:
    """When a day begins and ends."""
    if text is None:
        return None, None
    try:
        day = datetime.combine(date.fromisoformat(text), time(), UTC)
    except ValueError:
        raise refuse(400, f"day must be a date such as 2026-01-31, not {quoted(text)}.") from None
    return day.timestamp(), day.timestamp() + timedelta(days=1).total_seconds()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


class Stored(NamedTuple):
    """Gigabyte-hours of one hour, base model and project."""

    hour: int
    base_model: str
    project_id: str | None
    gigabyte_hours: float


def stored_hours(
    checkpoints: Iterable[StoredCheckpoint], start: float, end: float, now: float
) -> list[Stored]:
    """What was stored in every hour from `start` to `end`, which are full hours.

    Only checkpoints that still exist count; what a deleted one took is not known any more.
    """
    count = int((end - start) // HOUR_S)
    # Per group: bytes times parts of hours, and by how much what fills whole hours changes.
    groups: dict[tuple[str, str | None], tuple[list[float], list[int]]] = {}
    for checkpoint in checkpoints:
        gone = now if checkpoint.expires_at is None else min(now, checkpoint.expires_at)
        begin_h = (max(checkpoint.created_at, start) - start) / HOUR_S
        end_h = (min(gone, end) - start) / HOUR_S
        if begin_h < end_h:
            key = (checkpoint.base_model, checkpoint.project_id)
            parts, changes = groups.setdefault(key, ([0.0] * count, [0] * (count + 1)))
            _add(parts, changes, checkpoint.size_bytes, begin_h, end_h)
    return [
        Stored(int(start) + hour * HOUR_S, model, project, amount / 1e9)
        for (model, project), (parts, changes) in groups.items()
        for hour, amount in enumerate(map(add, parts, accumulate(changes)))
        if amount > 0
    ]


def _add(parts: list[float], changes: list[int], size: int, begin_h: float, end_h: float) -> None:
    first, last = int(begin_h), int(end_h)
    if first == last:
        parts[first] += size * (end_h - begin_h)
        return
    parts[first] += size * (first + 1 - begin_h)
    if last < len(parts):
        parts[last] += size * (end_h - last)
    changes[first + 1] += size
    changes[last] -= size
