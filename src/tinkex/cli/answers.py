"""The answers of `tinkex sample`: JSON lines in a file, or text on standard output.

Lines are appended to the file as answers arrive, each with the prompt it answers; in the end they
are sorted by prompt. A killed program leaves at most a truncated last line, which is ignored.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self, cast

from tinkex.cli.command_errors import CommandError
from tinkex.cli.output import harmless, say, text
from tinkex.new_files import replacing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import TextIO

ASKED = "asked"
ERROR = "error"
LINE = "line"
_PROMPT_COLUMNS = 50


class AnswersFile:
    """A file of answers; enter it as a context manager to append."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Mutable state: the open file, between entering and leaving.
        self._file: TextIO | None = None

    def read(self) -> list[dict[str, Any]]:
        """The answers in the file; raises CommandError for a file with other contents."""
        try:
            found = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        # Text after the last line break is a line that a killed program has not finished.
        lines = found.split("\n")[:-1]
        return [self._answer(line, number) for number, line in enumerate(lines, start=1)]

    def _answer(self, line: str, number: int) -> dict[str, Any]:
        try:
            found: object = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and ASKED in found and LINE in found:
            return cast("dict[str, Any]", found)
        raise CommandError(
            f"{self.path} exists and has other contents: line {number} is not an answer",
            "Choose another file with -o, or begin again with --overwrite.",
        )

    def replace(self, answers: Iterable[dict[str, Any]]) -> None:
        """Replace the contents with these answers, atomically."""
        new = "".join(map(_line, answers))
        if self.path.exists() and self.path.read_text(encoding="utf-8", errors="replace") == new:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(new.encode())

    def __enter__(self) -> Self:
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, answer: dict[str, Any]) -> None:
        """Append one and flush it: a killed program loses no answer."""
        assert self._file is not None, "entered first"
        self._file.write(_line(answer))
        self._file.flush()

    def end(self) -> None:
        """Sort the answers by prompt."""
        answers = self.read()
        ordered = sorted(answers, key=lambda answer: answer[LINE])
        if ordered != answers:
            self.replace(ordered)


def _line(answer: dict[str, Any]) -> str:
    return json.dumps(answer, ensure_ascii=False) + "\n"


class AnswersShown:
    """Prints answers in the order of the prompts, in `end`: until then progress is shown."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        # Mutable state: the answers, in the order of arrival.
        self._answers: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """No answers of an earlier run are known."""
        return []

    def replace(self, answers: Iterable[dict[str, Any]]) -> None:
        """Nothing to replace."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def add(self, answer: dict[str, Any]) -> None:
        """Keep one."""
        self._answers.append(answer)

    def end(self) -> None:
        """Print the answers as JSON lines or as text; failures go to standard error."""
        ordered = sorted(self._answers, key=lambda answer: answer[LINE])
        if self._as_json:
            for answer in ordered:
                print(_line(answer), end="")
            return
        for answer in ordered:
            if ERROR in answer:
                say(f"{_name(answer)} failed: {text(answer[ERROR]['message'])}")
        print("\n\n".join(_blocks([one for one in ordered if ERROR not in one])), end="")
        if any(ERROR not in one for one in ordered):
            print()


def _blocks(answers: list[dict[str, Any]]) -> Iterator[str]:
    """The texts; each with a heading where there are several."""
    several = sum(len(answer["samples"]) for answer in answers) > 1
    for answer in answers:
        for number, sample in enumerate(answer["samples"], start=1):
            which = f", sample {number}" if len(answer["samples"]) > 1 else ""
            heading = f"--- {_name(answer)}{which}: {_beginning(answer)}\n" if several else ""
            yield heading + harmless(sample["text"]).strip("\n")


def _name(answer: dict[str, Any]) -> str:
    return text(answer.get("id", f"prompt {answer[LINE]}"))


def _beginning(answer: dict[str, Any]) -> str:
    """The prompt, or its last message, in one line."""
    prompt: Any = answer.get("prompt") or answer["messages"][-1]["content"]
    words = text(" ".join(str(prompt).split()))
    return words if len(words) <= _PROMPT_COLUMNS else f"{words[: _PROMPT_COLUMNS - 3]}..."
