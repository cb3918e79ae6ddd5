"""Finds the fenced blocks of a Markdown file, and the reason why one must not run.

A block that cannot run here carries a comment on the line before its fence:

    <!-- not run: needs an account on the hub -->
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

_FENCE = re.compile(r"^```(\w*)$")
_REASON = re.compile(r"^<!-- not run: (.+) -->$")


def page_named(name: str) -> Path:
    """The page of this name, wherever below docs/ it lies; with its folder if two have the name."""
    (page,) = [page for page in PAGES if page.name == name or page == DOCS / name]
    return page


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is the number of its first line of content, from 1."""

    page: Path
    language: str
    line: int
    text: str
    not_run: str | None = None

    @property
    def name(self) -> str:
        """Where it is, for messages."""
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    lines = page.read_text().splitlines()
    found: list[Block] = []
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            at += 1
            continue
        end = lines.index("```", at + 1)
        reason = _REASON.match(lines[at - 1]) if at else None
        text = "\n".join(lines[at + 1 : end])
        found.append(Block(page, fence[1], at + 2, text, reason[1] if reason else None))
        at = end + 1
    return found


def script_of(page: Path) -> str:
    """The page's Python as one program, each line at its number in the page."""
    lines: list[str] = []
    for block in blocks_of(page):
        if block.language == "python" and block.not_run is None:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
    return "\n".join(lines) + "\n" if lines else ""
