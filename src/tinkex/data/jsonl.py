"""JSON Lines to examples: one object per line, UTF-8. Every bad line is found before any is used.

A byte-order mark, Windows line ends and blank lines are skipped over; everything else that is no
object, ambiguous, or not what a loop needs is refused with its line number.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from tinkex.data.example_objects import example_of, kind_of_object
from tinkex.errors import DataError, DataProblem, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinkex.chat.examples import ChatExample, CompletionExample, PreferenceExample
    from tinkex.data.example_objects import Example, Kind

MOST_LINE_BYTES = 16 * 2**20
_CHUNK_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


@overload
def read_examples(
    path: Path | str, kind: Literal["sft"]
) -> list[ChatExample | CompletionExample]: ...
@overload
def read_examples(path: Path | str, kind: Literal["preference"]) -> list[PreferenceExample]: ...
@overload
def read_examples(
    path: Path | str, kind: Kind
) -> list[ChatExample | CompletionExample] | list[PreferenceExample]: ...
def read_examples(path: Path | str, kind: Kind) -> Any:
    """The examples of a file, in order; raises DataError that has every bad line."""
    examples: list[Example] = []
    problems: list[DataProblem] = []
    for line, raw in _lines(Path(path)):
        try:
            examples.append(example_of(_object(raw), kind, line))
        except InputError as error:
            problems.append(DataProblem(line, str(error)))
    if problems:
        raise DataError(str(path), problems)
    if not examples:
        raise _unusable(path, "has no examples; each is one JSON object on a line of its own")
    return examples


def kind_of(path: Path | str) -> Kind:
    """What a file is for, by its first object; `sft` where there is none."""
    for _, raw in _lines(Path(path)):
        try:
            return kind_of_object(_object(raw))
        except InputError:
            continue
    return "sft"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers; a longer one than allowed comes cut."""
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    raw = _without_mark(raw, path)
                if raw.strip():
                    yield number, raw
                while raw and not raw.endswith(b"\n"):  # what is left of too long a line
                    raw = file.readline(_CHUNK_BYTES)
    except IsADirectoryError:
        raise _unusable(path, "is a folder; name a file of JSON Lines in it") from None
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror or error}") from error


def _without_mark(raw: bytes, path: Path) -> bytes:
    if raw.startswith(_UTF_16):
        raise _unusable(path, "is UTF-16; save it as UTF-8")
    text = raw.removeprefix(_BOM)
    if text.lstrip()[:1] == b"[":
        raise _unusable(path, "is a JSON array; write one object per line, as `jq -c '.[]'` does")
    if text.strip() == b"{":
        raise _unusable(path, "has objects over several lines; write each on one, as `jq -c` does")
    return text


def _unusable(path: Path | str, reason: str) -> DataError:
    return DataError(str(path), [DataProblem(0, reason)])


def _object(raw: bytes) -> dict[str, Any]:
    if len(raw) > MOST_LINE_BYTES:
        raise InputError(f"is longer than {MOST_LINE_BYTES // 2**20} MiB")
    try:
        found: Any = json.loads(
            raw.rstrip().decode(), object_pairs_hook=_unambiguous, parse_constant=_no_number
        )
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 at byte {error.start + 1}; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise InputError(f"is no JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise InputError("is nested too deeply") from None
    except InputError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"is no JSON that can be read: {error}") from None
    if not isinstance(found, dict):
        raise InputError("is JSON, but not an object in braces")
    return cast("dict[str, Any]", found)


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"has {twice!r} twice in one object")
    return found


def _no_number(name: str) -> Any:
    raise InputError(f"has {name}, which is no JSON value")
