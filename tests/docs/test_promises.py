"""What the reference promises of futures and retries is shown by tests that it names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.docs.blocks import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.req("S42")

PAGES = [ROOT / "docs" / "reference" / f"{name}.md" for name in ("futures", "retries", "attach")]
_SHOWN = re.compile(r"<!-- shown by: (.*?) -->")
# Explanations of a table or an example: nothing that could be broken.
_EXPLAINS = (
    "`.status()` never waits",
    "<!-- not run",
    "So note `training.model_id`",
    "When a training program is lost",
    "`.usage` is None",
    "`.then(f)` is",
    "`.cancel()` depends",
    "A large batch travels",
    "Every operation returns",
    "Every call has one owner",
    "Nothing waits for ever",
    "The `_async` training",
    "The table below",
)


def promises(page: Path) -> list[str]:
    """Paragraphs and list items outside of code, tables and headings, with their comments."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"<!-- retry table: begin -->.*?<!-- retry table: end -->", "", text, flags=re.S)
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        for item in re.split(r"\n(?=- )", paragraph.strip()):
            if item and not item.startswith(("#", "|", *_EXPLAINS)):
                found.append(item)
    return found


@pytest.fixture(scope="module")
def tests() -> set[str]:
    """The names of all tests."""
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_promise_names_a_test(page: Path) -> None:
    assert len(promises(page)) >= 5
    assert [text for text in promises(page) if not _SHOWN.search(text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tests_that_are_named_exist(page: Path, tests: set[str]) -> None:
    named = [name for shown in _SHOWN.findall(page.read_text()) for name in shown.split(", ")]
    assert named
    assert [name for name in named if name not in tests] == []
