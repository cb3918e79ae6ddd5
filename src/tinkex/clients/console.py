"""Links into the vendor's web console; built, never fetched."""

from __future__ import annotations

from urllib.parse import quote

_CONSOLE = "https://tinker.thinkingmachines.ai"


def session_url(session_id: str | None) -> str:
    """The page of a session, or the list of sessions before there is one."""
    return f"{_CONSOLE}/sessions/{session_id}" if session_id else f"{_CONSOLE}/sessions"


def training_run_url(training_run_id: str) -> str:
    """The page of a training run."""
    return f"{_CONSOLE}/training_runs/{quote(training_run_id, safe=':')}"
