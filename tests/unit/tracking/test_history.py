"""The file of a run's numbers: read while it grows, after a kill, with numbers that are none."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING

import pytest

from tinkex.errors import InputError
from tinkex.testing import FakeClock
from tinkex.tracking.history import METRICS, drop_torn_line, follow, keep_until, read_metrics
from tinkex.tracking.history import write_line as line

if TYPE_CHECKING:
    from pathlib import Path


def written(folder: Path, text: str) -> Path:
    (folder / METRICS).write_text(text)
    return folder


def test_rows_come_back_as_they_were_written(tmp_path: Path):
    written(tmp_path, line(1, {"loss": 2.5, "tokens": 7}) + line(2, {"loss": 1.5, "eval_loss": 2}))
    assert read_metrics(tmp_path) == [
        {"step": 1, "loss": 2.5, "tokens": 7},
        {"step": 2, "loss": 1.5, "eval_loss": 2},
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_null_in_the_file_and_nan_to_the_reader(
    tmp_path: Path, value: float
):
    text = line(1, {"loss": value})
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "loss": None}
    assert math.isnan(read_metrics(written(tmp_path, text))[0]["loss"])


def test_a_torn_last_line_is_not_there_yet(tmp_path: Path):
    written(tmp_path, line(1, {"loss": 2.5}) + '{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.5}]


def test_a_torn_last_line_is_cut_off_and_nothing_else(tmp_path: Path):
    written(tmp_path, line(1, {"loss": 2.5}) + '{"step": 2, "lo')
    drop_torn_line(tmp_path / METRICS)
    drop_torn_line(tmp_path / METRICS)
    assert (tmp_path / METRICS).read_text() == line(1, {"loss": 2.5})


@pytest.mark.parametrize("length", [1, 65535, 65536, 65537, 200_000])
def test_a_torn_line_of_any_length_is_cut_off(tmp_path: Path, length: int):
    whole = line(1, {"loss": 2.5})
    for kept in ("", whole, whole * 5000):
        written(tmp_path, kept + "x" * length)
        drop_torn_line(tmp_path / METRICS)
        assert (tmp_path / METRICS).read_text() == kept


def test_a_run_that_has_not_begun_has_no_rows(tmp_path: Path):
    (tmp_path / "run.json").write_text("{}")
    assert read_metrics(tmp_path) == []


def test_words_and_flags_are_not_for_plotting(tmp_path: Path):
    written(tmp_path, '{"step": 1, "loss": 1, "note": "hi", "saved": true, "list": [1]}\n')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1}]


@pytest.mark.parametrize(
    "bad",
    [
        "not json",
        "[1, 2]",
        "{}",
        '{"step": "one"}',
        '{"step": null}',
        '{"step": true}',
        '{"step": 1e999}',
        '{"step": ' + "9" * 400 + "}",
        "[" * 100_000,
        "",
    ],
    ids=["words", "list", "empty", "text", "null", "flag", "infinite", "huge", "deep", "blank"],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, bad: str):
    written(tmp_path, line(1, {"loss": 1.0}) + bad + "\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl:2: is not"):
        read_metrics(tmp_path)


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path):
    (tmp_path / METRICS).write_bytes(b'{"step": 1, "\xff": 2}\n')
    with pytest.raises(InputError, match=":1: is not a line of JSON"):
        read_metrics(tmp_path)


def test_a_folder_that_is_no_runs_is_refused_by_name(tmp_path: Path):
    with pytest.raises(InputError, match=f"{tmp_path} is not the folder of a run"):
        read_metrics(tmp_path)
    with pytest.raises(InputError, match="there is no folder"):
        read_metrics(tmp_path / "nowhere")


def test_going_on_from_a_step_drops_the_later_lines_and_keeps_the_others_as_they_are(
    tmp_path: Path,
):
    first = '{"step": 1,   "loss": 2.5, "note": "kept"}\n'
    written(tmp_path, first + line(2, {"loss": 2.0}) + line(3, {"loss": 1.0}) + '{"st')
    keep_until(tmp_path, 2)
    assert (tmp_path / METRICS).read_text() == first + line(2, {"loss": 2.0})
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]
    keep_until(tmp_path, -1)
    assert (tmp_path / METRICS).read_text() == ""


def test_going_on_in_a_folder_without_numbers_writes_nothing(tmp_path: Path):
    keep_until(tmp_path, 2)
    assert not list(tmp_path.iterdir())


# -- following -------------------------------------------------------------------------------------


def followed(folder: Path, *changes: str | None) -> list[list[int]]:
    """The steps seen in each look; before every further look the file gets the next content."""

    async def look() -> list[list[int]]:
        looks: list[list[int]] = [[]]
        waiting = list(changes)
        clock = FakeClock()
        async with clock.running():
            rows = follow(folder, clock)
            async for row in rows:
                if row is not None:
                    looks[-1].append(int(row["step"]))
                elif not waiting:
                    break
                else:
                    _change(folder, waiting.pop(0))
                    looks.append([])
            await rows.aclose()
        return looks

    return asyncio.run(look())


def _change(folder: Path, text: str | None) -> None:
    if text is None:
        keep_until(folder, 1)
    else:
        with (folder / METRICS).open("a") as file:
            file.write(text)


def test_a_run_that_is_being_written_is_followed_line_by_line(tmp_path: Path):
    written(tmp_path, line(1, {"loss": 3.0}))
    second = line(2, {"loss": 2.0})
    looks = followed(tmp_path, second[:9], second[9:] + line(3, {"loss": 1.0}), "")
    assert looks == [[1], [], [2, 3], []]


def test_a_run_is_followed_from_before_its_first_step(tmp_path: Path):
    (tmp_path / "run.json").write_text("{}")
    assert followed(tmp_path, line(1, {"loss": 3.0})) == [[], [1]]


def test_a_resumed_run_is_followed_from_where_it_went_back_to(tmp_path: Path):
    written(tmp_path, "".join(line(step, {"loss": 3.0}) for step in (1, 2, 3)))
    again = line(2, {"loss": 2.9}) + line(3, {"loss": 2.8})
    assert followed(tmp_path, None, again) == [[1, 2, 3], [], [2, 3]]


def test_a_file_that_was_cut_in_place_is_followed_from_its_new_end(tmp_path: Path):
    lines = [line(step, {"loss": 3.0}) for step in (1, 2, 3)]
    written(tmp_path, "".join(lines))

    async def look() -> list[int]:
        seen: list[int] = []
        rows = follow(tmp_path, clock := FakeClock())
        async with clock.running():
            async for row in rows:
                if row is not None:
                    seen.append(int(row["step"]))
                elif len(seen) == 3:
                    written(tmp_path, lines[0] + line(2, {"loss": 1.0}))
                    seen.append(0)
                else:
                    break
            await rows.aclose()
        return seen

    assert asyncio.run(look()) == [1, 2, 3, 0, 2]
