"""Which extras of the package are installed, by what the package says of itself."""

from __future__ import annotations

import re
from importlib import metadata
from typing import TYPE_CHECKING

from tinkex.cli.examination.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# What the front door uses, and what for; the others are for those who know that they need them.
_USUAL = {
    "engine": "run models here",
    "server": "serve them",
    "tokenizers": "turn text and chats into tokens",
    "cli": "see live progress",
    "plots": "draw curves",
}
# Not for users, or made of the others.
_NOT_SHOWN = frozenset({"all", "dev", "docs"})
_NEED = re.compile(r"([A-Za-z0-9._-]+)[^;]*; *(?:(.*) and )?extra == ['\"]([\w-]+)['\"]")


def extras_here() -> Iterator[Finding]:
    """The extras of the installed package."""
    try:
        needs = metadata.requires("tinkex") or []
    except metadata.PackageNotFoundError:
        todo = "Nothing, if that is meant. Else: pip install 'tinkex[cli]'"
        yield Finding("packages", "warn", "tinkex runs from a folder and is not installed", todo)
        return
    yield from judge(needed(needs))


def needed(requirements: Iterable[str]) -> dict[str, dict[str, str | None]]:
    """Extras with what they need and its installed version, None for what is missing.

    What is needed on some systems only is not asked for.
    """
    found: dict[str, dict[str, str | None]] = {}
    for text in requirements:
        need = _NEED.fullmatch(text)
        if need is None or need[3] in _NOT_SHOWN or need[2] or need[1] == "tinkex":
            continue
        found.setdefault(need[3], {})[need[1]] = _version(need[1])
    return found


def judge(extras: dict[str, dict[str, str | None]]) -> Iterator[Finding]:
    """A line for each of the usual extras, and one for all others."""
    for extra, why in _USUAL.items():
        if extra not in extras:
            continue
        missing = [name for name, version in extras[extra].items() if version is None]
        here = ", ".join(f"{name} {v}" for name, v in extras[extra].items() if v is not None)
        if missing:
            yield Finding(
                f"[{extra}]",
                "warn",
                f"to {why}: {', '.join(missing)} not installed",
                f"If you need it: pip install 'tinkex[{extra}]'",
            )
        else:
            yield Finding(f"[{extra}]", "ok", here)
    others = {name: needs for name, needs in extras.items() if name not in _USUAL}
    if others:
        yield Finding("[others]", "ok", _summary(others))


def _summary(extras: dict[str, dict[str, str | None]]) -> str:
    here = [name for name, needs in extras.items() if None not in needs.values()]
    absent = [name for name in extras if name not in here]
    parts = [
        f"{', '.join(sorted(names))} {what}"
        for names, what in ((here, "installed"), (absent, "not installed"))
        if names
    ]
    return "; ".join(parts)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
