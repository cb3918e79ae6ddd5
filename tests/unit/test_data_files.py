"""Reading data files: what is accepted, and every bad line by its number."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any, Literal

import pytest

from tinkex.data import (
    ChatExample,
    CompletionExample,
    PreferenceExample,
    kind_of,
    read_examples,
)
from tinkex.errors import DataError, DataProblem

if TYPE_CHECKING:
    from pathlib import Path

USER = {"role": "user", "content": "hi"}
BOT = {"role": "assistant", "content": "hello"}
CHAT = {"messages": [USER, BOT]}
GOOD = json.dumps(CHAT)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data.jsonl"


def read(
    file: Path, *lines: Any, kind: Literal["sft", "preference"] = "sft"
) -> list[ChatExample | CompletionExample] | list[PreferenceExample]:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return read_examples(file, kind)


def problems(file: Path, kind: Literal["sft", "preference"] = "sft") -> tuple[DataProblem, ...]:
    with pytest.raises(DataError) as caught:
        read_examples(file, kind)
    return caught.value.problems


def reason(file: Path, line: Any, kind: Literal["sft", "preference"] = "sft") -> str:
    """What is wrong with the second of three lines."""
    good = GOOD if kind == "sft" else json.dumps(PAIR)
    with pytest.raises(DataError) as caught:
        read(file, good, line, good, kind=kind)
    (problem,) = caught.value.problems
    assert problem.line == 2
    return problem.reason


# -- what is accepted ------------------------------------------------------------------------------


def test_a_conversation_keeps_its_messages_its_tools_and_its_line(file: Path):
    tools = [{"type": "function", "function": {"name": "add"}}]
    weighed = {**BOT, "weight": 0}
    found = read(file, "", {"messages": [USER, weighed, USER, BOT], "tools": tools, "id": 7})
    assert found == [ChatExample((USER, weighed, USER, BOT), 2, tuple(tools))]


def test_content_may_come_in_parts_and_developers_are_the_system(file: Path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (found,) = read(file, {"messages": [{"role": "developer", "content": parts}, USER, BOT]})
    assert isinstance(found, ChatExample)
    assert found.messages[0] == {"role": "system", "content": "a\nb"}


def test_an_answer_may_be_a_tool_call_alone(file: Path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    asked = {"role": "assistant", "tool_calls": [call]}
    answered = {"role": "tool", "tool_call_id": "1", "content": "2"}
    (found,) = read(file, {"messages": [USER, asked, answered, BOT]})
    assert isinstance(found, ChatExample)
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    assert found.messages[2] == answered


def test_a_prompt_and_its_completion_are_raw_text(file: Path):
    found = read(file, {"prompt": "", "completion": "x"}, {"prompt": "a", "completion": " b"})
    assert found == [CompletionExample("", "x", 1), CompletionExample("a", " b", 2)]


PAIR = {"prompt": [USER], "chosen": [BOT], "rejected": [{**BOT, "content": "no"}]}
AS_MESSAGES = ((USER,), (BOT,), ({"role": "assistant", "content": "no"},))


@pytest.mark.parametrize(
    "line",
    [
        PAIR,
        {"prompt": [USER], "chosen": "hello", "rejected": "no"},
        {
            "input": {"messages": [USER], "tools": None},
            "preferred_output": [BOT],
            "non_preferred_output": [{"role": "assistant", "content": "no"}],
        },
    ],
)
def test_preferences_come_in_three_forms(file: Path, line: dict[str, Any]):
    assert read(file, line, kind="preference") == [PreferenceExample(*AS_MESSAGES, line=1)]


def test_a_preference_between_texts_is_raw(file: Path):
    found = read(file, {"prompt": "a", "chosen": " b", "rejected": " c"}, kind="preference")
    assert found == [PreferenceExample("a", " b", " c", 1)]


def test_marks_line_ends_and_blank_lines_are_skipped_over(file: Path):
    file.write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n\r\n  \n\t\n" + GOOD.encode())
    assert [example.line for example in read_examples(file, "sft")] == [1, 5]


def test_line_separators_within_text_end_no_line(file: Path):
    text = "one\u2028two\u0085three"
    line = json.dumps({"prompt": text, "completion": "x"}, ensure_ascii=False)
    (found,) = read(file, line)
    assert found == CompletionExample(text, "x", 1)


def test_the_kind_of_a_file_is_that_of_its_first_object(file: Path):
    file.write_text(f"\n{{\n{json.dumps(PAIR)}\n{GOOD}\n")
    assert kind_of(file) == "preference"
    file.write_text(GOOD)
    assert kind_of(file) == "sft"
    file.write_text("nonsense")
    assert kind_of(file) == "sft"


# -- lines that are no objects ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"messages": [', "is no JSON: Expecting value at character 15"),
        ("{'messages': []}", "is no JSON"),
        ("hello", "is no JSON"),
        ('"hello"', "not an object"),
        ("[]", "not an object"),
        ("null", "not an object"),
        ('{"prompt": "a", "prompt": "b", "completion": "c"}', "has 'prompt' twice in one object"),
        ('{"messages": [{"role": "user", "role": "user"}]}', "has 'role' twice"),
        ('{"prompt": "a", "completion": NaN}', "has NaN, which is no JSON value"),
        ('{"prompt": "a", "completion": -Infinity}', "has -Infinity"),
        ('{"prompt": "a\x00", "completion": "b"}', "is no JSON: Invalid control character"),
        ('{"n": ' + "9" * 5000 + "}", "is no JSON that can be read"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_line_that_is_no_object_is_refused(file: Path, line: str, words: str):
    assert words in reason(file, line)


def test_bytes_that_are_no_utf_8_are_refused_with_their_place(file: Path):
    file.write_bytes(GOOD.encode() + b'\n{"prompt": "caf\xe9"}\n')
    assert problems(file) == (DataProblem(2, "is not UTF-8 at byte 16; save it as UTF-8"),)


def test_a_line_that_is_too_long_is_refused_and_the_next_one_is_read(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tinkex.data.MOST_LINE_BYTES", 2**20)
    huge = {"prompt": "x" * 2_500_000, "completion": "y"}
    assert reason(file, huge) == "is longer than 1 MiB"
    fitting = {"prompt": "x" * 1_000_000, "completion": "y"}
    assert len(read(file, fitting, GOOD)) == 2


# -- objects that are no examples ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({}, "has nothing, but needs messages, or prompt and completion"),
        ({"message": []}, "has message, but needs messages"),
        ({"prompt": "a"}, "has prompt, but needs"),
        (PAIR, "this looks like data for `tinkex train dpo`"),
        ({"messages": None}, "messages: must be a list of messages, not null"),
        ({"messages": {}}, "messages: must be a list of messages, not an object"),
        ({"messages": True}, "not true or false"),
        ({"messages": 1.5}, "not a number"),
        ({"messages": "hi"}, "not text"),
        ({"messages": []}, "messages: must not be empty"),
        ({"messages": ["hi"]}, "messages[0]: a message is an object"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role: a message's role is"),
        ({"messages": [USER]}, "messages: has no message of the assistant's to train"),
        ({"messages": [USER, {**BOT, "weight": 0}]}, "to train"),
        ({"messages": [USER, {"role": "assistant"}]}, "messages[1].content: is missing"),
        ({"messages": [USER, {**BOT, "content": None}]}, "messages[1].content: is missing"),
        ({"messages": [{"role": "user"}, BOT]}, "messages[0].content: is missing"),
        ({"messages": [USER, {**BOT, "content": ""}]}, "messages[1].content: is empty"),
        ({"messages": [USER, {**BOT, "content": 5}]}, "messages[1].content: a message's content"),
        ({"messages": [USER, {**BOT, "weight": 2}]}, "messages[1].weight: is 0 or 1, not 2"),
        ({"messages": [USER, {**BOT, "weight": True}]}, "is 0 or 1, not True"),
        ({"messages": [USER, {**BOT, "weight": 0.5}]}, "is 0 or 1, not 0.5"),
        ({"messages": [{**USER, "weight": 1}, BOT]}, "messages[0].weight: only messages of"),
        ({**CHAT, "tools": {}}, "tools: must be a list of objects"),
        ({**CHAT, "tools": ["add"]}, "tools: must be a list of objects"),
        ({"prompt": 3, "completion": "x"}, "prompt: must be text, not a number"),
        ({"prompt": "x", "completion": [BOT]}, "completion: must be text, not a list"),
        ({"prompt": "x", "completion": ""}, "completion: is empty"),
        ('{"prompt": "\\ud800", "completion": "x"}', "prompt: character 0 is half"),
    ],
)
def test_an_object_that_is_no_example_is_refused_by_the_place(file: Path, line: Any, words: str):
    assert words in reason(file, line)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (CHAT, "this looks like data for `tinkex train sft`"),
        ({"chosen": [USER, BOT], "rejected": [USER, BOT]}, "but needs prompt, chosen and rejected"),
        ({**PAIR, "rejected": PAIR["chosen"]}, "the chosen and the rejected answer are the same"),
        ({**PAIR, "chosen": []}, "chosen: must not be empty"),
        ({**PAIR, "chosen": ""}, "chosen: is empty"),
        ({**PAIR, "chosen": [BOT, USER]}, "chosen: must end with a message of the assistant's"),
        ({**PAIR, "prompt": []}, "prompt: must not be empty"),
        ({**PAIR, "prompt": None}, "prompt: must be a list of messages, not null"),
        ({**PAIR, "prompt": "text"}, "chosen: must be text, not a list"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected: is empty"),
        ({"input": [USER], "preferred_output": [BOT], "non_preferred_output": [BOT]},
         "input: is an object with messages"),
        ({"input": {"messages": [USER]}, "preferred_output": [USER], "non_preferred_output": []},
         "preferred_output: must end with"),
    ],
)  # fmt: skip
def test_a_pair_that_is_none_is_refused_by_the_place(file: Path, line: Any, words: str):
    assert words in reason(file, line, "preference")


# -- all of it at once -----------------------------------------------------------------------------


def test_every_bad_line_is_listed_and_the_first_twenty_are_shown(file: Path):
    with pytest.raises(DataError) as caught:
        read(file, *[GOOD if line % 2 else "{" for line in range(1, 61)])
    error = caught.value
    assert [problem.line for problem in error.problems] == list(range(2, 61, 2))
    lines = str(error).splitlines()
    assert lines[0] == f"{file}: 30 bad lines"
    assert lines[1].startswith("  line 2: is no JSON")
    assert len(lines) == 22
    assert lines[-1] == "  and 10 more"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems) == (str(error), error.problems)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no examples"),
        (b"\n\n  \n", "has no examples"),
        (b"\xef\xbb\xbf", "has no examples"),
        (b'[{"messages": []}]', "is a JSON array; write one object per line"),
        (b"\xef\xbb\xbf  [\n{}\n]", "is a JSON array"),
        (b'{\n  "messages": []\n}\n', "has objects over several lines"),
        ("﻿{}".encode("utf-16"), "is UTF-16; save it as UTF-8"),
    ],
)
def test_a_file_that_is_no_json_lines_says_so_once(file: Path, content: bytes, words: str):
    file.write_bytes(content)
    (problem,) = problems(file)
    assert problem.line == 0
    assert words in problem.reason


def test_a_file_that_is_not_there_or_is_a_folder_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl: cannot be read: No such file"):
        read_examples(tmp_path / "nowhere.jsonl", "sft")
    with pytest.raises(DataError, match="is a folder"):
        read_examples(tmp_path, "sft")
    with pytest.raises(DataError, match="cannot be read"):
        kind_of(str(tmp_path / "nowhere.jsonl"))
