"""What a run's folder says about it to those who look."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tinkex.tracking.run_info import RunInfo, read_run

if TYPE_CHECKING:
    from pathlib import Path


def test_everything_is_read(tmp_path: Path):
    said = {"title": "sft tiny", "steps": 30, "status": "running", "pid": 12, "kind": "sft"}
    (tmp_path / "run.json").write_text(json.dumps(said))
    assert read_run(tmp_path) == RunInfo("sft tiny", 30, "running", 12)


def test_a_run_without_a_title_is_called_by_its_kind_and_model(tmp_path: Path):
    (tmp_path / "run.json").write_text('{"kind": "rl", "model": "tinkex/tiny"}')
    assert read_run(tmp_path).title == "rl tinkex/tiny"


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", '{"title": 3, "steps": "many", "pid": -1, "status": 0}', "\0"]
)
def test_a_folder_that_says_nothing_is_called_by_its_name(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    assert read_run(tmp_path) == RunInfo(tmp_path.name)


@pytest.mark.parametrize(
    ("info", "last_step", "ending"),
    [
        (RunInfo("t"), 9, None),
        (RunInfo("t", steps=9), None, None),
        (RunInfo("t", steps=9), 8, None),
        (RunInfo("t", steps=9), 9, "finished"),
        (RunInfo("t", steps=9, status="running"), 9, "finished"),
        (RunInfo("t", steps=9, status="running", pid=os.getpid()), 9, None),
        (RunInfo("t", steps=9, status="finished"), 5, "finished"),
        (RunInfo("t", status="interrupted"), 5, "interrupted"),
        (RunInfo("t", status="failed"), 5, "failed"),
        (RunInfo("t", status="running", pid=10**30), 5, None),
        (RunInfo("t", status="running", pid=1), 5, None),
    ],
)
def test_a_run_has_ended_when_its_folder_says_so(
    info: RunInfo, last_step: int | None, ending: str | None
):
    assert info.ended(last_step) == ending


def test_a_run_whose_process_was_killed_is_gone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert RunInfo("t", status="running", pid=process.pid).ended(1) == "gone"
    here = RunInfo("t", status="running", pid=process.pid, host=platform.node())
    assert here.ended(1) == "gone"
    elsewhere = RunInfo("t", status="running", pid=process.pid, host=f"not-{platform.node()}")
    assert elsewhere.ended(1) is None
