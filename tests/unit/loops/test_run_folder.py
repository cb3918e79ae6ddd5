"""A run's folder survives being killed, and is not taken for something it is not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tinkex.errors import InputError, StorageError
from tinkex.loops.run_folder import (
    CHECKPOINTS,
    Record,
    RunCheckpoint,
    RunFolder,
    record_of,
    refuse_other_run,
    refuse_other_tokens,
)
from tinkex.loops.run_settings import DpoSettings, SftSettings
from tinkex.tracking.history import METRICS

if TYPE_CHECKING:
    from pathlib import Path

RECORD = Record(
    kind="sft",
    model="tinkex/tiny",
    title="sft tinkex/tiny",
    settings={"batch_size": 8, "seed": 0, "save_every": 3},
    files={},
    rendered="abc",
    steps=9,
    version="0",
    began=1.5,
)
FIRST, SECOND = (RunCheckpoint(step, f"tinker://r/weights/{step}", f"s{step}") for step in (3, 6))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    place = RunFolder(tmp_path / "run")
    place.make()
    place.write(RECORD)
    return place


def test_what_is_written_is_read_back(folder: RunFolder):
    assert folder.read() == RECORD
    assert folder.change(status="finished") == replace(RECORD, status="finished")
    assert RunFolder(folder.path).read() == replace(RECORD, status="finished")


def test_nothing_is_left_of_the_way_it_was_written(folder: RunFolder):
    folder.add(FIRST)
    assert sorted(one.name for one in folder.path.iterdir()) == [CHECKPOINTS, "run.json"]


def test_a_run_that_took_no_step_has_not_begun(folder: RunFolder):
    assert not folder.started
    (folder.path / METRICS).write_text('{"step": 1}\n')
    assert folder.started


def test_saves_come_back_in_their_order(folder: RunFolder):
    folder.add(FIRST)
    folder.add(SECOND)
    assert folder.checkpoints() == [FIRST, SECOND]


def test_half_a_line_is_no_save(folder: RunFolder):
    folder.add(FIRST)
    with (folder.path / CHECKPOINTS).open("a") as file:
        file.write('{"step": 6, "state_pa')
    assert folder.checkpoints() == [FIRST]
    folder.add(SECOND)
    assert folder.checkpoints() == [FIRST, SECOND]


def test_going_back_forgets_what_came_after(folder: RunFolder):
    folder.add(FIRST)
    folder.add(SECOND)
    (folder.path / METRICS).write_text("".join(f'{{"step": {n}, "loss": {n}}}\n' for n in range(8)))
    assert [row["step"] for row in folder.rewind(3)] == [0, 1, 2, 3]
    assert folder.checkpoints() == [FIRST]


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "sft"}', "{"])
def test_a_file_that_no_run_wrote_is_named(folder: RunFolder, text: str):
    (folder.path / "run.json").write_text(text)
    with pytest.raises(InputError, match=r"run\.json: is not what a run writes"):
        folder.read()


def test_a_list_of_saves_that_no_run_wrote_is_named(folder: RunFolder):
    (folder.path / CHECKPOINTS).write_text(json.dumps({"steps": 3}) + "\n")
    with pytest.raises(InputError, match=r"checkpoints\.jsonl: is not what a run writes"):
        folder.checkpoints()


def test_a_folder_with_other_things_is_refused(tmp_path: Path):
    (tmp_path / "holiday.jpg").write_text("")
    with pytest.raises(InputError, match="holds other things than a run; choose another folder"):
        RunFolder(tmp_path).make()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"Cannot write .*file/run: .*"):
        RunFolder(tmp_path / "file" / "run").make()


# -- resuming ---------------------------------------------------------------------------------


def test_a_run_that_was_begun_is_not_begun_again(folder: RunFolder):
    folder.add(FIRST)
    with pytest.raises(InputError, match="this folder has a run already"):
        record_of(folder, resume=False)
    assert record_of(folder, resume=True) == RECORD


def test_a_run_that_took_no_step_is_begun_again(folder: RunFolder):
    assert record_of(folder, resume=False) is None


def test_where_there_is_no_run_there_is_nothing_to_resume(tmp_path: Path):
    with pytest.raises(InputError, match="there is no run to resume"):
        record_of(RunFolder(tmp_path), resume=True)


def test_every_setting_that_changed_is_named():
    with pytest.raises(InputError) as caught:
        refuse_other_run(RECORD, SftSettings(batch_size=4, seed=2), {})
    assert "batch_size was 8, and is 4 now" in str(caught.value)
    assert "seed was 0, and is 2 now" in str(caught.value)


def test_how_often_a_run_is_saved_may_change():
    refuse_other_run(RECORD, SftSettings(save_every=5), {})


def test_another_kind_of_run_is_refused():
    with pytest.raises(InputError, match="it is a run of `train sft`, not of `train dpo`"):
        refuse_other_run(RECORD, DpoSettings(), {})


def test_files_that_changed_came_or_went_are_named(tmp_path: Path):
    data = tmp_path / "data.jsonl"
    data.write_text("now")
    record = replace(
        RECORD,
        files={"data": {"path": "old/data.jsonl", "sha256": "0"}, "eval": {"sha256": "1"}},
    )
    with pytest.raises(InputError) as caught:
        refuse_other_run(record, SftSettings(), {"data": data})
    assert f"the contents of {data} have changed" in str(caught.value)
    assert "it was started with a file: eval" in str(caught.value)
    with pytest.raises(InputError, match="it was started without a file: data"):
        refuse_other_run(RECORD, SftSettings(), {"data": data})


def test_other_tokens_from_the_same_data_are_refused():
    refuse_other_tokens(RECORD, "abc")
    with pytest.raises(InputError, match="tokenizer or template differs"):
        refuse_other_tokens(RECORD, "def")


def test_two_processes_do_not_train_in_one_folder(folder: RunFolder):
    other = RunFolder(folder.path)
    with folder.claimed(), pytest.raises(InputError, match="another process is training"):
        other.claimed().__enter__()
    with other.claimed():
        pass
