"""`tinkex demo` where it is done already, and the data that it trains on."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tinkex.chat import ChatExample
from tinkex.cli.commands import DONE, MISUSED
from tinkex.cli.demo import HELD_OUT, PROMPTS, TRAINING
from tinkex.cli.main import main
from tinkex.config import DEFAULT_MODEL
from tinkex.data import read_examples
from tinkex.loops import SftSettings
from tinkex.loops.run_folder import Record, RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran

    Run = Callable[..., Ran]

STEPS = 32


@pytest.fixture
def story() -> dict[str, Any]:
    """What a demonstration has left in `runs/demo`."""
    folder = Path("runs/demo")
    (folder / "adapter").mkdir(parents=True)
    (folder / "curve.svg").write_text("<svg/>")
    rows = [{"step": 0, "eval_loss": 4.6}]
    rows += [{"step": step, "loss": 4.5 - 0.07 * step} for step in range(1, STEPS)]
    rows += [{"step": STEPS, "loss": 2.2, "eval_loss": 1.97}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = {
        "steps": STEPS,
        "model": "a model",
        "path": "tinker://run/sampler_weights/step-000032",
        "data": "runs/pirate.jsonl",
        "held_out_loss": {"before": 4.6, "after": 1.97},
        "answers": [
            {"prompt": prompt, "before": "Plain words. " * 12, "after": "Arr! " * 30}
            for prompt in PROMPTS
        ],
        "pictures": ["curve.svg"],
    }
    (folder / "demo.json").write_text(json.dumps(made))
    return made


def test_a_demo_that_is_done_is_shown_again_in_eighty_columns(run: Run, story: dict[str, Any]):
    ran = run("demo")
    assert (ran.status, ran.err) == (DONE, "")
    told, _, commands = ran.out.partition("Try next:")
    assert max(map(len, told.splitlines())) <= 80
    assert "\033" not in ran.out
    for prompt in PROMPTS:
        assert f"\n{prompt}\n" in told
    assert told.count("  before  ") == told.count("  after   ") == len(PROMPTS)
    assert "4.60 -> 1.97" in told
    assert "eval loss" in told  # the legend of the curve
    assert "Picture   runs/demo/curve.svg\n" in told
    for command in (" chat runs/demo\n", " train sft runs/pirate.jsonl ", " serve --no-auth\n"):
        assert command in commands
    assert not Path("tinkex-data").exists()


def test_the_same_as_json(run: Run, story: dict[str, Any]):
    told = run("demo", "-f", "json").json
    assert {name: told[name] for name in story} == story
    assert len(told["next"]) == 3


def test_commands_name_the_embedded_server_where_another_is_configured(
    run: Run, story: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    commands = run("demo", "-f", "json").json["next"]
    assert all(command.startswith("TINKER_BASE_URL=embedded ") for command in commands)


class ColourTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("story")
@pytest.mark.parametrize("no_colour", [False, True])
def test_a_terminal_gets_colours_unless_it_asks_for_none(
    monkeypatch: pytest.MonkeyPatch, no_colour: bool
):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    terminal = ColourTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["demo"]) == DONE
    assert f"{PROMPTS[0]}" in terminal.getvalue()
    assert ("\033[" in terminal.getvalue()) is not no_colour


def test_a_run_with_other_settings_is_refused_before_a_server_starts(run: Run):
    folder = RunFolder(Path("runs/demo"))
    folder.make()
    settings = SftSettings(
        model=DEFAULT_MODEL, steps=STEPS, learning_rate=1e-3, rank=8, save_every=4
    )
    folder.write(
        Record(
            kind="sft",
            model=DEFAULT_MODEL,
            title="a run",
            settings=asdict(settings),
            files={},
            rendered="",
            steps=STEPS,
            version="1",
            began=0.0,
        )
    )
    (folder.path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    ran = run("demo", "--steps", "2")
    assert ran.status == MISUSED
    assert "steps was 32, and is 2 now" in ran.err
    assert not Path("tinkex-data").exists()


@pytest.mark.parametrize("steps", ["0", "-1", "x"])
def test_a_number_of_steps_that_is_none_is_a_misuse(run: Run, steps: str):
    assert run("demo", "--steps", steps).status == MISUSED


def test_nothing_that_is_asked_afterwards_was_trained_on():
    training, held_out = (read_examples(path, "sft") for path in (TRAINING, HELD_OUT))
    assert (len(training), len(held_out)) == (64, 8)
    asked: list[str] = []
    for example in (*training, *held_out):
        assert isinstance(example, ChatExample)
        assert [message["role"] for message in example.messages] == ["user", "assistant"]
        asked.append(example.messages[0]["content"])
    assert len(set(asked)) == 72
    assert not set(PROMPTS) & set(asked)
