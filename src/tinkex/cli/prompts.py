"""The prompts of `tinkex sample`: read from a file, all of them before anything is sent.

Training data can be asked again: members that we do not know stay unread, and an answer at the end
of the messages is left out.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from tinkex.chat.messages import readable_messages
from tinkex.errors import DataError, DataProblem, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: text, or messages; `id` is the caller's own, if there is one."""

    line: int
    content: str | list[dict[str, Any]]
    id: str | int | None = None

    def record(self) -> dict[str, Any]:
        """What an answer repeats of it."""
        kind = "prompt" if isinstance(self.content, str) else "messages"
        named = {} if self.id is None else {"id": self.id}
        return {"line": self.line, **named, kind: self.content}

    def fingerprint(self, settings: Mapping[str, Any]) -> str:
        """Tells apart what was asked, and how."""
        asked = json.dumps([self.record(), dict(settings)], sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()[:16]


def given_prompts(texts: Sequence[str], *, chat: bool) -> list[Prompt]:
    """Prompts from the command line; raises InputError for one that is empty."""
    return [Prompt(number, _text(text, chat)) for number, text in enumerate(texts, start=1)]


def read_prompts(path: Path, *, chat: bool) -> list[Prompt]:
    """The prompts of a file; raises DataError with every line that is none.

    With `chat`, text is what a user says instead of the beginning of a text.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8: save the file as UTF-8"
        raise DataError(str(path), [DataProblem(0, why)]) from None
    prompts: list[Prompt] = []
    problems: list[DataProblem] = []
    for number, line in _filled(lines):
        try:
            prompts.append(_prompt(line, number, path.suffix in _JSON_LINES, chat=chat))
        except InputError as error:
            problems.append(DataProblem(number, str(error)))
    problems += _repeated(prompts)
    if not lines or not (prompts or problems):
        problems = [DataProblem(0, "there is no prompt in it")]
    if problems:
        raise DataError(str(path), sorted(problems, key=lambda problem: problem.line))
    return prompts


def _filled(lines: list[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _prompt(line: str, number: int, is_json: bool, *, chat: bool) -> Prompt:
    value: object = _parsed(line) if is_json else line
    if isinstance(value, str):
        return Prompt(number, _text(value, chat))
    if not isinstance(value, dict):
        raise InputError("a prompt is a string, or an object with prompt or messages")
    members = cast("dict[str, Any]", value)
    if ("prompt" in members) == ("messages" in members):
        raise InputError("give either prompt or messages")
    if not isinstance(name := members.get("id"), str | int | None) or isinstance(name, bool):
        raise InputError("must be text or a whole number", "id")
    if "prompt" in members:
        if not isinstance(members["prompt"], str):
            raise InputError("must be text", "prompt")
        return Prompt(number, _text(members["prompt"], chat), name)
    return Prompt(number, _messages(members["messages"]), name)


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON: {error}") from None


def _text(text: str, chat: bool) -> str | list[dict[str, Any]]:
    if not text.strip():
        raise InputError("is empty", "prompt")
    return readable_messages([{"role": "user", "content": text}]) if chat else text


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise InputError("must be a list of messages", "messages")
    messages = readable_messages(cast("list[Any]", value))
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise InputError("has nothing but answers", "messages")
    return messages


def _repeated(prompts: list[Prompt]) -> list[DataProblem]:
    seen: dict[str | int, int] = {}
    problems: list[DataProblem] = []
    for prompt in prompts:
        if prompt.id is None:
            continue
        if prompt.id in seen:
            why = f"id: {prompt.id!r} is the id of line {seen[prompt.id]}, too"
            problems.append(DataProblem(prompt.line, why))
        seen.setdefault(prompt.id, prompt.line)
    return problems
