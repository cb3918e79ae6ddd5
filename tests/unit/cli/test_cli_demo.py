"""`tinkex demo` where it is done already, and the data that it trains on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tinkex.chat import ChatExample
from tinkex.cli.main import DONE, MISUSED
from tinkex.data import read_examples
from tinkex.demo import HELD_OUT, PROMPTS, TRAINING

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
    assert "runs/demo/curve.svg" in told
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
