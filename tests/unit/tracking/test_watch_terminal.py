"""`tinkex train`, `run watch` and `run plot`: the programs on a pseudo-terminal of 80 columns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from screen import Terminal

from tests.patience import PATIENCE_S
from tinkex.testing import API_KEY, FakeServer
from tinkex.tracking.history import METRICS, read_metrics
from tinkex.tracking.sinks import open_sinks

SOURCE = str(Path(__file__).parents[3] / "src")


def begun(folder: Path, status: str = "running") -> None:
    about = {"title": "sft a model", "steps": 20, "status": status, "pid": os.getpid()}
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(about))


def command(*words: object) -> list[str]:
    return ["-m", "tinkex.cli", "run", *map(str, words)]


def terminal(*words: object, **env: str) -> Terminal:
    return Terminal(command(*words), columns=80, rows=24, env={"PYTHONPATH": SOURCE, **env})


def test_a_run_that_is_being_written_is_watched_live_until_it_ends(tmp_path: Path):
    begun(tmp_path)
    sinks = open_sinks([], tmp_path, "run", {})
    with terminal("watch", tmp_path) as watch:
        watch.until(lambda screen: "sft a model" in screen.text and "0/20" in screen.text)
        for step in range(1, 11):
            evaluated = {"eval_loss": 2.0} if step == 10 else {}
            sinks.record(step, {"time_s": 3.0 * step, "loss": 3.0 / step, "tokens": 9, **evaluated})
        watch.until(lambda screen: "10/20" in screen.text)
        assert watch.screen.lines[0].endswith(" 10/20  50%")
        assert re.fullmatch("loss 0.3000  [▁-█]{10}  3 tokens/s  0:30 left", watch.screen.lines[1])
        assert watch.screen.lines[2] == "eval loss 2.0000 (step 10)"
        assert "loss   ◆ eval loss" in watch.screen.lines[3]
        sinks.record(11, {"time_s": 33.0, "loss": float("nan"), "tokens": 9})
        begun(tmp_path, "interrupted")
        assert watch.end() == 0
        assert watch.screen.lines == [
            "11 of 20 steps in 0:33  loss 3.0000 → nan  eval loss 2.0000 (step 10)",
            "The run was interrupted; it can be resumed.",
            "",
        ]
        assert watch.screen.wrapped == 0
    sinks.close()


def test_a_real_training_shows_itself_in_eighty_columns(tmp_path: Path):
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "What is the capital of Italy?", "completion": " Rome"}\n' * 4)
    words = ["train", "sft", data, "--model", "tinkex/tiny", "--steps", "12"]
    with FakeServer().serve() as server:
        run = Terminal(
            ["-m", "tinkex.cli", *map(str, words), "--output", str(tmp_path / "run")],
            columns=80,
            rows=24,
            env={
                "PYTHONPATH": SOURCE,
                "TINKER_BASE_URL": server.url,
                "TINKER_API_KEY": API_KEY,
                "HOME": str(tmp_path),
                "NO_COLOR": "1",
            },
        )
        with run:
            run.until(lambda screen: "━" in screen.text and "tokens/s" in screen.text)
            bar = next(line for line in run.screen.lines if "━" in line)
            assert bar.startswith("sft tinkex/tiny ━")
            assert run.screen.wrapped == 0
            assert run.end() == 0
            assert "━" not in run.screen.text
            assert re.search("^12 steps in 0:[0-9]{2}  loss ", run.screen.text, re.MULTILINE)
    assert [int(row["step"]) for row in read_metrics(tmp_path / "run")][-1] == 12


def test_leaving_is_clean_and_an_interruption(tmp_path: Path):
    begun(tmp_path)
    (tmp_path / METRICS).write_text('{"step": 1, "loss": 2.0}\n')
    with terminal("watch", tmp_path) as watch:
        watch.until(lambda screen: "1/20" in screen.text)
        watch.interrupt(signal.SIGINT)
        assert watch.end() == 130
        assert watch.screen.lines[0].startswith("1 of 20 steps in")
        assert watch.screen.lines[1:] == ["Interrupted.", ""]


def test_a_reader_that_leaves_ends_the_watching(tmp_path: Path):
    begun(tmp_path)
    sinks = open_sinks([], tmp_path, "run", {})
    watch = subprocess.Popen(
        [sys.executable, *command("watch", tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": SOURCE},
        text=True,
    )
    assert watch.stdout is not None
    assert watch.stderr is not None
    sinks.record(1, {"loss": 2.0})
    assert watch.stdout.readline().startswith("step  1/20  loss 2.0000")
    watch.stdout.close()
    sinks.record(2, {"loss": 1.0})
    assert watch.wait(PATIENCE_S) == 1
    assert watch.stderr.read() == ""
    watch.stderr.close()
    sinks.close()


@pytest.mark.parametrize("colour", [True, False])
def test_a_plot_fills_the_terminal_and_is_painted_only_where_that_is_wanted(
    tmp_path: Path, colour: bool
):
    begun(tmp_path)
    rows = [{"step": step, "loss": 3.0 / step, "eval_loss": 1.0} for step in range(1, 50)]
    (tmp_path / METRICS).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with terminal("plot", tmp_path, NO_COLOR="" if colour else "1") as plot:
        assert plot.end() == 0
        assert plot.screen.wrapped == 0
        assert "loss   ◆ eval loss" in plot.screen.lines[0]
        assert ("36" in plot.screen.styles) is colour
        assert plot.screen.styles or not colour
