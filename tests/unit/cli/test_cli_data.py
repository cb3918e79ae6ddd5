"""`tinkex data`: what is trained can be seen, and what cannot be trained is listed."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tinkex.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran
    from tinkex.testing import FakeServer

pytestmark = pytest.mark.usefixtures("server")

MODEL = ("--model", "tinkex/tiny")
CHAT = {
    "messages": [
        {"role": "user", "content": "hé?"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "two"},
    ]
}
RAW = {"prompt": "Q:", "completion": " A"}
PAIR = {"prompt": "Q:", "chosen": " A", "rejected": " B"}
SHOWN = """\
--- line 1: 55 tokens, 8 trained
<|im_start|>user
hé?<|im_end|>
<|im_start|>assistant
[[one<|im_end|>]]
<|im_start|>user
and?<|im_end|>
<|im_start|>assistant
[[two<|im_end|>]]

--- line 2: 5 tokens, 3 trained
Q:[[ A<|endoftext|>]]

2 examples, 60 tokens, 11 of them trained, the longest has 55
"""


def write(*lines: Any) -> str:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    Path("data.jsonl").write_text("\n".join(texts) + "\n")
    return "data.jsonl"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *words: str, **settings: str) -> str:
    """What a command writes to a terminal of 256 colours."""
    for name, value in {"TERM": "xterm-256color", **settings}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        assert main(list(words)) == 0
    return terminal.getvalue()


# -- view ----------------------------------------------------------------------------------------


def test_what_is_trained_stands_in_brackets_where_there_is_no_colour(run: Callable[..., Ran]):
    ran = run("data", "view", write(CHAT, RAW), *MODEL)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == SHOWN


def test_only_the_last_answer_can_be_trained(run: Callable[..., Ran]):
    ran = run("data", "view", write(CHAT), *MODEL, "--train-on", "last")
    assert "\none<|im_end|>\n" in ran.out
    assert "[[two<|im_end|>]]" in ran.out


def test_a_terminal_gets_colours_and_no_brackets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = on_a_terminal(monkeypatch, "data", "view", write(CHAT), *MODEL)
    assert "\x1b[1;32mone<|im_end|>\x1b[0m" in out
    assert "[[" not in out


@pytest.mark.parametrize("settings", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_without_colours_gets_brackets(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
):
    assert on_a_terminal(monkeypatch, "data", "view", write(CHAT, RAW), *MODEL, **settings) == SHOWN


def test_without_rich_brackets_do(monkeypatch: pytest.MonkeyPatch):
    for name in ("rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    assert on_a_terminal(monkeypatch, "data", "view", write(CHAT, RAW), *MODEL) == SHOWN


def test_json_has_tokens_weights_and_pieces_of_each_example(run: Callable[..., Ran]):
    found = run("data", "view", write(RAW, CHAT), *MODEL, "--format", "json").json
    assert found["examples"][0] == {
        "line": 1,
        "tokens": [81, 58, 32, 65, 256],
        "weights": [0.0, 0.0, 1.0, 1.0, 1.0],
        "pieces": ["Q", ":", " ", "A", "<|endoftext|>"],
    }
    assert found["summary"] == {"examples": 2, "tokens": 60, "trained_tokens": 11, "longest": 55}


def test_pairs_show_both_answers(run: Callable[..., Ran]):
    file = write(PAIR)
    ran = run("data", "view", file, *MODEL)
    assert "--- line 1, chosen: 5 tokens, 3 trained\nQ:[[ A<|endoftext|>]]\n" in ran.out
    assert "--- line 1, rejected: 5 tokens, 3 trained\nQ:[[ B<|endoftext|>]]\n" in ran.out
    (example,) = run("data", "view", file, *MODEL, "-f", "json").json["examples"]
    assert example["line"] == 1
    assert example["rejected"]["pieces"] == ["Q", ":", " ", "B", "<|endoftext|>"]


def test_a_limit_holds_for_what_is_shown_and_not_for_what_is_counted(run: Callable[..., Ran]):
    file = write(*[RAW] * 7)
    shown = [run("data", "view", file, *MODEL, "--limit", n).out for n in (2, 0)]
    assert [text.count("--- line") for text in shown] == [2, 7]
    assert run("data", "view", file, *MODEL).out.count("--- line") == 5
    assert all("7 examples, 35 tokens" in text for text in shown)


def test_text_cannot_steer_the_terminal(run: Callable[..., Ran]):
    evil = {"prompt": "a\u001b]0;owned\u0007", "completion": "b\tc\u202e"}
    out = run("data", "view", write(evil), *MODEL).out
    assert "a\\x1b]0;owned\\x07[[b\tc\\u202e<|endoftext|>]]" in out


# -- check ---------------------------------------------------------------------------------------


def test_good_data_is_counted(run: Callable[..., Ran]):
    ran = run("data", "check", write(CHAT, RAW), *MODEL)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.split() == [
        *("Examples:", "2", "Tokens:", "60", "Trained", "tokens:", "11", "Longest:", "55")
    ]
    found = run("data", "check", "data.jsonl", *MODEL, "-f", "json").json
    assert found["problems"] == []
    assert found["summary"]["trained_tokens"] == 11


@pytest.mark.parametrize("verb", ["view", "check"])
def test_every_bad_line_is_listed_and_nothing_is_asked_of_a_server(
    run: Callable[..., Ran], server: FakeServer, verb: str
):
    ran = run("data", verb, write(CHAT, "{", {"messages": []}, RAW), *MODEL)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.splitlines() == [
        "Error: The data cannot be used",
        "  data.jsonl: 2 bad lines",
        "    line 2: is no JSON: Expecting property name enclosed in double quotes at character 2",
        "    line 3: messages: must not be empty",
        "  Correct these lines and run the command again.",
    ]
    assert not server.requests


def test_the_next_step_fits_what_is_wrong_with_the_file(run: Callable[..., Ran]):
    def last(name: str) -> str:
        return run("data", "check", name, *MODEL).err.splitlines()[-1].strip()

    assert last(write("nonsense")) == "Correct this line and run the command again."
    assert last("nothing.jsonl") == "Check the path of the file."
    Path("empty.jsonl").touch()
    assert last("empty.jsonl") == "Correct the file, or name another one."


def test_json_lists_every_bad_line_too(run: Callable[..., Ran]):
    ran = run("data", "check", write(RAW, *["{"] * 30), *MODEL, "-f", "json")
    assert ran.status == 1
    assert [problem["line"] for problem in ran.json["problems"]] == list(range(2, 32))
    assert "and 10 more" in ran.err


def test_what_the_model_cannot_take_is_listed_as_well(run: Callable[..., Ran]):
    long = {"prompt": "a", "completion": "b" * 50_000}
    forged = {"messages": [{"role": "user", "content": "<|im_end|>"}, CHAT["messages"][1]]}
    ran = run("data", "check", write(RAW, long, forged), *MODEL)
    assert ran.status == 1
    assert "line 2: has 50002 tokens, more than" in ran.err
    assert "line 3: messages[0].content: contains <|im_end|>" in ran.err
    ran = run("data", "check", write(RAW), *MODEL, "--max-tokens", "4")
    assert "line 1: has 5 tokens, more than 4" in ran.err


def test_the_kind_can_be_said(run: Callable[..., Ran]):
    ran = run("data", "check", write(RAW), *MODEL, "--kind", "preference")
    assert "line 1: has completion, prompt, but needs prompt, chosen and rejected" in ran.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nowhere.jsonl",), "nowhere.jsonl: cannot be read: No such file or directory"),
        ((".",), ".: is a folder"),
        (("empty.jsonl",), "empty.jsonl: has no examples"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    run: Callable[..., Ran], words: tuple[str, ...], told: str
):
    Path("empty.jsonl").touch()
    ran = run("data", "check", *words, *MODEL)
    assert ran.status == 1
    assert told in ran.err


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("data.jsonl", "--train-on", "first"),
        ("data.jsonl", "--max-tokens", "1"),
        ("data.jsonl", "--max-tokens", "many"),
        ("data.jsonl", "--kind", "dpo"),
    ],
)
def test_a_misuse_says_so(run: Callable[..., Ran], words: tuple[str, ...]):
    assert run("data", "view", *words).status == 2


def test_a_model_that_nobody_has_is_named(run: Callable[..., Ran]):
    ran = run("data", "view", write(RAW), "--model", "tinkex/huge")
    assert ran.status == 1
    assert "'tinkex/huge' is not served here; there is: tinkex/tiny" in ran.err
