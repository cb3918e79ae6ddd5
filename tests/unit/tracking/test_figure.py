"""Pictures: what is in them, that they are the same each time, and what cannot be drawn."""

from __future__ import annotations

import math
import re
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from tinkex.errors import InputError, MissingPackageError
from tinkex.tracking.figure import write_picture

if TYPE_CHECKING:
    from pathlib import Path

SERIES = {
    "loss": [(float(step), 3.0 / step) for step in range(1, 60)],
    "eval_loss": [(20.0, 0.5), (40.0, 0.3)],
}


@pytest.mark.parametrize("name", ["curve.svg", "curve.png", "CURVE.PNG"])
def test_the_same_numbers_give_the_same_bytes(tmp_path: Path, name: str):
    for folder in ("a", "b"):
        write_picture(SERIES, tmp_path / folder / name, title="A run")
    first = (tmp_path / "a" / name).read_bytes()
    assert first == (tmp_path / "b" / name).read_bytes()
    write_picture({**SERIES, "loss": SERIES["loss"][1:]}, tmp_path / "b" / name, title="A run")
    assert first != (tmp_path / "b" / name).read_bytes()


def test_an_svg_says_neither_when_nor_by_what_it_was_made(tmp_path: Path):
    write_picture(SERIES, tmp_path / "curve.svg", title="A run")
    text = (tmp_path / "curve.svg").read_text()
    assert text.rstrip().endswith("</svg>")
    assert "<dc:date>" not in text
    assert not re.search(r"20\d\d-\d\d-\d\d", text)


def test_a_picture_has_its_title_axes_legend_and_an_evaluation_on_top(tmp_path: Path):
    write_picture(SERIES, tmp_path / "curve.svg", title="A run")
    text = (tmp_path / "curve.svg").read_text()
    # Text is drawn as outlines, with what it says in a comment beside it.
    for words in ("A run", "step", "loss", "eval loss"):
        assert f"<!-- {words} -->" in text
    assert text.index("#d9622b") > text.index("#2f6db5")
    assert "stroke-opacity: 0.3" in text


def test_every_metric_has_a_panel_of_its_own(tmp_path: Path):
    write_picture(SERIES, tmp_path / "one.png")
    write_picture({**SERIES, "reward": [(1.0, 0.1)]}, tmp_path / "two.png")
    with Image.open(tmp_path / "one.png") as one, Image.open(tmp_path / "two.png") as two:
        assert two.size == (one.width, 2 * one.height)
        assert one.size == (1080, 480)


def test_a_run_has_the_same_colour_in_every_panel(tmp_path: Path):
    series = {f"{run}: {metric}": SERIES["loss"] for metric in "xy" for run in "ab"}
    write_picture(series, tmp_path / "curve.svg")
    text = (tmp_path / "curve.svg").read_text()
    used = set(re.findall("stroke: (#[0-9a-f]{6})", text))
    assert {"#2f6db5", "#d9622b"} <= used
    assert "#2a9d6f" not in used


def test_what_is_not_finite_is_left_out(tmp_path: Path):
    holes = [(1.0, 2.0), (2.0, math.nan), (3.0, math.inf), (4.0, 1.0)]
    write_picture({"loss": holes, "other": [(1.0, math.nan)]}, tmp_path / "holes.svg")
    write_picture({"loss": [holes[0], holes[3]]}, tmp_path / "none.svg")
    assert (tmp_path / "holes.svg").read_bytes() == (tmp_path / "none.svg").read_bytes()


@pytest.mark.parametrize("title", ["it costs $5 and $6", "$", "日本語", "a_b^{c}", "<b>&amp;"])
def test_any_title_can_be_drawn(tmp_path: Path, title: str):
    write_picture(SERIES, tmp_path / "curve.svg", title=title)
    write_picture(SERIES, tmp_path / "curve.png", title=title)
    with Image.open(tmp_path / "curve.png") as picture:
        assert picture.height > 480


@pytest.mark.parametrize(
    "points",
    [
        [(1.0, 1e308), (2.0, -1e308), (3.0, 1.0)],
        [(1.0, 1e300), (2.0, -1e300)],
        [(1.0, 5e-324)],
        [(1.0, 0.0), (2.0, 0.0)],
    ],
)
def test_any_numbers_can_be_drawn(tmp_path: Path, points: list[tuple[float, float]]):
    write_picture({"loss": points}, tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").stat().st_size > 1000


@pytest.mark.parametrize("name", ["curve.pdf", "curve", "curve.svg.gz"])
def test_another_kind_of_picture_is_refused_by_name(tmp_path: Path, name: str):
    with pytest.raises(InputError, match=r"must end in \.svg or \.png"):
        write_picture(SERIES, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_nothing_to_draw_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="no finite value"):
        write_picture({"loss": [(1.0, math.nan)]}, tmp_path / "curve.svg")
    assert not list(tmp_path.iterdir())


def test_a_picture_replaces_the_old_one_and_leaves_nothing_else(tmp_path: Path):
    (tmp_path / "curve.png").write_text("old")
    write_picture(SERIES, tmp_path / "curve.png")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]
    (tmp_path / "plain").touch()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1, "a picture is as readable as any other file"


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'tinkex\[plots\]'"):
        write_picture(SERIES, tmp_path / "curve.svg")
    assert not list(tmp_path.iterdir())


def test_looking_at_runs_imports_no_plotting_library():
    code = (
        "import sys, tinkex.tracking.progress, tinkex.tracking.sinks, tinkex.tracking.figure\n"
        "print([m for m in ('matplotlib', 'rich', 'tensorboardX', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
