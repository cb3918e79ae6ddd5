"""Saving and restoring: to the bit, in another process, whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.engine.training.kit import QWEN, add, datum, op, run, step, trainer
from tinkex.engine.checkpoints import adapter_file
from tinkex.engine.checkpoints.storage import write_atomically
from tinkex.engine.protocol import SavedAdapter
from tinkex.errors import RequestFailedError, StorageError

if TYPE_CHECKING:
    from tinkex.engine.training.trainer import Trainer

ROOT = Path(__file__).parents[4]


def _train(made: Trainer, first: int, last: int) -> None:
    for number in range(first, last):
        run(made, op("m", [datum(9, number), datum(20, number)]))
        run(made, op("m", [datum(5, number, 0, "ppo")], "ppo"))
        step(made, "m", learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0)


def _save(made: Trainer, path: Path, *, optimizer: bool) -> SavedAdapter:
    state = made.state("m", optimizer=optimizer)
    write_atomically(path, partial(adapter_file.write, state))
    return SavedAdapter(size_bytes=path.stat().st_size, has_optimizer=state.moments is not None)


def _load(made: Trainer, path: Path, *, optimizer: bool) -> None:
    state = adapter_file.load(path, made.adapters["m"].weights.config)
    made.restore("m", state, optimizer=optimizer)


CONTINUE = """
import sys
from functools import partial
from pathlib import Path
import torch
from tests.unit.engine.training.kit import add, datum, op, run, step, trainer
from tests.unit.engine.checkpoints.test_checkpoints import _load, _save, _train
folder = Path(sys.argv[1])
made = trainer()
add(made, "m", stir=False, seed=99)
_load(made, folder / "half", optimizer=True)
step(made, "m")
_train(made, 3, 5)
_save(made, folder / "resumed", optimizer=True)
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
def test_a_run_that_continues_in_another_process_equals_the_unbroken_one_to_the_bit(tmp_path):
    made = trainer()
    add(made, "m")
    _train(made, 0, 3)
    run(made, op("m", [datum(11, 50)]))  # a gradient is waiting when the state is saved
    _save(made, tmp_path / "half", optimizer=True)
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
    _load(resumed, tmp_path / "resumed", optimizer=True)
    assert _same(resumed.adapters["m"], made.adapters["m"])
    assert made.adapters["m"].moments.step == 6


def test_a_loaded_checkpoint_is_what_was_saved(tmp_path):
    made, other = trainer(), trainer()
    add(made, "m")
    add(other, "m", stir=False, seed=5)
    _train(made, 0, 1)
    run(made, op("m", [datum(11)]))
    saved = _save(made, tmp_path / "deep" / "er", optimizer=True)
    assert saved.has_optimizer
    assert saved.size_bytes == (tmp_path / "deep" / "er").stat().st_size
    _load(other, tmp_path / "deep" / "er", optimizer=True)
    assert _same(made.adapters["m"], other.adapters["m"])
    assert other.adapters["m"].weights.lora.seed == 1


def test_weights_alone_start_a_fresh_optimizer(tmp_path):
    made = trainer()
    add(made, "m")
    _train(made, 0, 1)
    run(made, op("m", [datum(11)]))
    weights = made.adapters["m"].weights.flat_P
    full = _save(made, tmp_path / "full", optimizer=True)
    alone = _save(made, tmp_path / "alone", optimizer=False)
    assert not alone.has_optimizer
    assert alone.size_bytes < full.size_bytes / 3
    for name in ("full", "alone"):
        _load(made, tmp_path / name, optimizer=False)
        adapter = made.adapters["m"]
        assert torch.equal(adapter.weights.flat_P, weights)
        assert adapter.moments.step == 0
        assert not adapter.moments.first_P.any()
        assert adapter.gradient_P is None
    with pytest.raises(RequestFailedError, match="has no optimizer state"):
        _load(made, tmp_path / "alone", optimizer=True)


@pytest.mark.parametrize("where", [20, -10])
def test_a_damaged_checkpoint_is_noticed_and_the_adapter_stays(tmp_path, where):
    made = trainer()
    add(made, "m")
    path = tmp_path / "x"
    _save(made, path, optimizer=True)
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    before = made.adapters["m"]
    with pytest.raises(RequestFailedError, match="the checkpoint x is damaged"):
        _load(made, path, optimizer=True)
    assert made.adapters["m"] is before


def test_a_truncated_checkpoint_is_noticed(tmp_path):
    made = trainer()
    add(made, "m")
    path = tmp_path / "x"
    _save(made, path, optimizer=True)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RequestFailedError, match="is damaged"):
        _load(made, path, optimizer=False)


def test_a_save_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    made = trainer()
    add(made, "m")
    _save(made, tmp_path / "x", optimizer=True)
    before = (tmp_path / "x").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        _save(made, tmp_path / "x", optimizer=False)
    assert (tmp_path / "x").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_checkpoint_of_another_shape_or_model_is_refused(tmp_path):
    made, wider, other = trainer(), trainer(), trainer(QWEN)
    add(made, "m", 4)
    add(wider, "m", 5)
    add(other, "m", 4)
    _save(made, tmp_path / "x", optimizer=True)
    with pytest.raises(RequestFailedError, match="the checkpoint has rank=4, the model rank=5"):
        _load(wider, tmp_path / "x", optimizer=True)
    with pytest.raises(RequestFailedError, match="belongs to test/small"):
        _load(other, tmp_path / "x", optimizer=True)
    with pytest.raises(RequestFailedError, match="no checkpoint here"):
        _load(made, tmp_path / "nothing", optimizer=True)
