"""The wheel and the sdist are whole, install anywhere, and each extra brings what it promises."""

from __future__ import annotations

import json
import re
import subprocess
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

import tinkex
from tests.e2e.clean_venvs import LIMIT_S, ROOT, Built, Venv, build, run
from tests.installed import base_requirements, closure, extras
from tinkex.testing import API_KEY, FakeServer

if TYPE_CHECKING:
    from pathlib import Path

# Every module below these packages can be imported: what they need is there. Triton comes with
# the builds of torch for CUDA, pytest is the user's own.
_ALL_OF = """
import importlib, pkgutil
for name in {names!r}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        try:
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in ("triton", "pytest"):
                raise
print("ok")
"""

CLIENT = """
import tinkex
with tinkex.ServiceClient(base_url="http://127.0.0.1:9", api_key="tml-k"):
    pass
print("ok")
"""

EMBEDDED = """
import tinkex
with tinkex.ServiceClient() as service:
    training = service.create_lora_training_client("tinkex/tiny", rank=4)
    print("ok" if training.get_info().is_lora else "no")
"""

# What each extra promises in the README, as a program that prints "ok".
PROMISED = {
    "": CLIENT,
    "engine": _ALL_OF.format(names=["tinkex.engine"]),
    "server": _ALL_OF.format(names=["tinkex.server", "tinkex.testing"]),
    "server,engine": EMBEDDED,
    "server,postgres": "import psycopg, tinkex.server.store.sql.postgres; print('ok')",
    "ray": "import ray, tinkex.ray_cluster.connection; print('ok')",
    "s3": "import fsspec; fsspec.get_filesystem_class('s3'); print('ok')",
    "otel": "import opentelemetry.trace, tinkex.spans; print('ok')",
    "tokenizers": "import tokenizers, tinkex.tokenizers; print('ok')",
    "cli": _ALL_OF.format(names=["tinkex.cli"]),
    "plots": "import matplotlib.figure, tinkex.tracking.figure; print('ok')",
    "tensorboard": "import tensorboardX, tinkex.tracking.sinks; print('ok')",
    "wandb": "import wandb, tinkex.tracking.sinks; print('ok')",
}
# Building is not counted: it is done once, for all of them.
NOT_FOR_USERS = {"dev", "docs"}
TOGETHER = {"all"}
USUAL = {"", "server,engine", "cli"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def clean(tmp_path: Path) -> Venv:
    return Venv.make(tmp_path / "venv")


# -- what is in the files --------------------------------------------------------------------------


def test_the_wheel_holds_exactly_the_package(built: Built):
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in (source / "tinkex").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    names = zipfile.ZipFile(built.wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "tinkex/py.typed" in names


def test_the_wheel_carries_its_licence_and_says_which_python_it_needs(built: Built):
    wheel = zipfile.ZipFile(built.wheel)
    (about,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    text = wheel.read(about).decode()
    assert "Requires-Python: >=3.11" in text
    assert "License-Expression: Apache-2.0" in text
    assert about.replace("METADATA", "licenses/LICENSE") in wheel.namelist()


# -- versions --------------------------------------------------------------------------------------


def test_the_newest_version_in_the_changelog_is_the_packages():
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(heading for heading in headings if heading != "Unreleased") == tinkex.__version__


def test_both_files_are_named_after_the_version(built: Built):
    assert built.wheel.name == f"tinkex-{tinkex.__version__}-py3-none-any.whl"
    assert built.sdist.name == f"tinkex-{tinkex.__version__}.tar.gz"


# -- installing ------------------------------------------------------------------------------------


def test_the_wheel_alone_makes_a_working_client_and_command(built: Built, clean: Venv):
    clean.install(str(built.wheel))
    assert clean.python(CLIENT) == "ok\n"
    assert clean.tinkex("--version") == f"tinkex {tinkex.__version__}\n"
    assert json.loads(clean.tinkex("version", "-f", "json")) == {"version": tinkex.__version__}
    assert "usage: tinkex" in clean.tinkex("--help")
    clean.pip("check")


def test_a_command_that_needs_an_extra_says_which(built: Built, clean: Venv):
    clean.link(closure(base_requirements()))
    clean.install("--no-deps", "--no-index", str(built.wheel))
    done = subprocess.run(
        [clean.folder / "bin" / "tinkex", "serve", "--no-auth"],
        env={"HOME": str(clean.folder / "home")},
        cwd=clean.folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install 'tinkex[server,engine]'" in done.stderr


@pytest.mark.exhaustive
def test_the_sdist_installs_where_there_is_no_wheel(built: Built, clean: Venv):
    clean.link(closure(base_requirements()))
    clean.install("--no-deps", str(built.sdist))
    assert clean.python(CLIENT) == "ok\n"


@pytest.mark.exhaustive
def test_the_command_works_isolated_as_pipx_installs_it(built: Built, clean: Venv, tmp_path: Path):
    clean.link(closure([*base_requirements(), *extras()["cli"]]))
    clean.install("--no-index", f"{built.wheel}[cli]")
    command = tmp_path / "bin" / "tinkex"
    command.parent.mkdir()
    command.symlink_to(clean.folder / "bin" / "tinkex")
    (tmp_path / "train.jsonl").write_text('{"prompt": "one", "completion": " two"}\n')
    with FakeServer().serve() as server:
        env = {"HOME": str(tmp_path), "TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY}
        env["PATH"] = str(command.parent)
        assert "tinkex/tiny" in run(["tinkex", "model", "list"], tmp_path, **env)
        check = ["tinkex", "data", "check", "train.jsonl", "--model", "tinkex/tiny", "-f", "json"]
        assert json.loads(run(check, tmp_path, **env))["summary"]["examples"] == 1


# -- extras ----------------------------------------------------------------------------------------


def test_every_extra_has_a_promise_that_is_tried():
    tried = {name for chosen in PROMISED for name in chosen.split(",") if name}
    assert tried == extras().keys() - NOT_FOR_USERS - TOGETHER


def _chosen() -> list[Any]:
    """Every extra; those that most people install also in `make test`."""
    return [
        pytest.param(one, id=one or "none", marks=() if one in USUAL else pytest.mark.exhaustive)
        for one in PROMISED
    ]


@pytest.mark.parametrize("chosen", _chosen())
def test_the_extra_brings_what_it_promises_and_nothing_else_is_needed(
    chosen: str, built: Built, clean: Venv
):
    wanted = [text for name in chosen.split(",") if name for text in extras()[name]]
    clean.link(closure([*base_requirements(), *wanted]))
    clean.install("--no-index", f"{built.wheel}[{chosen}]" if chosen else str(built.wheel))
    assert clean.python(PROMISED[chosen]) == "ok\n"


def test_all_is_every_extra_for_users():
    together = [
        text for name in PROMISED for one in name.split(",") if one for text in extras()[one]
    ]
    assert set(extras()["all"]) == set(together)
