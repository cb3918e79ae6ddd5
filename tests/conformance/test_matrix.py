"""Every official client that must be served runs one program against one `tinkex serve`.

The server's answers are exact, so a version that saw another number was served something else.
What a version cannot do by its own design is listed here and must be just that.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from interpreters import finish
from make_venvs import BETWEEN, OFFICIAL, OLDEST

from tests.e2e.serving import served

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interpreters import Interpreters

pytestmark = [pytest.mark.official]

PROGRAM = str(Path(__file__).with_name("matrix_program.py"))
NEWEST = OFFICIAL.partition("==")[2]
MODEL = "tinkex/tiny"

_NO_EXPORTS = {"external", "newer_sampling", "metadata", "uploaded_loss", "close"}
ABSENT = {
    "0.18.2": _NO_EXPORTS,
    "0.22.7": _NO_EXPORTS,
    "0.24.1": _NO_EXPORTS,
    "0.25.0": _NO_EXPORTS,
    "0.29.1": {"newer_sampling", "uploaded_loss"},
    "0.33.1": {"uploaded_loss"},
    "0.36.0": {"archive"},
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("matrix") / "data") as server:
        yield server.url


@pytest.fixture(scope="module")
def ours(url: str, interpreters: Interpreters, tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("home")
    return tell(interpreters, interpreters.cookbook, "tinkex", url, home)


def tell(
    interpreters: Interpreters, python: Path, sdk: str, url: str, home: Path
) -> dict[str, Any]:
    """What one client saw, by scenario."""
    program = interpreters.start(python, [PROGRAM, sdk, MODEL], home=home, base_url=url)
    return dict(json.loads(line) for line in finish(program).splitlines())


def failures(seen: dict[str, Any]) -> dict[str, str]:
    return {
        name: what["failed"]
        for name, what in seen.items()
        if isinstance(what, dict) and "failed" in what
    }


def absent(seen: dict[str, Any]) -> set[str]:
    return {name for name, what in seen.items() if isinstance(what, dict) and "absent" in what}


def test_our_own_client_can_do_everything(ours: dict[str, Any]) -> None:
    assert failures(ours) == {}
    assert absent(ours) == set()
    assert ours["bootstrap"] == {"served": True, "rank": 8, "model": MODEL}
    assert ours["sft"][1]["loss"] < ours["sft"][0]["loss"]
    assert ours["publish"] == [False, True, False]
    assert ours["expiry"] is True
    assert ours["metadata"] == [{"epoch": "2"}]
    assert ours["bad_input"]["named"]
    assert ours["delete"]["gone"]
    assert ours["close"] == "refused"


def test_an_archive_is_what_client_programs_take_for_granted(ours: dict[str, Any]) -> None:
    assert ours["archive"] == {
        "files": ["adapter_config.json", "adapter_model.safetensors"],
        "config": [8, 32],
        "unembed": [
            "base_model.model.model.unembed_tokens.lora_A.weight",
            "base_model.model.model.unembed_tokens.lora_B.weight",
        ],
        "odd": [],
    }


VERSIONS = [
    OLDEST,
    *(pytest.param(version, marks=pytest.mark.exhaustive) for version in BETWEEN),
    NEWEST,
]


@pytest.mark.parametrize("version", VERSIONS)
def test_an_official_client_sees_the_same(
    version: str, url: str, ours: dict[str, Any], interpreters: Interpreters, tmp_path: Path
) -> None:
    python = interpreters.version("official" if version == NEWEST else f"official-{version}")
    seen = tell(interpreters, python, "tinker", url, tmp_path)
    assert failures(seen) == {}
    assert absent(seen) == ABSENT[version]
    assert list(seen) == list(ours)
    present = {name: what for name, what in seen.items() if name not in ABSENT[version]}
    assert present == {name: ours[name] for name in present}


@pytest.mark.parametrize("version", VERSIONS)
def test_each_environment_has_the_version_it_is_named_after(
    version: str, interpreters: Interpreters
) -> None:
    asked = "import importlib.metadata as m; print(m.version('tinker'))"
    python = interpreters.version("official" if version == NEWEST else f"official-{version}")
    found = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == version
