"""Answers of `tinkex sample` on standard output, in the order of the prompts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tinkex.cli.answers_file import ERROR, LINE
from tinkex.cli.output import harmless, say, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PROMPT_COLUMNS = 50


class AnswersShown:
    """Keeps answers until `end`, so that they do not run into the progress on the terminal."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        # Mutable state: the answers, in the order in which they came.
        self._answers: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Nothing is known from an earlier run."""
        return []

    def replace(self, answers: Iterable[dict[str, Any]]) -> None:
        """There is nothing to replace."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def add(self, answer: dict[str, Any]) -> None:
        """Keep one."""
        self._answers.append(answer)

    def end(self) -> None:
        """Print them: as JSON lines, or as text; failures go to standard error."""
        ordered = sorted(self._answers, key=lambda answer: answer[LINE])
        if self._as_json:
            for answer in ordered:
                print(json.dumps(answer, ensure_ascii=False))
            return
        for answer in ordered:
            if ERROR in answer:
                say(f"{_name(answer)} failed: {text(answer[ERROR]['message'])}")
        print("\n\n".join(_blocks([one for one in ordered if ERROR not in one])), end="")
        if any(ERROR not in one for one in ordered):
            print()


def _blocks(answers: list[dict[str, Any]]) -> Iterator[str]:
    """The texts; with a line above each where there are several."""
    several = sum(len(answer["samples"]) for answer in answers) > 1
    for answer in answers:
        for number, sample in enumerate(answer["samples"], start=1):
            which = f", sample {number}" if len(answer["samples"]) > 1 else ""
            heading = f"--- {_name(answer)}{which}: {_beginning(answer)}\n" if several else ""
            yield heading + harmless(sample["text"]).strip("\n")


def _name(answer: dict[str, Any]) -> str:
    return text(answer.get("id", f"prompt {answer[LINE]}"))


def _beginning(answer: dict[str, Any]) -> str:
    """The prompt, or the last message of it, in a line."""
    prompt: Any = answer.get("prompt") or answer["messages"][-1]["content"]
    words = text(" ".join(str(prompt).split()))
    return words if len(words) <= _PROMPT_COLUMNS else f"{words[: _PROMPT_COLUMNS - 3]}..."
