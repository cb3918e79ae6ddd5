"""`tinkex run plot`: in the terminal, as a picture, several runs, and what cannot be plotted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tinkex.cli.commands import DONE, FAILED, MISUSED
from tinkex.tracking.history import METRICS, write_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran


def made(name: str, *, steps: int = 40, scale: float = 1.0, **more: float) -> Path:
    """A run's folder below the one that the test works in."""
    folder = Path(name)
    folder.mkdir(parents=True)
    rows = [
        {"loss": scale * 3.0 / step, "tokens": 64, **more}
        | ({"eval_loss": scale * 0.5} if step % 10 == 0 else {})
        for step in range(1, steps + 1)
    ]
    lines = [write_line(step, row) for step, row in enumerate(rows, 1)]
    (folder / METRICS).write_text("".join(lines))
    return folder


def test_a_run_is_plotted_in_eighty_columns_without_colour(run: Callable[..., Ran]):
    ran = run("run", "plot", made("runs/a"))
    assert (ran.status, ran.err) == (DONE, "")
    lines = ran.out.splitlines()
    assert lines[0].split() == ["⣀⣀", "loss", "◆", "eval", "loss"]
    assert ran.out.count("◆") == 1 + 4
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 22
    assert "\033" not in ran.out
    assert lines[-1].split() == ["1", "step", "40"]


def test_a_metric_can_be_chosen_and_each_axis_has_a_plot_of_its_own(run: Callable[..., Ran]):
    folder = made("a", reward=0.25)
    assert "loss" not in run("run", "plot", folder, "--metric", "reward").out
    both = run("run", "plot", folder, "-m", "reward", "-m", "loss").out
    legends = [line.split() for line in both.splitlines() if line.startswith("        ")]
    assert [words[1] for words in legends if words[0] == "⣀⣀"] == ["reward", "loss"]


def test_several_runs_lie_over_each_other_by_their_names(run: Callable[..., Ran]):
    ran = run("run", "plot", made("runs/a"), made("runs/b", scale=2.0), "-m", "loss")
    assert ran.out.splitlines()[0].strip() == "⣀⣀ a: loss   ◆ b: loss"


def test_runs_of_the_same_name_are_told_apart_by_their_paths(run: Callable[..., Ran]):
    ran = run("run", "plot", made("x/a"), made("y/a"), "-m", "loss", "-f", "json")
    assert list(ran.json["series"]) == ["x/a: loss", "y/a: loss"]


def test_json_has_the_points_with_null_for_what_is_no_number(run: Callable[..., Ran]):
    folder = made("a", steps=1)
    with (folder / METRICS).open("a") as file:
        file.write(write_line(2, {"loss": float("nan")}))
    ran = run("run", "plot", folder, "-f", "json")
    assert ran.json == {"series": {"loss": [[1, 3.0], [2, None]]}}


@pytest.mark.parametrize("name", ["curve.svg", "new/curve.png"])
def test_a_picture_is_written_and_said_to_be(run: Callable[..., Ran], name: str):
    ran = run("run", "plot", made("a"), made("b"), "-o", name)
    assert (ran.status, ran.out, ran.err) == (DONE, "", f"Drew {name}.\n")
    assert Path(name).stat().st_size > 1000


def test_a_picture_bears_the_runs_title(run: Callable[..., Ran]):
    (made("a") / "run.json").write_text('{"kind": "sft", "model": "tinkex/tiny"}')
    assert run("run", "plot", "a", "-o", "curve.svg").status == DONE
    assert "<!-- sft tinkex/tiny -->" in Path("curve.svg").read_text()


def test_bad_questions_are_answered_with_what_to_do(run: Callable[..., Ran]):
    made("a")
    Path("empty").mkdir()
    for words, status, said in (
        (("nowhere",), MISUSED, "There is no folder nowhere\n  Give the folder of a run"),
        (("empty",), MISUSED, "empty is not the folder of a run"),
        (("a", "-m", "reward"), MISUSED, "there are loss, tokens, eval_loss"),
        (("a", "-o", "curve.pdf"), MISUSED, "must end in .svg or .png"),
        (("a", "-o", "a/metrics.jsonl/x.svg"), FAILED, "Error: "),
    ):
        ran = run("run", "plot", *words)
        assert (ran.status, ran.out) == (status, ""), words
        assert said in ran.err


def test_a_run_without_steps_has_nothing_to_plot_yet(run: Callable[..., Ran]):
    Path("new").mkdir()
    Path("new/run.json").write_text("{}")
    ran = run("run", "plot", "new")
    assert (ran.status, ran.out) == (FAILED, "")
    assert "tinkex run watch new" in ran.err


def test_without_matplotlib_a_picture_says_what_to_install_and_text_needs_nothing(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = made("a")
    ran = run("run", "plot", folder, "-o", "curve.svg")
    assert ran.status == FAILED
    assert "pip install 'tinkex[plots]'" in ran.err
    assert run("run", "plot", folder).status == DONE
