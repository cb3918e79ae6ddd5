"""Where a run's numbers go, read back by those who will read them."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from wandb_files import held_for_wandb

from tests.own_thread import own_records
from tests.patience import PATIENCE_S
from tinkex.errors import InputError, MissingPackageError, StorageError
from tinkex.tracking.history import METRICS, read_metrics
from tinkex.tracking.sinks import JsonlSink, Sinks, open_sinks

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCE = Path(__file__).parents[3] / "src"
SETTINGS = {"learning_rate": 1e-4, "model": "tinkex/tiny"}


def opened(folder: Path, *names: str) -> Sinks:
    return open_sinks(names, folder, "run", SETTINGS)


def test_the_file_is_written_whatever_else_is_asked_for(tmp_path: Path):
    for names in ((), ("jsonl",), ("jsonl", "jsonl")):
        folder = tmp_path / str(len(names))
        sinks = opened(folder, *names)
        sinks.record(1, {"loss": 2.0})
        sinks.close()
        assert read_metrics(folder) == [{"step": 1, "loss": 2.0}]
        assert sinks.places == []


def test_a_line_can_be_read_as_soon_as_it_is_recorded(tmp_path: Path):
    sinks = opened(tmp_path / "new" / "folder")
    sinks.record(1, {"loss": 2.0})
    assert read_metrics(tmp_path / "new" / "folder") == [{"step": 1, "loss": 2.0}]
    sinks.close()


def test_going_on_after_a_kill_drops_the_torn_line(tmp_path: Path):
    (tmp_path / METRICS).write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    sinks = opened(tmp_path)
    sinks.record(2, {"loss": 1.0})
    sinks.close()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]


@pytest.mark.parametrize("name", ["", "csv", "wandb:", "wandb: ", "jsonl:x", "tensorboard:x", "W"])
def test_an_unknown_place_is_refused_with_the_choices(tmp_path: Path, name: str):
    with pytest.raises(InputError, match="choose jsonl, tensorboard, wandb or wandb:PROJECT"):
        opened(tmp_path / "run", name)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("tensorboard", "tensorboardX", "tensorboard"), ("wandb:mine", "wandb", "wandb")],
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"pip install 'tinkex\[{extra}\]'"):
        opened(tmp_path / "run", name)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_a_storage_error_that_names_it(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"Cannot write .*file/run/metrics\.jsonl"):
        opened(tmp_path / "file" / "run")


def test_a_full_disk_is_a_storage_error(tmp_path: Path):
    (tmp_path / METRICS).symlink_to("/dev/full")
    sink = JsonlSink(tmp_path)
    with pytest.raises(StorageError, match="No space left on device"):
        sink.record(1, {"loss": 2.0})
    sink.close()


class _Broken:
    place = "a place that breaks"

    def record(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("no more")

    def close(self) -> None:
        raise ConnectionError("not even that")


def test_a_viewer_that_fails_is_warned_about_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    sinks = Sinks(JsonlSink(tmp_path), [_Broken()])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            sinks.record(step, {"loss": 1.0})
    assert [record.getMessage() for record in own_records(caplog)] == [
        "No more results go to this place: a place that breaks (no more)"
    ]
    assert len(read_metrics(tmp_path)) == 3
    assert sinks.places == []
    sinks.close()


def test_a_viewer_that_cannot_finish_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        Sinks(JsonlSink(tmp_path), [_Broken()]).close()
    assert "Could not finish: a place that breaks (not even that)" in caplog.text


# -- the real readers ------------------------------------------------------------------------------


def curves_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader: Any = EventAccumulator(str(folder))
    reader.Reload()
    return {
        name: [(event.step, event.value) for event in reader.Scalars(name)]
        for name in reader.Tags()["scalars"]
    }


def test_tensorboard_shows_what_was_recorded(tmp_path: Path):
    sinks = opened(tmp_path, "tensorboard")
    sinks.record(1, {"loss": 2.0, "tokens": 8})
    sinks.record(2, {"loss": math.nan, "eval_loss": 1.5})
    sinks.record(3, {"loss": 1.0})
    sinks.close()
    assert curves_in(tmp_path / "tensorboard") == {
        "loss": [(1, 2.0), (3, 1.0)],
        "tokens": [(1, 8.0)],
        "eval_loss": [(2, 1.5)],
    }
    assert sinks.places == [f"TensorBoard: tensorboard --logdir {tmp_path}/tensorboard"]


def test_tensorboard_shows_a_resumed_run_as_one_curve(tmp_path: Path):
    for steps, loss in (((1, 2, 3), 2.0), ((2, 3, 4), 1.0)):
        sinks = opened(tmp_path, "tensorboard")
        for step in steps:
            sinks.record(step, {"loss": loss})
        sinks.close()
    assert curves_in(tmp_path / "tensorboard") == {"loss": [(1, 2.0), (2, 1.0), (3, 1.0), (4, 1.0)]}


PROGRAM = Path(__file__).with_name("wandb_program.py")


def sent(folder: Path, *steps: int, mode: str = "offline") -> tuple[dict[str, Any], str]:
    """What an offline run holds for W&B after these steps, and what was said on the way.

    W&B leaves its settings in the process, so another one sends.
    """
    home = folder.parent / "home"
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= {"WANDB_MODE": mode, "HOME": str(home), "PYTHONPATH": str(SOURCE)}
    env |= {f"WANDB_{kind}_DIR": str(home) for kind in ("CONFIG", "CACHE", "DATA")}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *map(str, steps)],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    return {**json.loads(done.stdout), **held_for_wandb(folder)}, done.stderr


def test_weights_and_biases_gets_settings_and_rows(tmp_path: Path):
    found, said = sent(tmp_path / "run", 1, 2)
    assert (found["project"], found["name"]) == ("mine", "a name")
    assert found["settings"]["learning_rate"] == 1e-4
    assert [(row["_step"], row["loss"], row.get("eval_loss")) for row in found["rows"]] == [
        (1, 2.0, None),
        (2, 1.0, 1.5),
    ]
    assert found["places"][0].startswith(f"Weights & Biases: offline, in {tmp_path}/run/wandb/")
    assert said == "", "the view is ours"


def test_a_resumed_run_stays_the_same_run_at_weights_and_biases(tmp_path: Path):
    sent(tmp_path / "run", 1)
    name = (tmp_path / "run" / "wandb.id").read_text()
    found, _ = sent(tmp_path / "run", 2)
    assert (tmp_path / "run" / "wandb.id").read_text() == name
    assert [row["_step"] for row in found["rows"]] == [1, 2]
    assert len(list((tmp_path / "run" / "wandb").glob(f"offline-*/run-{name.strip()}.wandb"))) == 2


def test_without_an_account_weights_and_biases_says_how_to_sign_in(tmp_path: Path):
    found, _ = sent(tmp_path / "run", 1, mode="online")
    assert "Sign in with `wandb login`, or set WANDB_MODE=offline" in found["error"]
