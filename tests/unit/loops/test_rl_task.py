"""What a task's file may say, and what is said about one that cannot be used."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tinkex.errors import InputError
from tinkex.loops.task import load_task

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """
from helper import PROMPTS

def prompts():
    return PROMPTS

def reward(prompt, answer):
    return len(answer)
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / "task.py"


def test_a_task_has_prompts_and_judges_answers(task: Path):
    task.write_text(GOOD.replace("from helper import PROMPTS", 'PROMPTS = ["hello", "you"]'))
    loaded = load_task(task)
    assert loaded.prompts == ["hello", "you"]
    assert loaded.eval_prompts == []
    assert loaded.reward("hello", "four") == 4.0


def test_a_task_imports_from_its_own_folder(task: Path):
    (task.parent / "helper_of_a_task.py").write_text('PROMPTS = ["from next door"]')
    task.write_text(GOOD.replace("helper", "helper_of_a_task"))
    assert load_task(task).prompts == ["from next door"]


def test_prompts_may_be_messages(task: Path):
    messages = '[{"role": "user", "content": "hi"}]'
    task.write_text(
        f"def prompts(): return [{messages}]\ndef reward(p, a): return p[0]['content'] == a\n"
        f"def eval_prompts(): return [{messages}, 'text']\n"
    )
    loaded = load_task(task)
    assert loaded.prompts == [[{"role": "user", "content": "hi"}]]
    assert loaded.eval_prompts[1] == "text"
    assert loaded.reward(loaded.prompts[0], "hi") == 1.0


BAD = {
    "def reward(p, a): return 0": r"has no function prompts\(\)",
    "def prompts(): return ['a']": r"has no function reward\(\)",
    "prompts = reward = 3": r"has no function reward\(\)",
    "def prompts(": "the file raised SyntaxError",
    "1 / 0": "the file raised ZeroDivisionError in line 1: division by zero",
    "def reward(p, a): return 0\ndef prompts(): return []": "must return a list with at least one",
    "def reward(p, a): return 0\ndef prompts(): return 'abc'": "must return a list",
    "def reward(p, a): return 0\ndef prompts(): return ['a', '']": r"\(\)\[1\]: must be text",
    "def reward(p, a): return 0\ndef prompts(): return ['a', 3]": r"prompts\(\)\[1\]: must be text",
    "def reward(p, a): return 0\ndef prompts(): return [[{'role': 'x'}]]": "role is one of",
    "def reward(p, a): return 0\ndef prompts(): raise OSError('disk')": "prompts raised OSError",
    "def reward(p, a): return a[0]\ndef prompts(): return ['a']": "IndexError in line 1: string",
    "def reward(p): return 0\ndef prompts(): return ['a']": "reward raised TypeError",
    "def reward(p, a): return None\ndef prompts(): return ['a']": "a finite number, not None",
    "def reward(p, a): return float('nan')\ndef prompts(): return ['a']": "number, not nan",
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=list(BAD.values()))
def test_a_bad_task_is_refused_with_the_reason(task: Path, text: str, message: str):
    task.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load_task(task)
    assert str(task) in str(caught.value)


def test_a_task_that_is_not_there_is_named(task: Path):
    with pytest.raises(InputError, match=r"task\.py: there is no such file"):
        load_task(task)


def test_a_task_that_is_no_python_is_refused(tmp_path: Path):
    (tmp_path / "task.txt").write_text("")
    with pytest.raises(InputError, match=r"its name must end in \.py"):
        load_task(tmp_path / "task.txt")
