"""The picture in the README is what a terminal would show in the end, and nothing else."""

from __future__ import annotations

import html
import runpy
from typing import TYPE_CHECKING

from tests.docs.blocks import DOCS

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = DOCS / "img" / "make_demo_picture.py"
screen: Callable[[str], str] = runpy.run_path(str(SCRIPT))["_screen"]


def test_lines_that_were_written_over_are_gone():
    assert screen("one\rtwo\r\n") == "two"
    assert screen("1/3\n2/3\r\x1b[1A\x1b[J3/3\r\ndone\r\n") == "3/3\ndone"
    assert screen("a\r\nb\x1b[2K\r\nc") == "a\n\nc"


def test_clearing_to_the_right_and_below_keeps_what_is_left_of_the_cursor():
    assert screen("loss 1.2\x1b[K\r\n") == "loss 1.2"
    assert screen("bar\nloss\x1b[1A\rBAR\x1b[Jx") == "BARx"


def test_colours_stay_with_their_text():
    assert screen("\x1b[32mgreen\x1b[0m plain") == "\x1b[32mgreen\x1b[0m plain"


def test_the_picture_shows_the_command_and_what_came_of_it():
    text = html.unescape((DOCS / "img" / "demo.svg").read_text()).replace("\xa0", " ")
    for words in (
        "$ tinkex demo",
        "eval loss",
        "What is the capital of France?",
        "matey",
        "Picture   runs/demo/curve.svg",
        "Try next:",
    ):
        assert words in text
    assert "saved after" not in text
    assert "https://" not in text
