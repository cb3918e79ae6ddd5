"""Tables, blocks, JSON, and values as people read them."""

from __future__ import annotations

import argparse
import io
import logging
import sys
from datetime import UTC, datetime, timedelta

import pytest

from tinkex.cli.command_errors import CommandError, report, show_log
from tinkex.cli.commands import FAILED
from tinkex.cli.connect import every_page
from tinkex.cli.output import print_table, show_one, size, text, when
from tinkex.errors import APIConnectionError, APIError, RequestInfo, ServerSilentError
from tinkex.types import Cursor

NOW = datetime(2026, 6, 15, 12, tzinfo=UTC)


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (None, None),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KB"),
        (1536, "1.5 KB"),
        (5 * 1024**3, "5.0 GB"),
        (1024**7, "1024.0 EB"),
    ],
)
def test_sizes_are_shown_in_the_unit_that_fits(size_bytes: int | None, shown: str | None):
    assert size(size_bytes) == shown


@pytest.mark.parametrize(
    ("ago", "shown"),
    [
        (timedelta(0), "just now"),
        (timedelta(seconds=59), "just now"),
        (timedelta(minutes=1), "1 minute ago"),
        (timedelta(minutes=59, seconds=59), "59 minutes ago"),
        (timedelta(hours=2), "2 hours ago"),
        (timedelta(days=1), "1 day ago"),
        (timedelta(days=15), "2 weeks ago"),
        (timedelta(days=30), "2026-05-16"),
        (timedelta(seconds=-30), "in a moment"),
        (timedelta(hours=-3), "in 3 hours"),
        (timedelta(days=-60), "2026-08-14"),
    ],
)
def test_times_are_shown_as_people_say_them(ago: timedelta, shown: str):
    assert when(NOW - ago, NOW) == shown
    assert when((NOW - ago).replace(tzinfo=None), NOW) == shown


def test_what_is_missing_and_what_is_true_are_words():
    assert [text(value) for value in (None, True, False, 0, "x")] == ["N/A", "Yes", "No", "0", "x"]


def test_other_peoples_text_cannot_steer_the_terminal():
    assert text("a\nb\x1b[2J") == "a\\nb\\x1b[2J"
    assert text("naïve 模型") == "naïve 模型"


def test_a_table_is_aligned_and_needs_no_library(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "rich", None)
    print_table(("Name", "N"), [("a", "1"), ("longer", "20")])
    assert capsys.readouterr().out == "Name    N\n------  --\na       1\nlonger  20\n"


def test_a_terminal_gets_the_same_table_with_colours(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_table(("Name", "N"), [("a:b:smile:", "[red]1")])
    shown = terminal.getvalue()
    assert "\x1b[36m" in shown
    assert "a:b:smile:" in shown
    assert "[red]1" in shown


def test_a_terminal_without_the_library_gets_plain_text(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    for name in ("rich", "rich.console", "rich.table"):
        monkeypatch.setitem(sys.modules, name, None)
    print_table(("Name",), [("a",)])
    assert terminal.getvalue() == "Name\n----\na\n"


def test_a_table_that_is_too_wide_becomes_blocks(capsys: pytest.CaptureFixture[str]):
    print_table(("Name", "Path"), [("a", "x" * 76), ("b", "y" * 20)])
    assert capsys.readouterr().out.splitlines() == [
        "Name:  a",
        "Path:",
        "  " + "x" * 76,
        "",
        "Name:  b",
        "Path:  " + "y" * 20,
    ]


def test_properties_that_are_not_known_are_left_out(capsys: pytest.CaptureFixture[str]):
    args = argparse.Namespace(format="table")
    show_one(args, {}, [("Name", "a"), ("Size", None), ("Public", False)])
    assert capsys.readouterr().out == "Name:    a\nPublic:  No\n"


# -- paging ---------------------------------------------------------------------------------------


class Page:
    def __init__(self, items: list[int], cursor: Cursor | None) -> None:
        self.items = items
        self.cursor = cursor


def paged(total: int, limit: int, *, lies: int = 0) -> tuple[list[int], list[tuple[int, int]]]:
    asked: list[tuple[int, int]] = []

    def fetch(limit: int, offset: int) -> Page:
        asked.append((limit, offset))
        cursor = Cursor(offset=offset, limit=limit, total_count=total + lies)
        return Page(list(range(total))[offset : offset + limit], cursor)

    return list(every_page(fetch, lambda page: page.items, limit, 10)), asked


def test_pages_are_fetched_up_to_the_limit_and_no_further():
    assert paged(100, 25)[1] == [(10, 0), (10, 10), (5, 20)]
    assert paged(100, 25)[0] == list(range(25))
    assert paged(3, 20) == ([0, 1, 2], [(10, 0)])
    assert paged(20, 0)[1] == [(10, 0), (10, 10)]
    assert paged(0, 0) == ([], [(10, 0)])


def test_a_server_that_counts_wrong_does_not_keep_us_for_ever():
    assert paged(5, 0, lies=1000)[1] == [(10, 0), (10, 5)]


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (CommandError("No", "Do this.\nThen that."), ["Error: No", "  Do this.", "  Then that."]),
        (APIError("odd"), ["Error: API error occurred", "  odd"]),
        (ServerSilentError("quiet"), ["Error: No answer", "  quiet", "  Try again later."]),
        (PermissionError(13, "Permission denied", "/x"), ["Error: Permission denied", "  /x"]),
        (KeyError("oops"), ["Error: Unexpected error occurred: KeyError: 'oops'"]),
    ],
)
def test_a_failure_has_a_heading_details_and_a_next_step(
    error: Exception, lines: list[str], capsys: pytest.CaptureFixture[str]
):
    assert report(error) == FAILED
    assert capsys.readouterr().err.splitlines() == lines


def test_a_bug_of_ours_shows_where_it_is_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    try:
        raise KeyError("oops")
    except KeyError as error:
        report(error)
    assert "Traceback" in terminal.getvalue()


def test_a_cause_that_a_warning_has_named_is_not_repeated(capsys: pytest.CaptureFixture[str]):
    message = "Nothing listens at http://here (connection refused); check it."
    error = APIConnectionError(RequestInfo("GET", "http://here/x"), message)
    assert report(error) == FAILED
    assert capsys.readouterr().err.count("connection refused") == 1
    show_log(logging.WARNING)
    logging.getLogger("tinkex.transport").warning("client_config: %s", message)
    assert report(error) == FAILED
    said = capsys.readouterr().err
    assert said.count("connection refused") == 1
    assert said.splitlines()[1:] == [
        "Error: Connection failed",
        "  The command has stopped trying. The warning above says what to check.",
    ]
