"""The tour of the code names the files that calls really pass, in their order."""

from __future__ import annotations

import itertools
import re
import sys
from typing import TYPE_CHECKING

import pytest

import tinkex
from tests.docs.blocks import ROOT, page_named
from tests.docs.flows import Profile, Trace, traced_server
from tests.docs.test_examples import TRAINING_DATA
from tests.patience import PATIENCE_S
from tinkex import Datum, ModelInput, SamplingParams
from tinkex.cli.main import main
from tinkex.testing import API_KEY, FakeServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAGE = page_named("architecture.md").read_text()
RECORDINGS = 3
# What the page lists of each process; types and codecs are listed for the client only.
LISTED = {
    "client": ("",),
    "server": ("server/", "serving/", "engine/process/"),
    "engine": ("engine/",),
}
COMMAND_LISTED = ("cli/", "loops/", "data.py", "chat/", "tracking/", "clients/")
# They run all the time: a timer that looks after the engine, and the engine's liveness.
BACKGROUND = {"serving/process.py", "engine/process/program.py"}
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


@pytest.fixture(scope="module")
def flows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Flow]:
    """A sample and a training step, each recorded several times in all three processes."""
    profile = Profile()
    with (
        traced_server(tmp_path_factory.mktemp("flows")) as server,
        profile.installed(),
        tinkex.ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        training = service.create_lora_training_client("tinkex/tiny", rank=8)
        sampler = training.save_weights_and_get_sampling_client()
        data = [Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})]

        def sample() -> object:
            params = SamplingParams(max_tokens=4)
            return sampler.sample(ModelInput.from_ints([1, 2, 3]), 1, params).result()

        def train() -> object:
            return training.forward_backward(data, "cross_entropy").result()

        calls: dict[str, Callable[[], object]] = {"A sample": sample, "A training step": train}
        recorded: dict[str, Flow] = {}
        for name, call in calls.items():
            call()  # the first one imports, connects and loads
            flow = recorded[name] = {role: [] for role in LISTED}
            for number in range(RECORDINGS):
                with server.recording(f"{name}-{number}".replace(" ", "-")) as others:
                    flow["client"].append(profile.record(call))
                for role, trace in others.items():
                    flow[role].append(trace)
        return recorded


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
    assert count <= 28


def test_the_page_lists_the_files_of_train_sft_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "train.jsonl").write_text(TRAINING_DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    command = ["train", "sft", "train.jsonl", "--model", "tinkex/tiny", "--steps", "2", "--output"]
    profile = Profile()
    with FakeServer().serve() as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", API_KEY)
        assert main([*command, "runs/warm-up"]) == 0
        with profile.installed():
            traces = [
                profile.record(lambda name=f"runs/{number}": main([*command, name]))
                for number in range(RECORDINGS)
            ]
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
