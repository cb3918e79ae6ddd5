"""The tour of the code names the files that calls really pass, in their order."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.docs.blocks import ROOT, page_named
from tests.docs.flow_client import RECORDINGS
from tests.docs.flows import Trace, traced_server
from tests.docs.test_examples import TRAINING_DATA
from tests.patience import PATIENCE_S
from tinkex.testing import API_KEY, FakeServer

if TYPE_CHECKING:
    from pathlib import Path

PAGE = page_named("architecture.md").read_text()
# What the page lists of each process; types and codecs are listed for the client only.
LISTED = {
    "client": ("",),
    "server": ("server/", "serving/", "engine/process/"),
    "engine": ("engine/",),
}
COMMAND_LISTED = ("cli/", "loops/", "data.py", "chat/", "tracking/", "clients/")
# They run all the time: a timer that looks after the engine, and the engine's liveness. And a
# recording has a new connection only if the client happens to need one more.
BACKGROUND = {"serving/process.py", "engine/process/program.py", "serving/http_server.py"}
# Their place in a recording is chance: the long poll may arrive before or after the engine has
# begun, heartbeats come at any time, and the loop thread of the client before may still be ending.
UNORDERED = {
    "clients/portal.py",
    "server/api/futures.py",
    "engine/process/messages.py",
    "engine/process/process_engine.py",
    "engine/process/child.py",
}

pytestmark = pytest.mark.timeout(2 * PATIENCE_S)
Flow = dict[str, list[Trace]]


def _recorded(*arguments: str, **environment: str) -> dict[str, Flow]:
    """What the client's process records."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINKEX_"))}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.flow_client", *arguments],
        env=kept | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        flow: {
            role: [Trace([(file, name) for file, name in calls]) for calls in traces]
            for role, traces in roles.items()
        }
        for flow, roles in found.items()
    }


@pytest.fixture(scope="module")
def flows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Flow]:
    """A sample and a training step, each recorded several times in all three processes."""
    with traced_server(tmp_path_factory.mktemp("flows")) as server:
        return _recorded("calls", server.url, str(server.folder))


@pytest.mark.parametrize("process", LISTED)
@pytest.mark.parametrize("flow", ["A sample", "A training step"])
def test_the_page_lists_the_files_of_a_call_in_order(
    flow: str, process: str, flows: dict[str, Flow]
):
    traces = [_kept(trace, LISTED[process]) for trace in flows[flow][process]]
    _compare(_table(f"{flow} in the {process}"), traces)


@pytest.mark.parametrize(
    ("flow", "files", "functions"), [("A sample", 22, 90), ("A training step", 24, 110)]
)
def test_a_call_passes_few_files_and_functions_of_the_client(
    flow: str, files: int, functions: int, flows: dict[str, Flow]
):
    traces = flows[flow]["client"]
    passed = sorted((len(trace.files), len(trace.calls)) for trace in traces)[RECORDINGS // 2]
    sys.stdout.write(f"{flow}: {passed[0]} files, {passed[1]} functions of the client\n")
    assert passed[0] <= files
    assert passed[1] <= functions


def test_a_training_step_passes_few_files_of_the_server(flows: dict[str, Flow]):
    traces = flows["A training step"]["server"]
    passed = sorted(len(_kept(trace, ("server/", "serving/"))) for trace in traces)
    count = passed[RECORDINGS // 2]
    sys.stdout.write(f"A training step: {count} files in server/ and serving/\n")
    # What memory holds of the database has a file of its own since nodes share one.
    assert count <= 34


def test_the_page_lists_the_files_of_train_sft_in_order(tmp_path: Path):
    data = tmp_path / "train.jsonl"
    data.write_text(TRAINING_DATA)
    with FakeServer().serve() as server:
        found = _recorded(
            *("sft", str(data), str(tmp_path / "runs")),
            TINKER_BASE_URL=server.url,
            TINKER_API_KEY=API_KEY,
            HOME=str(tmp_path),
        )
    traces = found["The command"]["client"]
    _compare(_table("The command in the client"), [_kept(t, COMMAND_LISTED) for t in traces])


def test_every_path_on_the_page_exists():
    paths = re.findall(r"`([\w./-]+(?:\.py|\.md|\.yml|\.toml|/))`", PAGE)
    assert len(paths) > 100
    places = (ROOT, ROOT / "src" / "tinkex")
    assert not [path for path in paths if not any((place / path).exists() for place in places)]


def test_the_page_says_where_to_change_what_people_change():
    rows = _rows(_section("To change this, open that"))
    assert all(re.search(r"`(?:src|docs)/", where) for _, where in rows)
    changes = " ".join(what for what, _ in rows)
    for wanted in (
        *("endpoint", "loss", "model family", "kernel", "optimizer", "who runs next", "snapshot"),
        *("sample is retried", "CLI command", "page of the docs"),
    ):
        assert wanted in changes


def _compare(listed: list[str], traces: list[list[str]]) -> None:
    """A file that every recording has must be listed, and a listed one in some recording.

    Threads change the order a little, so two files are out of order only if all recordings agree.
    """
    always = set[str].intersection(*map(set, traces))
    ever = set[str].union(*map(set, traces))
    assert len(set(listed)) == len(listed)
    assert {"missing": always - set(listed), "not passed": set(listed) - ever} == {
        "missing": set(),
        "not passed": set(),
    }, f"the recorded order: {traces[0]}"
    orders = [{file: number for number, file in enumerate(trace)} for trace in traces]
    wrong = [
        (one, other)
        for one, other in itertools.combinations([f for f in listed if f not in UNORDERED], 2)
        if all(order.get(other, len(order)) < order.get(one, -1) for order in orders)
    ]
    assert not wrong, f"the recorded order: {traces[0]}"


def _kept(trace: Trace, folders: tuple[str, ...]) -> list[str]:
    return [file for file in trace.files if file.startswith(folders) and file not in BACKGROUND]


def _section(title: str) -> str:
    _, _, rest = PAGE.partition(f"# {title}\n")
    assert rest, title
    return re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]


def _rows(section: str) -> list[tuple[str, str]]:
    """The rows of a section's table, without its head."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return rows[1:]


def _table(title: str) -> list[str]:
    """The files of a section's table, in order."""
    return [file for _, cell in _rows(_section(title)) for file in re.findall(r"`([^`]+)`", cell)]
