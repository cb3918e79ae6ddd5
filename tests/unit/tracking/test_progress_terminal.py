"""The live view on a real pseudo-terminal: 80 columns, tiny, resized, without colour, gone."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from screen import Terminal

HERE = Path(__file__).parent
PROGRAM = str(HERE / "progress_program.py")
SOURCE = str(HERE.parents[2] / "src")


def terminal(*words: str, columns: int = 80, rows: int = 24, **env: str) -> Terminal:
    return Terminal(
        [PROGRAM, *words], columns=columns, rows=rows, env={"PYTHONPATH": SOURCE, **env}
    )


def test_a_run_at_eighty_columns_is_one_block_that_is_drawn_over():
    with terminal("12") as run:
        run.type("\n" * 6)
        run.until(lambda screen: "6/12" in screen.text)
        bar, measures, evaluations = run.screen.lines
        assert re.fullmatch("sft a model ━{20}─{20}  6/12  50%", bar)
        assert re.fullmatch("loss 0.5000  [▁-█]{6}  [0-9,]+ tokens/s  0:[0-9]{2} left", measures)
        assert evaluations == "eval loss 0.5000 (step 5)"
        assert run.screen.wrapped == 0


def test_what_is_done_before_the_first_step_is_shown_until_it_comes():
    with terminal("12") as run:
        run.until(lambda screen: "starting" in screen.text)
        run.type("stage\n")
        run.until(lambda screen: "loading a model" in screen.text)
        run.type("\n")
        run.until(lambda screen: "1/12" in screen.text)
        assert "loading a model" not in run.screen.text


@pytest.mark.parametrize("words", [(), ("--without-rich",), ("--chart",)])
def test_at_the_end_notes_and_a_summary_stay_and_the_block_does_not(words: tuple[str, ...]):
    with terminal("12", *words) as run:
        run.type("\n" * 6 + "note\n" + "\n" * 6 + "note\n")
        run.close_input()
        assert run.end() == 0
        assert run.screen.lines[:2] == [
            "saved tinker://run/weights/step-6",
            "saved tinker://run/weights/step-12",
        ]
        assert re.fullmatch(
            r"12 steps in 0:[0-9]{2}  loss 3.0000 → 0.2500  eval loss 0.5000 \(step 10\) .*",
            run.screen.lines[2] + " ",
        )
        assert run.screen.lines[3:] == ["the run made 12 steps", ""]
        assert run.screen.wrapped == 0


def test_a_chart_is_drawn_below_where_there_is_room():
    with terminal("30", "--chart") as run:
        run.type("\n" * 25)
        run.until(lambda screen: "25/30" in screen.text)
        assert "loss   ◆ eval loss" in run.screen.text
        assert len(run.screen.lines) == 17
        assert run.screen.wrapped == 0


@pytest.mark.parametrize(
    ("columns", "rows"), [(1, 1), (2, 24), (10, 3), (20, 2), (33, 5), (80, 1), (500, 100)]
)
def test_a_tiny_or_huge_terminal_is_never_overflowed(columns: int, rows: int):
    with terminal("12", "--chart", columns=columns, rows=rows) as run:
        run.type("\n" * 12)
        run.until(lambda _: run.sent.count("\r") > 12)
        assert run.screen.wrapped == 0
        assert len(run.screen.lines) <= max(rows, 1)
        run.close_input()
        assert run.end() == 0


def test_a_resized_terminal_is_drawn_at_its_new_size():
    with terminal("12") as run:
        run.type("\n" * 3)
        run.until(lambda screen: "3/12" in screen.text)
        run.resize(40, 10)
        run.type("\n")
        run.until(lambda screen: "4/12" in screen.text)
        assert run.screen.wrapped == 0
        run.resize(100, 30)
        run.type("\n")
        run.until(lambda screen: "5/12" in screen.text)
        assert run.screen.lines[0].startswith("sft a model ━")
        assert run.screen.wrapped == 0


@pytest.mark.parametrize(
    ("words", "env"),
    [((), {"NO_COLOR": "1"}), (("--without-rich",), {})],
)
def test_without_colour_nothing_is_painted(words: tuple[str, ...], env: dict[str, str]):
    with terminal("12", "--chart", *words, **env) as run:
        run.type("\n" * 12)
        run.close_input()
        assert run.end() == 0
        assert run.screen.styles == set()


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines():
    with terminal("12", TERM="dumb") as run:
        run.type("\n" * 12)
        run.close_input()
        assert run.end() == 0
        assert "\033" not in run.sent
        assert run.screen.lines[0].startswith("step  1/12  loss 3.0000")


def test_with_rich_there_is_colour():
    with terminal("12", "--chart", NO_COLOR="") as run:
        run.type("\n" * 12)
        run.close_input()
        assert run.end() == 0
        assert {"0", "1", "2", "36"} <= run.screen.styles


def test_what_others_print_stays_readable_and_the_block_goes_on_below():
    with terminal("12", NO_COLOR="1") as run:
        run.type("\n" * 3)
        run.until(lambda screen: "3/12" in screen.text)
        run.type("print\n\n")
        run.until(lambda screen: "4/12" in screen.text)
        assert run.screen.lines[0].startswith("somebody else has something to say")
        assert run.screen.lines[1].startswith("sft a model ━")
        assert len(run.screen.lines) == 3


def test_a_terminal_that_goes_away_does_not_end_the_run():
    with terminal("12", "--ignore-hangup") as run:
        run.type("\n" * 3)
        run.until(lambda screen: "3/12" in screen.text)
        run.hang_up()
        run.type("\n" * 9)
        run.close_input()
        assert run.wait() == 0


def test_an_interrupted_run_leaves_the_terminal_clean():
    with terminal("12") as run:
        run.type("\n" * 3)
        run.until(lambda screen: "3/12" in screen.text)
        run.interrupt(signal.SIGINT)
        assert run.end() != 0
        assert run.screen.lines[0].startswith("3 of 12 steps in")
        assert "━" not in run.screen.text
        assert "\033[?25l" not in run.sent, "the cursor was never hidden"
