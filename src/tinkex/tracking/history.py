"""The metrics of a run in its folder: `metrics.jsonl`, one JSON object per step.

The file may grow while it is read, and its writer may have been killed in the middle of a line, so
an unfinished last line is ignored. JSON has neither NaN nor infinity; both are written as null and
read as NaN.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, cast

from tinkex.errors import InputError
from tinkex.new_files import replacing
from tinkex.tracking.run_info import RUN

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from pathlib import Path

    from tinkex.clock import Clock

METRICS = "metrics.jsonl"
# Short enough to look live, long enough to cost nothing.
_LOOK_EVERY_S = 0.5
_TAIL_BYTES = 65536


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Every finished line, in order; none for a run without a step.

    Raises InputError when the folder is not a run's, or a line cannot be read.
    """
    _check_folder(folder)
    path = folder / METRICS
    return [_row(raw, f"{path}:{at}") for at, raw in enumerate(_lines(path), 1)]


async def follow(folder: Path, clock: Clock) -> AsyncGenerator[dict[str, float] | None]:
    """The existing lines, then each new one; None whenever there is no new line yet.

    Never ends by itself: the caller may stop at a None. When the file is replaced by a shorter one,
    as resuming does, the lines that differ from earlier ones follow, so steps may decrease.
    """
    _check_folder(folder)
    path, given, offset, file_id = folder / METRICS, list[bytes](), 0, None
    while True:
        if (now := _identity(path)) != file_id or _size(path) < offset:
            lines = _lines(path)
            common = _common(given, lines)
            given, new = lines[:common], lines[common:]
            offset, file_id = sum(map(len, given)), now
        else:
            new = _lines(path, offset)
        for raw in new:
            offset += len(raw)
            given.append(raw)
            yield _row(raw, f"{path}:{len(given)}")
        yield None
        await clock.sleep(_LOOK_EVERY_S)


def write_line(step: int, values: Mapping[str, float]) -> str:
    """One line of the file, with its newline."""
    row = {"step": step, **{name: _writable(value) for name, value in values.items()}}
    return json.dumps(row, allow_nan=False) + "\n"


def keep_until(folder: Path, step: int) -> None:
    """Drop the lines of later steps, atomically: the run continues from `step`."""
    path = folder / METRICS
    lines = _lines(path)
    kept = [raw for at, raw in enumerate(lines, 1) if _row(raw, f"{path}:{at}")["step"] <= step]
    if path.exists():
        with replacing(path) as file:
            file.writelines(kept)


def drop_torn_line(path: Path) -> None:
    """Remove the unfinished last line of a killed writer, so that the next line is separate."""
    size = end = _size(path)
    if size == 0:
        return
    with path.open("r+b") as file:
        newline = -1
        while newline < 0 < end:
            start = max(end - _TAIL_BYTES, 0)
            file.seek(start)
            newline, end = file.read(end - start).rfind(b"\n"), start
        if end + newline + 1 < size:
            file.truncate(end + newline + 1)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    if not (folder / METRICS).exists() and not (folder / RUN).exists():
        raise InputError(f"{folder} is not the folder of a run: it has neither {METRICS} nor {RUN}")


def _lines(path: Path, offset: int = 0) -> list[bytes]:
    """The finished lines from a byte on, with their newlines; none of a missing file."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return []
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


def _identity(path: Path) -> int | None:
    """The inode; a replaced file has another one."""
    return path.stat().st_ino if path.exists() else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _common(before: list[bytes], now: list[bytes]) -> int:
    """How many lines are the same from the start on."""
    pairs = enumerate(zip(before, now, strict=False))
    return next((at for at, (old, new) in pairs if old != new), min(len(before), len(now)))


def _row(raw: bytes, where: str) -> dict[str, float]:
    try:
        found: object = json.loads(raw)
    except (ValueError, RecursionError):  # also what is no UTF-8
        raise InputError("is not a line of JSON; was the file edited?", where) from None
    values = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    numbers = {
        name: number for name, value in values.items() if (number := _read(value)) is not None
    }
    if not math.isfinite(numbers.get("step", math.nan)):
        raise InputError('is not an object with a number as its "step"', where)
    return numbers


def _read(value: object) -> float | None:
    """The number; NaN for null, None for a value that is not a number."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else math.nan
    except OverflowError:  # an integer beyond every float
        return math.nan


def _writable(value: float) -> float | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
