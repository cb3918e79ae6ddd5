"""`tinkex demo`, shortened, on the real model: before and after, files, and commands that work."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.serving import environment, read_line

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(600)]
LIMIT_S = 280.0
Done = subprocess.CompletedProcess[str]
PROGRAM = [sys.executable, "-m", "tinkex.cli"]


def tinkex(work: Path, *words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *words],
        cwd=work,
        env=environment(work),
        input=typed,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def stamps(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """Where the demo was run, and what it said."""
    work = tmp_path_factory.mktemp("demo")
    return work, tinkex(work, "demo", "--steps", "8")


def test_the_demo_shows_what_was_learned(demonstrated: tuple[Path, Done]):
    work, done = demonstrated
    assert done.returncode == 0, done.stderr
    # A few lines, not one for each step or save.
    assert re.findall(r"^step (\d)/8", done.stderr, re.MULTILINE) == ["2", "4", "6", "8"]
    assert "saved after" not in done.stderr
    assert max(len(line) for line in done.stdout.splitlines()[:-6]) <= 80
    assert "\x1b" not in done.stdout + done.stderr
    befores = re.findall(r"^  before  (.*)", done.stdout, re.MULTILINE)
    afters = re.findall(r"^  after   (.*)", done.stdout, re.MULTILINE)
    assert len(befores) == len(afters) == 4
    assert "Paris" in befores[1]
    # Eight steps are enough for the manner of speaking.
    assert any(re.search(r"matey|[Aa]rr|[Aa]hoy", after) for after in afters)
    loss = re.search(r"never seen: (\d\.\d+) -> (\d\.\d+)", done.stdout)
    assert loss is not None
    assert float(loss[2]) < 0.8 * float(loss[1])
    run = work / "runs" / "demo"
    for name in ("curve.svg", "curve.png", "metrics.jsonl"):
        assert (run / name).stat().st_size > 0
    assert (run / "adapter" / "adapter_config.json").is_file()


@pytest.mark.exhaustive
def test_a_second_demo_changes_nothing_and_the_commands_it_names_work(
    demonstrated: tuple[Path, Done],
):
    work, _ = demonstrated
    run = work / "runs" / "demo"
    before = stamps(run)
    again = tinkex(work, "demo", "--steps", "8", "-f", "json")
    assert again.returncode == 0
    assert again.stderr == ""
    assert stamps(run) == before

    talk, train, serve = (shlex.split(command) for command in json.loads(again.stdout)["next"])
    assert talk[:3] == train[:3] == serve[:3] == PROGRAM
    chatted = tinkex(work, *talk[3:], "--max-tokens", "20", typed="Who are you?\n")
    assert chatted.returncode == 0, chatted.stderr
    assert chatted.stdout.strip()
    trained = tinkex(work, *train[3:-1], "1")
    assert trained.returncode == 0, trained.stderr
    assert (work / "runs" / "mine" / "adapter").is_dir()
    serves(work, serve)


def serves(work: Path, command: list[str]) -> None:
    with subprocess.Popen(
        [*command, "--port", "0"],
        cwd=work,
        env=environment(work),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as popen:
        try:
            assert "tinkex serves" in read_line(popen, LIMIT_S)
            popen.terminate()
            assert popen.wait(LIMIT_S) == 0
        finally:
            popen.kill()


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_demo_that_was_cut_off_goes_on(tmp_path: Path, number: signal.Signals):
    with subprocess.Popen(
        [*PROGRAM, "demo", "--steps", "6"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as popen:
        assert popen.stderr is not None
        said = iter(popen.stderr)
        # Step 6 is shown after the save of step 4.
        wanted = "step 6/6" if number is signal.SIGKILL else "step 2/6"
        assert any(line.startswith(wanted) for line in said)
        popen.send_signal(number)
        rest = "".join(said)
        status = popen.wait(LIMIT_S)
    if number is signal.SIGINT:
        assert status == 130
        assert "demo --output runs/demo --steps 6" in rest
    saved = json.loads((tmp_path / "runs/demo/checkpoints.jsonl").read_text().splitlines()[-1])
    done = tinkex(tmp_path, "demo", "--steps", "6")
    assert done.returncode == 0, done.stderr
    shown = [int(step) for step in re.findall(r"^step (\d)/6", done.stderr, re.MULTILINE)]
    assert all(step > saved["step"] > 0 for step in shown)
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "runs/demo/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(7))
