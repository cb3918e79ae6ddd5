"""tinkex sends what the official client 0.36.0 was recorded to send, call by call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import compare
import pytest
from run_scenarios import run_recorded
from scenarios import SCENARIOS

import tinkex

if TYPE_CHECKING:
    from story import Scenario

RECORDED = Path(__file__).parent / "recorded"
STORIES = [pytest.param(story, id=story.name) for story in SCENARIOS if story.recorded]


def recorded(scenario: Scenario) -> dict[str, Any]:
    return json.loads((RECORDED / f"{scenario.name}.json").read_text())


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("API_KEY", "BASE_URL", "PROJECT_ID", "TAGS", "CREDENTIAL_CMD", "LOG"):
        monkeypatch.delenv(f"TINKER_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.req("S6")
@pytest.mark.req("S7")
@pytest.mark.req("S8")
@pytest.mark.parametrize("scenario", STORIES)
def test_caller_and_server_see_what_they_see_with_the_official_client(scenario: Scenario) -> None:
    theirs = recorded(scenario)
    ours = run_recorded(tinkex, scenario)
    said = compare.submissions(ours["requests"])
    expected = compare.submissions(theirs["requests"])
    if not scenario.ordered:
        said, expected = sorted(said), sorted(expected)
    assert said == expected, compare.differences(said, expected)
    polled = compare.repeated(ours["requests"])
    expected = compare.repeated(theirs["requests"])
    assert polled == expected, compare.differences(polled, expected)
    result = json.loads(json.dumps(ours["result"]))
    assert compare.result_differences(result, theirs["result"]) == []
    check_bytes(ours["requests"], theirs["requests"])


def check_bytes(ours: list[compare.Request], theirs: list[compare.Request]) -> None:
    """Training bodies are equal to the byte wherever the protocol leaves no choice."""
    expected = compare.training_bodies(theirs)
    sent = compare.training_bodies(ours)
    fixed = {key for key, body in expected.items() if compare.is_deterministic(body)}
    assert {key: sent[key] for key in fixed} == {key: expected[key] for key in fixed}


def test_recordings_cover_every_scenario_and_no_other() -> None:
    expected = {scenario.name for scenario in SCENARIOS if scenario.recorded}
    assert {path.stem for path in RECORDED.glob("*.json")} == expected


@pytest.mark.req("S34")
def test_telemetry_events_have_the_members_of_the_official_ones() -> None:
    story = next(story for story in SCENARIOS if story.telemetry)
    theirs = telemetry_shape(recorded(story)["requests"])
    ours = telemetry_shape(run_recorded(tinkex, story)["requests"])
    assert theirs["batch"] <= ours["batch"]
    assert theirs["SESSION_START"] == ours["SESSION_START"]


def telemetry_shape(requests: list[compare.Request]) -> dict[str, set[str]]:
    """The members of a batch and of each kind of event."""
    shape: dict[str, set[str]] = {}
    for request in requests:
        if request["path"] == "/api/v1/telemetry":
            shape.setdefault("batch", set()).update(request["body"])
            for event in request["body"]["events"]:
                shape.setdefault(event["event"], set()).update(event)
    return shape
