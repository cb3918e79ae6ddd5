"""The status of training runs: from their folders here, else from their sessions on the server.

A run's folder is the better source: the training program writes it. The server knows whether the
session of a run is open, and how it ended. Where neither knows, the status is "unknown".
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tinkex.errors import APIStatusError, ExperimentalWarning
from tinkex.tracking.run_info import RUN, read_run
from tinkex.types import ClientSessionFinished, SessionSearchRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinkex.clients.rest import RestClient
    from tinkex.types import SessionStatus, SessionSummary, TrainingRun

Status = Literal["running", "finished", "interrupted", "failed", "unknown"]

_RUNS = Path("runs")
# Newest sessions come first; the session of another user's run is on no page.
_PAGE, _PAGES = 200, 5
_BY_REASON: dict[str, Status] = {
    "success": "finished",
    "errored": "failed",
    "interrupted": "interrupted",
}
# The server ends a session whose program has gone, or whose owner cancels it.
_BY_TYPE: dict[str, Status] = {"active": "running", "cancelled": "interrupted", "failed": "failed"}


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run; `folder` is its folder on this machine, if there is one."""

    status: Status
    folder: Path | None = None


def statuses_of(rest: RestClient, runs: Sequence[TrainingRun]) -> dict[str, RunStatus]:
    """The state of each run, by its id."""
    known = in_folders(_RUNS)
    sessions: dict[str, SessionStatus] = {}
    asked = {run.training_run_id for run in runs if not run.corrupted} - known.keys()
    if asked:
        sessions = _sessions(rest, {_session_of(run_id) for run_id in asked})
    return {run.training_run_id: _state(run, known, sessions) for run in runs}


async def status_of(rest: RestClient, run_id: str) -> Status:
    """The status of one run, from its folder here or from its session."""
    here = in_folders(_RUNS).get(run_id)
    if here is not None:
        return here.status
    session_id = _session_of(run_id)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            page = await rest.search_sessions_async(SessionSearchRequest(session_id=session_id))
    except APIStatusError:  # a server without the route
        return "unknown"
    found = [one.status for one in page.sessions if one.session_id == session_id]
    return _by_session(found[0] if found else None)


def in_folders(place: Path) -> dict[str, RunStatus]:
    """The runs that have a folder inside `place`."""
    found: dict[str, RunStatus] = {}
    for folder in sorted(place.glob("*")):
        *earlier, last = _model_ids(folder) or [""]
        # Each time a run is resumed it gets another id on the server.
        found |= dict.fromkeys(earlier, RunStatus("interrupted", folder))
        found[last] = RunStatus(_in_folder(folder), folder)
    found.pop("", None)
    return found


def _model_ids(folder: Path) -> list[str]:
    try:
        ids: Any = json.loads((folder / RUN).read_bytes())["model_ids"]
        return [str(each) for each in ids]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _in_folder(folder: Path) -> Status:
    info = read_run(folder)
    if info.status is None:
        return "unknown"
    ending = info.ended(None)
    if ending == "gone":  # its process is, and it did not finish
        return "interrupted"
    return ending or "running"


def _state(
    run: TrainingRun, known: Mapping[str, RunStatus], sessions: Mapping[str, SessionStatus]
) -> RunStatus:
    here = known.get(run.training_run_id)
    if run.corrupted:
        return RunStatus("failed", here.folder if here else None)
    return here or RunStatus(_by_session(sessions.get(_session_of(run.training_run_id))))


def _by_session(status: SessionStatus | None) -> Status:
    if status is None:
        return "unknown"
    if isinstance(status, ClientSessionFinished):
        return _BY_REASON.get(status.reason.type, "unknown")
    return _BY_TYPE.get(status.type, "unknown")


def _session_of(run_id: str) -> str:
    return run_id.partition(":")[0]


def _sessions(rest: RestClient, wanted: set[str]) -> dict[str, SessionStatus]:
    """The status of the wanted sessions, as far as the caller's sessions include them."""
    found: dict[str, SessionStatus] = {}
    request: SessionSearchRequest | None = SessionSearchRequest(limit=_PAGE)
    for _ in range(_PAGES):
        if request is None or wanted <= found.keys():
            break
        try:
            page = _search(rest, request)
        except APIStatusError:  # a server without the route
            break
        found |= {one.session_id: one.status for one in page[0] if one.status is not None}
        request = page[1]
    return found


def _search(
    rest: RestClient, request: SessionSearchRequest
) -> tuple[list[SessionSummary], SessionSearchRequest | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        page = rest.search_sessions(request).result()
    if page.next_cursor is None or not page.sessions:
        return page.sessions, None
    return page.sessions, SessionSearchRequest(limit=_PAGE, cursor=page.next_cursor)
