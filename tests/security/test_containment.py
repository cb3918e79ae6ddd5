"""One tenant's numbers, a scheduler that ends, an engine or a server that is stopped."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

from tests.e2e.serving import ROOT, children, served
from tests.patience import PATIENCE_S, until
from tests.security.world import Tenant, world_on
from tinkex.clock import SystemClock

if TYPE_CHECKING:
    from pathlib import Path

    from tests.security.world import Answer, World

STEP = {"adam_params": {"learning_rate": 0.1}, "type": "optim_step"}
# Ends the scheduler of a server as a defect of ours would: once a file is there, and work waits.
BROKEN = """
import os, sys

def break_scheduler():
    from tinkex.server.scheduler.loop import SchedulerLoop
    inner = SchedulerLoop._start

    def start(self, group):
        if os.path.exists({flag!r}) and any(self.queues):
            raise OverflowError("Python int too large to convert to SQLite INTEGER")
        return inner(self, group)

    SchedulerLoop._start = start

if "serve" in sys.orig_argv:
    break_scheduler()
"""


def answer_with(world: World, path: str, wanted: int) -> Answer:
    """Ask until the answer has a status."""
    deadline = SystemClock().now() + PATIENCE_S
    while (answer := world.neighbour.get(path)).status != wanted:
        assert SystemClock().now() < deadline, (answer.status, answer.body)
    return answer


def test_the_largest_number_of_a_model_stops_no_work(world: World) -> None:
    attacker = world.attacker
    session = attacker.session()
    model = attacker.model(session)
    # An engine that is busy says 0.
    until(lambda: world.metric("tinkex_engine_adapters_resident") == 1)
    for number in ({"seq_id": (1 << 63) - 1}, {}):
        answer = attacker.post("optim_step", {"model_id": model, **STEP, **number})
        assert answer.status in (200, 400), (number, answer.status, answer.body)
    attacker.finish(session)
    world.assert_well()
    # The model is closed in the background, which once ended the scheduler.
    deadline = SystemClock().now() + PATIENCE_S
    while world.metric("tinkex_engine_adapters_resident"):
        assert SystemClock().now() < deadline
    world.assert_well()


def test_a_server_whose_scheduler_ends_exits_with_an_error_and_resumes(tmp_path: Path) -> None:
    flag, hooks = tmp_path / "broken", tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(BROKEN.format(flag=str(flag)))
    path = f"{hooks}:{ROOT / 'src'}:{ROOT}"
    with world_on(tmp_path, PYTHONPATH=path) as world:
        neighbour = world.neighbour
        model = neighbour.model(neighbour.session())
        flag.touch()
        made = neighbour.made("optim_step", model_id=model, seq_id=1, **STEP)
        assert world.server.popen.wait(PATIENCE_S) == 1
        assert "the scheduler has ended (OverflowError)" in world.log
        assert "accepted work is kept" in world.log
        assert "takes too long" not in world.log
    flag.unlink()
    with served(tmp_path / "data", auth=True) as server:
        again = Tenant(int(server.port), neighbour.key, neighbour.owner)
        assert again.result(made["request_id"])["metrics"]["step"] == 1


def test_a_stopped_engine_holds_up_samples_and_nothing_else(tmp_path: Path) -> None:
    with world_on(tmp_path) as world:
        neighbour = world.neighbour
        session = neighbour.session()
        sampler = neighbour.sampler(session)
        before = neighbour.sample(sampler, 0, tokens=4)
        (engine,) = children(world.server.pid)
        os.kill(engine, signal.SIGSTOP)
        try:
            assert "stopped by a signal" in answer_with(world, "/readyz", 503).detail
            assert neighbour.get("/healthz").status == 200
            assert neighbour.get("sessions").status == 200
            made = neighbour.made(
                "asample",
                sampling_session_id=sampler,
                seq_id=1,
                prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
                sampling_params={"max_tokens": 4, "seed": 1},
                num_samples=1,
            )
            other = neighbour.session()
            neighbour.finish(other)
        finally:
            os.kill(engine, signal.SIGCONT)
        answer_with(world, "/readyz", 200)
        assert neighbour.result(made["request_id"])["sequences"] == before["sequences"]
        assert children(world.server.pid) == [engine]
        world.assert_well()


def test_a_stopped_server_ends_no_session_when_it_is_continued(tmp_path: Path) -> None:
    settings = ("--set", "session_timeout_s=12", "--set", "upkeep_interval_s=0.5")
    with world_on(tmp_path, *settings) as world:
        neighbour = world.neighbour
        session = neighbour.session()
        neighbour.made("session_heartbeat", session_id=session)
        os.kill(world.server.pid, signal.SIGSTOP)
        try:
            threading.Event().wait(
                15
            )  # longer than a session may be silent, and than a sweep may be late
        finally:
            os.kill(world.server.pid, signal.SIGCONT)
        model = neighbour.model(session)
        neighbour.made("session_heartbeat", session_id=session)
        made = neighbour.made("optim_step", model_id=model, seq_id=1, **STEP)
        assert neighbour.result(made["request_id"])["metrics"]["step"] == 1
