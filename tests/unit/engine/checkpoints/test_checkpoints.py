"""Saving and restoring: to the bit, in another process, whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.engine.training.kit import QWEN, add, datum, op, run, step, trainer
from tinkex.errors import RequestFailedError, StorageError

if TYPE_CHECKING:
    from tinkex.engine.training.trainer import Trainer

ROOT = Path(__file__).parents[4]


def _train(made: Trainer, first: int, last: int) -> None:
    for number in range(first, last):
        run(made, op("m", [datum(9, number), datum(20, number)]))
        run(made, op("m", [datum(5, number, 0, "ppo")], "ppo"))
        step(made, "m", learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0)


CONTINUE = """
import sys
from pathlib import Path
import torch
from tests.unit.engine.training.kit import add, datum, op, run, step, trainer
from tests.unit.engine.checkpoints.test_checkpoints import _train
folder = Path(sys.argv[1])
made = trainer()
add(made, "m", stir=False, seed=99)
made.load("m", folder / "half", optimizer=True)
step(made, "m")
_train(made, 3, 5)
made.save("m", folder / "resumed", optimizer=True)
"""


def _same(left, right) -> bool:
    return (
        torch.equal(left.weights.flat_P, right.weights.flat_P)
        and torch.equal(left.moments.first_P, right.moments.first_P)
        and torch.equal(left.moments.second_P, right.moments.second_P)
        and left.moments.step == right.moments.step
        and (left.gradient_P is None) == (right.gradient_P is None)
        and (left.gradient_P is None or torch.equal(left.gradient_P, right.gradient_P))
    )


@pytest.mark.req("B16")
def test_a_run_that_goes_on_in_another_process_equals_the_unbroken_one_to_the_bit(tmp_path):
    made = trainer()
    add(made, "m")
    _train(made, 0, 3)
    run(made, op("m", [datum(11, 50)]))  # a gradient is waiting when the state is saved
    made.save("m", tmp_path / "half", optimizer=True)
    step(made, "m")
    _train(made, 3, 5)
    subprocess.run(
        [sys.executable, "-c", CONTINUE, str(tmp_path)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    resumed = trainer()
    add(resumed, "m", stir=False)
    resumed.load("m", tmp_path / "resumed", optimizer=True)
    assert _same(resumed.adapters["m"], made.adapters["m"])
    assert made.adapters["m"].moments.step == 6


def test_a_loaded_checkpoint_is_what_was_saved(tmp_path):
    made, other = trainer(), trainer()
    add(made, "m")
    add(other, "m", stir=False, seed=5)
    _train(made, 0, 1)
    run(made, op("m", [datum(11)]))
    saved = made.save("m", tmp_path / "deep" / "er", optimizer=True)
    assert saved.has_optimizer
    assert saved.size_bytes == (tmp_path / "deep" / "er").stat().st_size
    other.load("m", tmp_path / "deep" / "er", optimizer=True)
    assert _same(made.adapters["m"], other.adapters["m"])
    assert other.adapters["m"].weights.lora.seed == 1


def test_weights_alone_start_a_fresh_optimizer(tmp_path):
    made = trainer()
    add(made, "m")
    _train(made, 0, 1)
    run(made, op("m", [datum(11)]))
    weights = made.adapters["m"].weights.flat_P
    full = made.save("m", tmp_path / "full", optimizer=True)
    alone = made.save("m", tmp_path / "alone", optimizer=False)
    assert not alone.has_optimizer
    assert alone.size_bytes < full.size_bytes / 3
    for name in ("full", "alone"):
        made.load("m", tmp_path / name, optimizer=False)
        adapter = made.adapters["m"]
        assert torch.equal(adapter.weights.flat_P, weights)
        assert adapter.moments.step == 0
        assert not adapter.moments.first_P.any()
        assert adapter.gradient_P is None
    with pytest.raises(RequestFailedError, match="has no optimizer state"):
        made.load("m", tmp_path / "alone", optimizer=True)


@pytest.mark.parametrize("where", [20, -10])
def test_a_damaged_checkpoint_is_noticed_and_the_adapter_stays(tmp_path, where):
    made = trainer()
    add(made, "m")
    path = tmp_path / "x"
    made.save("m", path, optimizer=True)
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    before = made.adapters["m"]
    with pytest.raises(RequestFailedError, match="the checkpoint x is damaged"):
        made.load("m", path, optimizer=True)
    assert made.adapters["m"] is before


def test_a_truncated_checkpoint_is_noticed(tmp_path):
    made = trainer()
    add(made, "m")
    path = tmp_path / "x"
    made.save("m", path, optimizer=True)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RequestFailedError, match="is damaged"):
        made.load("m", path, optimizer=False)


def test_a_save_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    made = trainer()
    add(made, "m")
    made.save("m", tmp_path / "x", optimizer=True)
    before = (tmp_path / "x").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        made.save("m", tmp_path / "x", optimizer=False)
    assert (tmp_path / "x").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_checkpoint_of_another_shape_or_model_is_refused(tmp_path):
    made, wider, other = trainer(), trainer(), trainer(QWEN)
    add(made, "m", 4)
    add(wider, "m", 5)
    add(other, "m", 4)
    made.save("m", tmp_path / "x", optimizer=True)
    with pytest.raises(RequestFailedError, match="the checkpoint has rank=4, the model rank=5"):
        wider.load("m", tmp_path / "x", optimizer=True)
    with pytest.raises(RequestFailedError, match="belongs to test/small"):
        other.load("m", tmp_path / "x", optimizer=True)
    with pytest.raises(RequestFailedError, match="no checkpoint here"):
        made.load("m", tmp_path / "nothing", optimizer=True)
