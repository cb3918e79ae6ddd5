"""The file of answers that `tinkex sample` writes: JSON lines, added to as answers come.

A line is there completely or is cut off, and whoever goes on with the file cuts that one away.
While it is written its lines stand in the order in which they came; each says which one it answers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self, cast

from tinkex.cli.failures import CommandError
from tinkex.tracking.atomic_write import replacing

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import TextIO

ASKED = "asked"
ERROR = "error"
LINE = "line"


class AnswersFile:
    """One such file; use it as a context manager to add to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Mutable state: the open file, between entering and leaving.
        self._file: TextIO | None = None

    def read(self) -> list[dict[str, Any]]:
        """What it has; raises CommandError for a file that holds something else."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        # What follows the last line break was cut off by whatever ended the writer.
        lines = text.split("\n")[:-1]
        return [self._answer(line, number) for number, line in enumerate(lines, start=1)]

    def _answer(self, line: str, number: int) -> dict[str, Any]:
        try:
            found: object = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and ASKED in found and LINE in found:
            return cast("dict[str, Any]", found)
        raise CommandError(
            f"{self.path} is there and holds something else: line {number} is no answer",
            "Choose another file with -o, or begin again with --overwrite.",
        )

    def replace(self, answers: Iterable[dict[str, Any]]) -> None:
        """Let it have these and nothing else, whole or not at all."""
        text = "".join(map(_line, answers))
        if self.path.exists() and self.path.read_text(encoding="utf-8", errors="replace") == text:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(text.encode())

    def __enter__(self) -> Self:
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, answer: dict[str, Any]) -> None:
        """Add one, and let it reach the system: a killed program loses none."""
        assert self._file is not None, "entered first"
        self._file.write(_line(answer))
        self._file.flush()

    def end(self) -> None:
        """Put the answers into the order of the prompts."""
        answers = self.read()
        ordered = sorted(answers, key=lambda answer: answer[LINE])
        if ordered != answers:
            self.replace(ordered)


def _line(answer: dict[str, Any]) -> str:
    return json.dumps(answer, ensure_ascii=False) + "\n"
