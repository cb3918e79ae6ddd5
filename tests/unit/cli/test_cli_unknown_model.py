"""A base model that the server does not have: said once, with what there is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tinkex.cli.commands import FAILED

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran
    from tinkex.testing import FakeServer

DATA = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}\n'


@pytest.mark.parametrize(
    "words",
    [
        ["train", "sft", "data.jsonl", "--model", "tinkex/tinny", "--steps", "1"],
        ["sample", "prompts.txt", "--model", "tinkex/tinny", "-o", "answers.jsonl"],
        ["chat", "tinkex/tinny"],
        ["data", "view", "data.jsonl", "--model", "tinkex/tinny"],
    ],
)
def test_an_unknown_model_is_said_once_with_what_there_is(
    run: Callable[..., Ran],
    server: FakeServer,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
):
    Path("data.jsonl").write_text(DATA)
    Path("prompts.txt").write_text("hi\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    ran = run(*words)
    assert ran.status == FAILED
    _, _, error = ran.err.partition("Error: ")
    assert error.count("tinkex/tinny") == 1
    assert "is not served here; there is: tinkex/tiny" in ran.err
    assert "Did you mean 'tinkex/tiny'?" in ran.err
    assert "tokenizer" not in ran.err
