"""An error's event reaches the server before the process dies, and the exit never hangs on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.workers import WAYS
from tests.patience import PATIENCE_S
from tinkex.testing import FakeServer, faults

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.req("S38")

ROOT = Path(__file__).parents[2]
# SIGINT may be ignored where the tests run, and children inherit that.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.e2e.workers import die
die(*sys.argv[1:])
"""
OWN = {"own error", "own error in a thread"}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """Every training step fails, and the failure quotes what it was sent."""
    with FakeServer().serve() as serving:
        error = {"error": "canary prompt", "detail": "canary prompt"}
        serving.faults.on("forward_backward", faults.reply(400, error), times=None)
        yield serving


def start(server: FakeServer, way: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, server.url, way],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def errors(server: FakeServer) -> list[dict[str, Any]]:
    events = [event for seen in server.seen("telemetry") for event in seen.json["events"]]
    return [event for event in events if event["severity"] in ("WARNING", "ERROR")]


# The other ways differ in where the error is raised, not in how its event is sent.
QUICK = {"result", "sys.exit", "forked child", *OWN}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=() if way in QUICK else pytest.mark.exhaustive)
        for way in sorted(set(WAYS) - {"interrupted"})
    ],
)
def test_the_event_of_an_error_reaches_the_server_before_the_process_dies(
    server: FakeServer, way: str
) -> None:
    if way == "forked child" and not hasattr(os, "fork"):
        pytest.skip("this platform has no fork")
    program = start(server, way)
    _, said = program.communicate(timeout=PATIENCE_S)
    (event,) = errors(server)
    if way in OWN:
        assert (event["event"], event["error_type"]) == ("UNHANDLED_EXCEPTION", "LookupError")
    else:
        assert event["event_name"] == "user_error", said
        assert event["event_data"]["error_type"] == "BadRequestError"
    assert "canary" not in repr([seen.raw_body for seen in server.seen("telemetry")])
    assert "Exception ignored" not in said


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["result", "sys.exit", "own error"])
def test_no_event_is_lost_in_ten_runs(server: FakeServer, way: str) -> None:
    for run in range(10):
        start(server, way).communicate(timeout=PATIENCE_S)
        assert len(errors(server)) == run + 1


def test_a_slow_answer_is_waited_for(server: FakeServer) -> None:
    server.faults.on("telemetry", faults.slow(0.5), times=None)
    start(server, "result").communicate(timeout=PATIENCE_S)
    assert len(errors(server)) == 1


@pytest.mark.parametrize("trouble", [faults.hang, lambda: faults.reply(503)])
def test_a_telemetry_route_that_does_not_work_keeps_no_process_alive(
    server: FakeServer, trouble: Any
) -> None:
    server.faults.on("telemetry", trouble(), times=None)
    program = start(server, "result")
    _, said = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == 1
    assert "Exception ignored" not in said


def test_without_telemetry_nothing_is_sent_and_the_error_is_the_same(server: FakeServer) -> None:
    program = start(server, "result", TINKER_TELEMETRY="0")
    _, said = program.communicate(timeout=PATIENCE_S)
    assert "BadRequestError" in said
    assert server.seen("telemetry") == []


def test_ctrl_c_ends_a_program_whose_errors_cannot_be_sent(server: FakeServer) -> None:
    server.faults.on("telemetry", faults.hang(), times=None)
    program = start(server, "interrupted")
    assert program.stdout is not None
    assert program.stdout.readline() == "waiting\n"
    program.send_signal(signal.SIGINT)
    _, said = program.communicate(timeout=PATIENCE_S)
    assert program.returncode in (1, 130, -signal.SIGINT)
    assert said.strip().endswith("KeyboardInterrupt")
    assert errors(server) != []
