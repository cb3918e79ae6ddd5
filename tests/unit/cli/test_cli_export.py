"""Exports and imports on the command line, against servers of all kinds that are no real engine.

What is really computed and compared is in tests/e2e/test_export_import.py.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.adapters import kit
from tinkex.adapters.folder import read_adapter
from tinkex.adapters.peft_layout import LoraKey
from tinkex.cli.command_errors import CommandError
from tinkex.cli.commands import DONE, FAILED, MISUSED
from tinkex.cli.export import export_adapter
from tinkex.cli.fetch import WORK_PREFIX, writing_into
from tinkex.clients.service import ServiceClient
from tinkex.loops.run_folder import Record, RunCheckpoint, RunFolder
from tinkex.testing import FakeServer, faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Ran, Saved

    Run = Callable[..., Ran]

HEAD = {LoraKey(None, "unembed", "A"), LoraKey(None, "unembed", "B")}


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def hosted(server: FakeServer) -> None:
    """Behave as hosted Tinker does: no archives, no uploads."""
    for route in ("get_checkpoint_archive", "import_weights"):
        server.faults.on(route, faults.reply(404, {"detail": "Not Found"}), times=None)


# -- export_adapter --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["training", "sampler", "external"])
def test_every_kind_of_checkpoint_becomes_a_peft_folder(saved: Saved, kind: str):
    with ServiceClient() as service:
        export_adapter(service, getattr(saved, kind), Path("deep/er/adapter"))
    assert names_in(Path()) == [
        "deep",
        "deep/er",
        "deep/er/adapter",
        f"deep/er/adapter/{kit.CONFIG}",
        f"deep/er/adapter/{kit.WEIGHTS}",
    ]
    adapter = read_adapter(Path("deep/er/adapter"))
    assert adapter.tensors.keys() == HEAD
    written = json.loads(Path("deep/er/adapter", kit.CONFIG).read_text())
    assert (written["base_model_name_or_path"], written["target_modules"]) == (
        "tinkex/tiny",
        ["lm_head"],
    )


def test_a_server_without_archives_exports_training_checkpoints_for_this_only(
    run: Run, saved: Saved, server: FakeServer
):
    hosted(server)
    before = run("checkpoint", "list", "--limit", "0", "-f", "json").json
    with ServiceClient() as service:
        export_adapter(service, saved.training, "adapter")
        assert read_adapter(Path("adapter")).tensors.keys() == HEAD
        with pytest.raises(CommandError, match="Sampler weights cannot be downloaded") as refused:
            export_adapter(service, saved.sampler, "other")
    assert "tinker://RUN/weights/NAME" in refused.value.hint
    assert not Path("other").exists()
    assert run("checkpoint", "list", "--limit", "0", "-f", "json").json == before


def test_an_adapter_is_replaced_and_anything_else_is_not(saved: Saved):
    other = Path("mine")
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    with ServiceClient() as service:
        for _ in range(2):
            export_adapter(service, saved.sampler, Path("adapter"))
        with pytest.raises(CommandError, match="holds something else"):
            export_adapter(service, saved.sampler, other)
    assert names_in(other) == ["thesis.txt"]


@pytest.mark.parametrize("effect", [faults.drop(), faults.drop_midway(), faults.reply(403)])
def test_a_broken_download_leaves_nothing(saved: Saved, server: FakeServer, effect: Any):
    server.faults.on(None, effect, when=lambda seen: "/files/" in seen.path)
    with ServiceClient() as service, pytest.raises(CommandError, match="download"):
        export_adapter(service, saved.sampler, Path("adapter"))
    assert names_in(Path()) == []


def test_a_checkpoint_that_is_no_adapter_of_ours_is_left_to_the_download_command(
    saved: Saved, server: FakeServer
):
    links = {
        "urls": {"weights.age": f"{server.url}/api/v1/healthz"},
        "expires": "2100-01-01T00:00:00Z",
    }
    server.faults.on("get_external_weights_urls", faults.reply(200, links))
    with ServiceClient() as service, pytest.raises(CommandError) as refused:
        export_adapter(service, saved.external, Path("adapter"))
    assert str(refused.value) == (
        f"{saved.external} cannot be exported: is encrypted; decrypt its files with age first"
    )
    assert "checkpoint download" in refused.value.hint
    assert names_in(Path()) == []


# -- checkpoint export -----------------------------------------------------------------------------


def test_another_base_model_than_the_servers_leaves_nothing_behind(run: Run, saved: Saved):
    # The fake engine's tinkex/tiny is a toy; the one that is loaded here is a real model.
    ran = run("checkpoint", "export", saved.training, "-o", "adapter")
    assert (ran.status, ran.out) == (FAILED, "")
    assert "tinkex/tiny is another model here than on the server" in ran.err
    assert names_in(Path()) == []


def test_what_exists_is_replaced_only_by_force(run: Run, saved: Saved):
    Path("adapter").mkdir()
    ran = run("checkpoint", "export", saved.training, "-o", "adapter")
    assert ran.status == FAILED
    assert "--force" in ran.err
    assert names_in(Path()) == ["adapter"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense", "-o", "x"], "tinker://"),
        (["tinker://a/b", "-o", "x"], "tinker://"),
        (["tinker://a/weights/b", "-o", "x", "--dtype", "float32"], "--layout merged"),
    ],
)
def test_a_misuse_says_so_and_asks_nobody(
    run: Run, server: FakeServer, words: list[str], message: str
):
    ran = run("checkpoint", "export", *words)
    assert ran.status == MISUSED
    assert message in ran.err
    assert server.requests == []


def test_a_checkpoint_that_is_not_there_is_a_failure(run: Run, server: FakeServer):
    ran = run("checkpoint", "export", "tinker://nobody/weights/x", "-o", "x")
    assert ran.status == FAILED
    assert "There is no checkpoint tinker://nobody/weights/x" in ran.err
    assert "--base" not in ran.err
    assert names_in(Path()) == []


# -- the folder of a run ---------------------------------------------------------------------------


@pytest.fixture
def run_folder(saved: Saved) -> Path:
    """What `tinkex train` leaves, with the checkpoints of the server."""
    folder = Path("runs/pirate")
    place = RunFolder(folder)
    place.make()
    place.write(
        Record(
            kind="sft",
            model="tinkex/tiny",
            title="",
            settings={},
            files={},
            rendered="",
            steps=1,
            version="0",
            began=0.0,
            adapter_path=saved.sampler,
        )
    )
    place.add(RunCheckpoint(0, "tinker://other/weights/x", "tinker://other/sampler_weights/x"))
    place.add(RunCheckpoint(1, saved.training, saved.sampler))
    place.add(RunCheckpoint(2, "tinker://other/weights/y", "tinker://other/sampler_weights/y"))
    return folder


def test_the_folder_of_a_run_stands_for_what_it_has_made(run: Run, saved: Saved, run_folder: Path):
    kit.write(run_folder / "adapter")
    ran = run("checkpoint", "export", run_folder, "-o", "out")
    assert "runs/pirate/adapter holds the adapter of this run already" in ran.err
    assert f"Comparing with {saved.training}" in ran.err
    assert run("checkpoint", "info", run_folder, "-f", "json").json["tinker_path"] == saved.training
    downloaded = run("checkpoint", "download", run_folder, "-f", "json").json
    assert downloaded["checkpoint_path"] == saved.training


@pytest.mark.parametrize("command", ["export", "download", "info"])
def test_other_folders_than_a_run_s_are_refused_with_what_to_give(run: Run, command: str):
    words = ["-o", "x"] if command == "export" else []
    Path("empty").mkdir()
    for path, status, message in (
        ("empty", MISUSED, "empty is a folder, but not of a training run"),
        ("runs/typo", MISUSED, "runs/typo is neither a checkpoint nor the folder of a"),
        (kit.write(Path("made")), FAILED, "made is an exported adapter in PEFT's layout already"),
    ):
        ran = run("checkpoint", command, path, *words)
        assert ran.status == status
        assert message in ran.err
        assert "tinker://RUN/weights/NAME" in ran.err


# -- the disk --------------------------------------------------------------------------------------


@pytest.fixture
def mask() -> Iterator[int]:
    """Others of the group may read, everybody else may not."""
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def modes_in(folder: Path) -> set[tuple[str, int]]:
    found = [folder, *folder.rglob("*")]
    return {("folder" if p.is_dir() else "file", p.stat().st_mode & 0o777) for p in found}


@pytest.mark.usefixtures("mask")
def test_whoever_the_umask_lets_may_read_what_was_exported(run: Run, saved: Saved):
    with ServiceClient() as service:
        export_adapter(service, saved.training, Path("exported"))
    run("checkpoint", "download", saved.external, "-o", "downloaded")
    for folder in ("exported", "downloaded"):
        assert modes_in(Path(folder)) == {("folder", 0o750), ("file", 0o640)}


def test_a_disk_without_room_is_said_with_its_place_and_sizes(
    run: Run, saved: Saved, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(".")._replace(free=10)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    for command in ("export", "download"):
        ran = run("checkpoint", command, saved.training, "-o", "deep/er/x")
        assert ran.status == FAILED
        place = "deep/er" if command == "export" else "deep/er/x"
        assert f"Error: Cannot write to {place}: not enough space (" in ran.err
        assert " needed, 10 B free)" in ran.err
        assert "choose another place with -o" in ran.err
        assert names_in(Path()) == []


def test_a_disk_that_fills_up_is_said_once_with_the_system_s_reason(tmp_path: Path):
    work = tmp_path / f"{WORK_PREFIX}1" / "adapter"
    with pytest.raises(CommandError) as refused, writing_into(tmp_path):  # noqa: SIM117
        with writing_into(work, 1000):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said = str(refused.value)
    assert said.startswith(f"Cannot write to {tmp_path}: No space left on device (1000 B needed, ")
    assert said.endswith(" free)")


def test_other_failures_of_the_system_stay_what_they_are(tmp_path: Path):
    with pytest.raises(PermissionError), writing_into(tmp_path):
        raise PermissionError(errno.EACCES, "no")


# -- checkpoint import -----------------------------------------------------------------------------


def test_a_server_that_takes_no_adapters_is_said_to_be_one(run: Run, server: FakeServer):
    hosted(server)
    ran = run("checkpoint", "import", kit.write(Path("adapter")))
    assert (ran.status, ran.out) == (FAILED, "")
    assert "not part of the official protocol" in ran.err
    assert "tinkex serve" in ran.err


@pytest.mark.parametrize("name", kit.BAD)
def test_bad_adapters_are_refused_by_what_is_wrong_and_not_sent(
    run: Run, server: FakeServer, name: str
):
    changes, message = kit.BAD[name]
    ran = run("checkpoint", "import", kit.write(Path("bad"), **changes))
    assert ran.status == MISUSED
    assert message in ran.err
    assert server.requests == []


def test_a_pickle_is_refused_with_the_way_out(run: Run, server: FakeServer):
    Path("bad").mkdir()
    Path("bad", kit.CONFIG).write_bytes(kit.config())
    Path("bad/adapter_model.bin").write_bytes(b"\x80\x02.")
    ran = run("checkpoint", "import", "bad")
    assert ran.status == MISUSED
    assert "safe_serialization=True" in ran.err
    assert server.requests == []


def test_an_adapter_without_a_base_model_needs_one(run: Run, server: FakeServer):
    kit.write(Path("adapter"), config=kit.config(base_model_name_or_path=None))
    ran = run("checkpoint", "import", "adapter")
    assert ran.status == FAILED
    assert "--model" in ran.err
    assert server.requests == []


def test_an_unknown_base_model_is_refused_with_those_there_are(run: Run, server: FakeServer):
    ran = run("checkpoint", "import", kit.write(Path("adapter")), "--model", "no/such")
    assert ran.status == FAILED
    assert "there is: tinkex/tiny" in ran.err


def test_what_cannot_be_compared_here_is_imported_and_said_not_to_be(
    run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ("--model", "tinkex/tiny-2", "--name", "mine", "-f", "json")
    ran = run("checkpoint", "import", kit.write(Path("adapter")), *words)
    assert ran.status == DONE
    assert ran.json["verified"] is None
    assert ran.json["tinker_path"].endswith("/weights/mine")
    assert "Not compared" in ran.err
    asked = run("checkpoint", "import", "adapter", *words, "--base", "nowhere/at-all")
    assert asked.status == FAILED
    assert "base model cannot be loaded" in asked.err


def test_what_does_not_compare_is_deleted_again(run: Run, server: FakeServer):
    before = run("checkpoint", "list", "--limit", "0", "-f", "json").json
    # Here tinkex/tiny is a real model, and not the fake engine's toy.
    ran = run("checkpoint", "import", kit.write(Path("adapter")))
    assert (ran.status, ran.out) == (FAILED, "")
    assert "is another model here" in ran.err
    assert run("checkpoint", "list", "--limit", "0", "-f", "json").json == before
    assert len(server.seen("import_weights")) == 1
