"""`tinkex run watch`: a run that is over, one that goes on, one on a server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from msgspec.structs import replace

from tinkex.cli.commands import DONE, FAILED, MISUSED
from tinkex.cli.watch import changes
from tinkex.clients.service import ServiceClient
from tinkex.testing import FakeClock
from tinkex.tracking.history import METRICS, write_line
from tinkex.types import Checkpoint, TrainingRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran, Saved
    from tinkex.clients.rest import RestClient
    from tinkex.clients.service import CloseStatus


def made(status: str | None, *, steps: int = 3, total: int = 3, **more: Any) -> Path:
    folder = Path("runs/a")
    folder.mkdir(parents=True)
    about = {"kind": "sft", "model": "tinkex/tiny", "steps": total, "status": status, **more}
    (folder / "run.json").write_text(json.dumps(about))
    rows = [
        {"time_s": 2.0 * step, "loss": 3.0 / step, "tokens": 10} for step in range(1, steps + 1)
    ]
    lines = [write_line(step, row) for step, row in enumerate(rows, 1)]
    (folder / METRICS).write_text("".join(lines))
    return folder


def test_a_finished_run_is_shown_and_said_to_be_finished(run: Callable[..., Ran]):
    ran = run("run", "watch", made("finished"))
    assert (ran.status, ran.err) == (DONE, "The run has finished.\n")
    assert ran.out.splitlines() == [
        "step 1/3  loss 3.0000  5 tokens/s  0:04 left",
        "step 2/3  loss 1.5000  5 tokens/s  0:02 left",
        "step 3/3  loss 1.0000  5 tokens/s",
        "3 steps in 0:06  loss 3.0000 → 1.0000  5 tokens/s",
    ]


def test_json_is_the_runs_own_lines(run: Callable[..., Ran]):
    folder = made("finished")
    ran = run("run", "watch", folder, "-f", "json")
    assert ran.out == (folder / METRICS).read_text()


@pytest.mark.parametrize(
    ("status", "exit_status", "said"),
    [
        ("interrupted", DONE, "The run was interrupted; it can be resumed."),
        ("failed", FAILED, "The run has failed"),
        (None, DONE, "The run has finished."),
    ],
)
def test_how_a_run_ended_is_said(
    run: Callable[..., Ran], status: str | None, exit_status: int, said: str
):
    ran = run("run", "watch", made(status))
    assert ran.status == exit_status
    assert said in ran.err


def test_a_killed_run_is_not_waited_for(run: Callable[..., Ran]):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    ran = run("run", "watch", made("running", steps=2, pid=process.pid))
    assert ran.status == FAILED
    assert "not on this machine any more; it can be resumed" in ran.err


def test_one_look_at_a_run_that_goes_on_waits_for_nothing(run: Callable[..., Ran]):
    ran = run("run", "watch", made("running", steps=2, pid=os.getpid()), "--once")
    assert (ran.status, ran.err) == (DONE, "")
    assert ran.out.splitlines()[-1].startswith("2 of 3 steps in 0:04")


def test_a_run_that_has_not_begun_can_be_looked_at(run: Callable[..., Ran]):
    ran = run("run", "watch", made("running", steps=0, pid=os.getpid()), "--once")
    assert (ran.status, ran.out, ran.err) == (DONE, "", "")


@pytest.mark.parametrize("name", ["runs/nowhere", "./nowhere", "~/nowhere", "/nowhere"])
def test_a_folder_that_is_not_there_is_said_so(run: Callable[..., Ran], name: str):
    ran = run("run", "watch", name)
    assert (ran.status, ran.out) == (FAILED, "")
    assert f"There is no folder {name}" in ran.err


def test_a_folder_that_is_no_runs_is_refused(run: Callable[..., Ran]):
    Path("other").mkdir()
    ran = run("run", "watch", "other")
    assert ran.status == MISUSED
    assert "other is not the folder of a run" in ran.err


def test_a_run_with_nan_is_followed_to_its_end(run: Callable[..., Ran]):
    folder = made("finished")
    with (folder / METRICS).open("a") as file:
        file.write(write_line(4, {"loss": float("nan"), "time_s": float("inf")}))
    ran = run("run", "watch", folder)
    assert ran.status == DONE
    assert "loss nan" in ran.out


# -- on a server -----------------------------------------------------------------------------------


def test_a_run_on_the_server_is_shown_with_its_checkpoints(run: Callable[..., Ran], saved: Saved):
    ran = run("run", "watch", saved.run_id, "--once")
    assert ran.status == DONE
    first, *lines = ran.out.splitlines()
    assert first == f"{saved.run_id}: tinkex/tiny, rank 4"
    assert [line.split("  saved ")[1] for line in lines] == [saved.training, saved.sampler]


def test_a_run_on_the_server_is_one_line_of_json(run: Callable[..., Ran], saved: Saved):
    ran = run("run", "watch", saved.run_id, "--once", "-f", "json")
    assert len(ran.out.splitlines()) == 1
    assert ran.json["last_checkpoint"]["tinker_path"] == saved.training


@pytest.mark.usefixtures("server")
def test_an_id_that_nobody_knows_is_not_found(run: Callable[..., Ran]):
    ran = run("run", "watch", "nonsense", "--once")
    assert ran.status == FAILED
    assert "Resource not found" in ran.err


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
QUIET = TrainingRun(
    training_run_id="run",
    base_model="tinkex/tiny",
    model_owner="me",
    is_lora=True,
    last_request_time=NOON,
)


def _checkpoint(name: str) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=f"weights/{name}",
        checkpoint_type="training",
        time=NOON,
        tinker_path=f"tinker://run/weights/{name}",
    )


class _Answers:
    """A server that answers these, one after the other."""

    def __init__(self, *runs: TrainingRun) -> None:
        self._runs = list(runs)

    async def get_training_run_async(self, run_id: str) -> TrainingRun:
        assert run_id == "run"
        return self._runs.pop(0)


def test_only_what_is_new_is_told_and_a_failure_ends_it():
    busy = replace(QUIET, last_request_time=NOON + timedelta(seconds=5))
    busier = replace(QUIET, last_request_time=NOON + timedelta(seconds=40))
    saved = replace(busier, last_checkpoint=_checkpoint("one"))
    failed = replace(saved, corrupted=True)
    rest = cast("RestClient", _Answers(QUIET, QUIET, busy, busier, saved, saved, failed))

    async def watch() -> list[TrainingRun]:
        clock = FakeClock()
        async with clock.running():
            states = changes(rest, "run", clock, _is_open, once=False)
            return [each async for each in states]

    assert asyncio.run(watch()) == [QUIET, busier, saved, failed]


async def _is_open() -> bool:
    return False


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("success", 0, "The run has finished.\n"),
        ("interrupted", 0, "The run was interrupted.\n"),
        ("errored", FAILED, "The run has failed.\n"),
    ],
)
def test_a_run_whose_session_has_ended_is_not_waited_for(
    run: Callable[..., Ran], ending: CloseStatus, status: int, said: str
):
    service = ServiceClient()
    run_id = service.create_lora_training_client("tinkex/tiny", rank=1).model_id
    assert run("run", "watch", run_id, "--once").err == "The run's session is open.\n"
    service.close(ending).result()
    ran = run("run", "watch", run_id)
    assert (ran.status, ran.err) == (status, said)
    assert "last request" in ran.out
