"""Nothing that came from a store or from a user is ever unpickled: weights are safetensors.

Pickles are used in one place only, between the two processes of one server on one machine, and
there only classes from a list are made.
"""

from __future__ import annotations

import ast
import io
import pickle
from typing import TYPE_CHECKING

import pytest

from tests.docs.blocks import ROOT
from tinkex.engine.process import messages

if TYPE_CHECKING:
    from pathlib import Path

SOURCES = ROOT / "src" / "tinkex"
# The pipe between the API process and its engine; see the module's own words.
ALLOWED = {"engine/process/messages.py", "engine/process/calls.py"}
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# Names that unpickle without saying so.
LOADERS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("torch", "package")}
LOADERS |= {("np", "save"), ("torch", "save"), ("pandas", "read_pickle")}


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def called(tree: ast.AST) -> set[tuple[str, str]]:
    return {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def files() -> list[Path]:
    folders = ("server", "engine", "host", "wire", "types")
    found = [file for folder in folders for file in (SOURCES / folder).rglob("*.py")]
    assert len(found) > 100
    return found


def test_no_module_unpickles_anything() -> None:
    trees = {str(file.relative_to(SOURCES)): ast.parse(file.read_text()) for file in files()}
    assert set(trees) >= ALLOWED
    offenders = {
        name: found
        for name, tree in trees.items()
        if (
            found := (called(tree) & LOADERS)
            | (imported(tree) & UNPICKLERS if name not in ALLOWED else set())
        )
    }
    assert offenders == {}


def test_the_pipe_s_pickles_make_only_what_is_on_their_list() -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (print, ("gotcha",))

    with pytest.raises(pickle.UnpicklingError, match="no place in a message"):
        messages._Unpickler(io.BytesIO(pickle.dumps(Evil()))).load()
