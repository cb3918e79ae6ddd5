"""Recipes that use nothing but the official surface run unchanged with the official client.

Each is given `tinker` under the name `tinkex` and a running `tinkex serve` and checks its result.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from interpreters import REPOSITORY, finish

from tests.e2e.serving import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from interpreters import Interpreters

pytestmark = [pytest.mark.official]

SHORTENED = {
    "sweep.py": ["--steps", "8"],
    "pipeline.py": ["--steps", "12"],
    "rollout_processes.py": ["--rounds", "11"],
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("recipes") / "data") as server:
        yield server.url


def for_the_official_client(recipe: str) -> str:
    text = (REPOSITORY / "examples" / recipe).read_text()
    text = text.replace("import tinkex\n", "import tinker as tinkex\n")
    text = text.replace("from tinkex import", "from tinker import")
    # Not sys.exit: the Rust half of official clients sometimes aborts while Python shuts down.
    leave = r"    import os; status = \1; sys.stdout.flush(); os._exit(status)"
    return re.sub(r"^    sys\.exit\((.*)\)$", leave, text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "recipe",
    [
        "pipeline.py",
        pytest.param("sweep.py", marks=pytest.mark.exhaustive),
        pytest.param("rollout_processes.py", marks=pytest.mark.exhaustive),
    ],
)
def test_the_recipe_runs_with_the_official_client(
    recipe: str, url: str, interpreters: Interpreters, tmp_path: Path
) -> None:
    script = tmp_path / recipe
    script.write_text(for_the_official_client(recipe))
    assert "tinkex.chat" not in script.read_text()
    arguments = [str(script), *SHORTENED[recipe]]
    program = interpreters.start(interpreters.official, arguments, home=tmp_path, base_url=url)
    lines = finish(program).splitlines()
    assert [line for line in lines if line.startswith("NO")] == []
    assert lines[-1].startswith("ok: ")
