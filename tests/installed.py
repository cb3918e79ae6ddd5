"""What pip would install for the requirements of `pyproject.toml`, read from what is installed."""

from __future__ import annotations

import importlib.metadata as metadata
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def base_requirements() -> list[str]:
    """What everybody gets."""
    return list(_project()["dependencies"])


def extras() -> dict[str, list[str]]:
    """What each extra adds; an extra that names others adds what they do."""
    named = _project()["optional-dependencies"]
    return {extra: _added(extra, named) for extra in named}


def _project() -> dict[str, Any]:
    """The table as it is now; what is installed may be older."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _added(extra: str, named: dict[str, list[str]]) -> list[str]:
    added: list[str] = []
    for text in named[extra]:
        wanted = Requirement(text)
        if wanted.name == "tinkex":
            added += [inner for other in sorted(wanted.extras) for inner in _added(other, named)]
        else:
            added.append(text)
    return added


def closure(requirements: list[str]) -> set[str]:
    """Everything that pip would install for these, on this interpreter."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        wanted = todo.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key not in seen:
            seen.add(key)
            todo += _needs(*key)
    return {name for name, _ in seen}


def _needs(name: str, chosen: frozenset[str]) -> list[Requirement]:
    """What an installed package asks for, with these extras of it."""
    found: list[Requirement] = []
    for text in metadata.requires(name) or []:
        inner = Requirement(text)
        if inner.marker is None or any(
            inner.marker.evaluate({"extra": extra}) for extra in (*chosen, "")
        ):
            inner.marker = None
            found.append(inner)
    return found
