"""`tinkex train` on a fake server: what it says, leaves behind and refuses."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import pytest

from tinkex.cli.commands import DONE, FAILED, INTERRUPTED, MISUSED
from tinkex.cli.main import build_parser

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Ran
    from tinkex.testing import FakeServer

pytestmark = pytest.mark.usefixtures("server")

TINY = ("--model", "tinkex/tiny")
SHORT = (*TINY, "--steps", "4", "--batch-size", "2")
# Sends itself what Ctrl-C sends, once, in the third step.
TASK = """
import signal
from pathlib import Path

asked = Path("asked.txt")

def prompts():
    return ["a", "b", "c"]

def reward(prompt, answer):
    asked.write_text(asked.read_text() + "x" if asked.exists() else "")
    if len(asked.read_text()) == 2 * 2 * 2 + 1:
        signal.raise_signal(signal.SIGINT)
    return len(answer)
"""


@pytest.fixture(autouse=True)
def work(home: Path) -> Path:
    """The folder that commands run in, with data and a task."""
    work = home.parent / "work"
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": f"{n}"},
            ]
        }
        for n in range(6)
    ]
    pairs = [{"prompt": f"{n}", "chosen": "good", "rejected": "bad"} for n in range(6)]
    write(work / "chats.jsonl", chats)
    write(work / "pairs.jsonl", pairs)
    (work / "task.py").write_text(TASK)
    return work


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows(work: Path, run: str) -> list[dict[str, Any]]:
    text = (work / "runs" / run / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def record(work: Path, run: str) -> dict[str, Any]:
    return json.loads((work / "runs" / run / "run.json").read_bytes())


def test_supervised_training_leaves_a_whole_run(run: Callable[..., Ran], work: Path):
    ran = run("train", "sft", "chats.jsonl", *SHORT, "--eval-fraction", "0.3", "-f", "json")
    assert ran.status == DONE, ran.err
    assert [row["step"] for row in rows(work, "chats-sft")] == [0, 1, 2, 3, 4]
    assert {"loss", "tokens", "tokens_per_s", "time_s", "learning_rate", "eval_loss"} <= rows(
        work, "chats-sft"
    )[-1].keys()
    there = {one.name for one in (work / "runs" / "chats-sft").iterdir()}
    assert {"run.json", "metrics.jsonl", "checkpoints.jsonl", "curve.svg", "adapter"} <= there
    said = record(work, "chats-sft")
    assert (said["status"], said["steps"], said["kind"]) == ("finished", 4, "sft")
    assert ran.json["sampler_path"] == said["adapter_path"]
    assert ran.json["ended"] == "finished"


def test_everything_it_says_fits_eighty_columns_and_talk_is_no_data(run: Callable[..., Ran]):
    ran = run("train", "sft", "chats.jsonl", *SHORT, "--eval-fraction", "0.3")
    assert max(map(len, (ran.out + ran.err).splitlines())) <= 80
    assert "step 4/4" in ran.err
    assert "step 4/4" not in ran.out
    assert "\x1b" not in ran.out + ran.err


def test_what_happens_before_the_first_step_is_said(run: Callable[..., Ran], server: FakeServer):
    ran = run("train", "sft", "chats.jsonl", *SHORT, "--eval-fraction", "0.3")
    lines = ran.err.splitlines()
    assert lines[:4] == [
        f"Connecting to {server.url} ...",
        "Tokenizing 6 examples for tinkex/tiny ...",
        "Loading tinkex/tiny ...",
        "Evaluating the model before training ...",
    ]
    assert lines[5] == "Computing step 1 ..."
    assert lines[6].startswith("step 1/4")


def test_a_finished_run_ends_with_commands_that_use_it(run: Callable[..., Ran]):
    ran = run("train", "sft", "chats.jsonl", *SHORT)
    commands = [line.strip() for line in ran.err.splitlines() if line.startswith("  tinkex ")]
    assert [shlex.split(command)[1] for command in commands] == [
        *("chat", "sample", "run", "checkpoint")
    ]
    for command in commands:  # each of them is one that the parser takes
        args, unknown = build_parser().parse_known_args(shlex.split(command)[1:])
        assert (unknown, bool(args.handler)) == ([], True)
    plot = next(command for command in commands if " run plot " in command)
    assert run(*shlex.split(plot)[1:]).status == DONE


def test_preferences_are_trained_and_the_base_model_is_asked_once(
    run: Callable[..., Ran], work: Path, server: FakeServer
):
    ran = run("train", "dpo", "pairs.jsonl", *SHORT)
    assert ran.status == DONE, ran.err
    assert {"loss", "accuracy", "margin"} <= rows(work, "pairs-dpo")[-1].keys()
    assert rows(work, "pairs-dpo")[0]["margin"] == 0.0
    assert "asking the base model about 12 answers, once" in ran.err
    assert (work / "runs" / "pairs-dpo" / "reference.json").exists()


def test_an_interrupted_run_says_how_to_go_on_and_does(run: Callable[..., Ran], work: Path):
    words = ("train", "rl", "task.py", *SHORT, "--group-size", "2", "--max-tokens", "4")
    ran = run(*words)
    assert ran.status == INTERRUPTED, ran.err
    assert record(work, "task-rl")["status"] == "interrupted"
    last = rows(work, "task-rl")[-1]["step"]
    assert last < 4
    assert f"Interrupted after step {last}" in ran.err
    command = ran.err.strip().splitlines()[-1].strip()
    assert command == "tinkex train rl task.py --output runs/task-rl --resume"
    (model_id,) = record(work, "task-rl")["model_ids"]
    (work / "runs").rename(work / "elsewhere")  # so that only the server can tell
    assert run("run", "info", model_id, "-f", "json").json["status"] == "interrupted"
    (work / "elsewhere").rename(work / "runs")
    again = run(*shlex.split(command)[1:])
    assert again.status == DONE, again.err
    assert [row["step"] for row in rows(work, "task-rl")] == [1, 2, 3, 4]
    assert len(record(work, "task-rl")["model_ids"]) == 2


def test_a_finished_run_is_not_trained_again(
    run: Callable[..., Ran], work: Path, server: FakeServer
):
    run("train", "sft", "chats.jsonl", *SHORT)
    before = record(work, "chats-sft")
    server.requests.clear()
    ran = run("train", "sft", "chats.jsonl", "--resume")
    assert ran.status == DONE, ran.err
    assert record(work, "chats-sft") == before
    assert not [one for one in server.requests if "forward" in one.path]


def test_a_folder_that_has_a_run_is_refused_with_the_command_that_resumes(run: Callable[..., Ran]):
    assert run("train", "sft", "chats.jsonl", *SHORT).status == DONE
    ran = run("train", "sft", "chats.jsonl", *SHORT)
    assert ran.status == MISUSED
    assert "tinkex train sft chats.jsonl --output runs/chats-sft --resume" in ran.err


def test_resuming_nothing_is_refused(run: Callable[..., Ran]):
    ran = run("train", "sft", "chats.jsonl", *TINY, "--resume")
    assert ran.status == MISUSED
    assert "There is no run to resume in runs/chats-sft" in ran.err


def test_resuming_with_another_setting_is_refused_by_name(run: Callable[..., Ran]):
    run("train", "sft", "chats.jsonl", *SHORT)
    ran = run("train", "sft", "chats.jsonl", "--resume", "--rank", "3", "--steps", "4")
    assert ran.status == MISUSED
    assert "rank was 16, and is 3 now" in ran.err
    assert "steps" not in ran.err


def test_resuming_with_other_data_is_refused_by_name(run: Callable[..., Ran], work: Path):
    run("train", "sft", "chats.jsonl", *SHORT)
    (work / "chats.jsonl").write_text((work / "chats.jsonl").read_text() * 2)
    ran = run("train", "sft", "chats.jsonl", "--resume")
    assert ran.status == MISUSED
    assert "the contents of chats.jsonl have changed" in ran.err


def test_bad_data_is_refused_before_the_server_is_asked(
    run: Callable[..., Ran], work: Path, server: FakeServer
):
    write(work / "chats.jsonl", [{"messages": []}, {"text": "?"}])
    ran = run("train", "sft", "chats.jsonl", *SHORT)
    assert ran.status in (FAILED, MISUSED)
    assert "line 1" in ran.err
    assert "line 2" in ran.err
    assert not server.requests
    assert not (work / "runs").exists()


def test_what_cannot_be_rendered_is_refused_before_a_model_is_made(
    run: Callable[..., Ran], work: Path, server: FakeServer
):
    ran = run("train", "sft", "chats.jsonl", *SHORT, "--max-tokens", "3")
    assert ran.status in (FAILED, MISUSED)
    assert "line 6" in ran.err
    assert not [one for one in server.requests if "create_model" in one.path]
    assert not (work / "runs").exists()


BAD = {
    "--learning-rate must be a finite number above 0": ("--learning-rate", "0"),
    "--epochs cannot be combined with steps": ("--epochs", "2", "--steps", "3"),
    "--warmup must be fewer than the 3 steps": ("--warmup", "3", "--steps", "3"),
    "--warmup must be fewer than the 9 steps of the run": ("--warmup", "9", "--batch-size", "2"),
    "--eval-fraction cannot be combined with a file": (
        *("--eval-fraction", "0.5", "--eval", "chats.jsonl"),
    ),
    "--patience needs something to evaluate with": ("--patience", "2"),
    "results cannot go to 'excel'": ("--report", "excel"),
}


@pytest.mark.parametrize(("message", "words"), BAD.items(), ids=list(BAD))
def test_a_bad_setting_is_refused_under_its_own_name(
    run: Callable[..., Ran], work: Path, message: str, words: tuple[str, ...], server: FakeServer
):
    ran = run("train", "sft", "chats.jsonl", *TINY, *words)
    assert ran.status == MISUSED
    assert message in ran.err
    assert not [one for one in server.requests if "create_model" in one.path]


def test_a_model_that_the_server_does_not_have_leaves_the_folder_free(run: Callable[..., Ran]):
    ran = run("train", "sft", "chats.jsonl", "--steps", "2", "--model", "tinkex/huge")
    assert ran.status in (FAILED, MISUSED)
    assert run("train", "sft", "chats.jsonl", *SHORT).status == DONE


def test_a_reward_that_fails_says_where_and_how_to_go_on(run: Callable[..., Ran], work: Path):
    task = work / "task.py"
    task.write_text(TASK.replace("signal.raise_signal(signal.SIGINT)", "raise OSError('judge')"))
    words = ("--group-size", "2", "--max-tokens", "4", "--save-every", "1")
    ran = run("train", "rl", "task.py", *SHORT, *words)
    assert ran.status == MISUSED
    assert "reward raised OSError in line 13: judge" in ran.err
    assert "tinkex train rl task.py --output runs/task-rl --resume" in ran.err
    assert record(work, "task-rl")["status"] == "failed"


def test_a_run_stops_early_when_evaluations_get_no_better(run: Callable[..., Ran], work: Path):
    # A rate so small that nothing changes: no evaluation is better than the first.
    still = ("--learning-rate", "1e-30", "--eval-every", "1", "--patience", "2")
    ran = run(
        *("train", "sft", "chats.jsonl", *TINY, "--steps", "9", "--eval", "chats.jsonl", *still),
        *("-f", "json"),
    )
    assert ran.status == DONE, ran.err
    assert (ran.json["ended"], ran.json["step"], ran.json["used_step"]) == ("stopped early", 3, 1)
    assert record(work, "chats-sft")["status"] == "finished"
