"""The copies of adapters that kernels read: a budget in bytes, and which of them goes first."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.engine.training.kit import CONFIG
from tinkex.engine.backends.cuda.slots import LoraSlots
from tinkex.engine.checkpoints.parking import Parking
from tinkex.engine.checkpoints.scratch import ScratchFolder
from tinkex.engine.local.versions import Versions
from tinkex.engine.lora import initial, parameter_count
from tinkex.engine.sampler import BASE
from tinkex.types import LoraConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from tinkex.engine.lora import LoraWeights

LORA = LoraConfig(rank=4)
COPY_BYTES = 2 * parameter_count(CONFIG, LORA)


def adapter(seed: int, lora: LoraConfig = LORA) -> LoraWeights:
    weights = initial(CONFIG, lora, seed)
    weights.flat_P.copy_(
        torch.randn(weights.flat_P.shape, generator=torch.Generator().manual_seed(seed))
    )
    return weights


class Device:
    """Published versions and their slots, with room for so many copies besides one adapter."""

    def __init__(self, folder: ScratchFolder, copies: int, slots: int = 8) -> None:
        self.parking = Parking(device_bytes=copies * COPY_BYTES, folder=folder)
        self.versions = Versions(self.parking, "base", torch.bfloat16)
        self.slots = LoraSlots(
            CONFIG,
            slots,
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
            copies=self.versions.copies,
        )

    def publish(self, *names: str) -> list[str]:
        return [self.versions.add(name, adapter(number)) for number, name in enumerate(names)]

    def run(self, *versions: str) -> dict[str, int]:
        """A pass that names these versions."""
        with self.parking.holding():
            return self.slots.place(versions, self.versions.peek)

    def addressed(self, version: str) -> Tensor:
        """The numbers that the kernels would read as the first A of a version."""
        with self.parking.holding():
            slot = self.slots.place([version], self.versions.peek)[version]
        names = ("q_proj", "k_proj", "v_proj")
        pair = self.versions.copies[version].pair(0, "q_proj")
        assert pair is not None
        assert int(self.slots._addresses[names][0][0][slot, 0]) == pair.a_RI.data_ptr()
        return pair.a_RI.clone()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[ScratchFolder]:
    made = ScratchFolder(tmp_path, ".parked-")
    yield made
    made.close()


def test_copies_and_weights_together_stay_within_the_budget(folder: ScratchFolder) -> None:
    device = Device(folder, copies=6)
    versions = device.publish(*"abcdefgh")
    for version in versions * 2:
        device.run(version)
        assert device.parking.on_device_bytes <= 6 * COPY_BYTES
    assert 1 <= len(device.slots.in_use) <= 6


def test_the_least_recently_used_copy_goes_first(folder: ScratchFolder) -> None:
    device = Device(folder, copies=3)
    a, b, c, d = device.publish(*"abcd")
    for version in (a, b, c):
        device.run(version)
    assert device.slots.in_use == [a, b, c]
    device.run(a)
    device.run(d)
    assert device.slots.in_use == [c, a, d]


def test_a_version_of_the_pass_is_never_dropped_for_another(folder: ScratchFolder) -> None:
    device = Device(folder, copies=3)
    a, b, c, d = device.publish(*"abcd")
    for version in (a, b, c):
        device.run(version)
    placed = device.run(a, d, b)
    assert sorted(placed) == sorted([a, d, b])
    assert len(set(placed.values())) == 3
    assert set(device.slots.in_use) == {a, b, d}


def test_a_copy_that_was_dropped_comes_back_with_the_same_bits(folder: ScratchFolder) -> None:
    device = Device(folder, copies=2)
    versions = device.publish(*"abcde")
    before = [device.addressed(version) for version in versions]
    assert len(device.slots.in_use) == 2
    after = [device.addressed(version) for version in versions]
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        expected = adapter(number).pair(0, "q_proj")
        assert expected is not None
        assert torch.equal(one, other)
        assert torch.equal(one, expected.a_RI.to(torch.bfloat16))


def test_slots_are_used_again_when_their_copies_are_gone(folder: ScratchFolder) -> None:
    device = Device(folder, copies=2, slots=2)
    for version in device.publish(*"abcdef"):
        assert device.run(version)[version] in (0, 1)
        assert len(device.slots.in_use) <= 2


def test_the_base_model_has_no_slot(folder: ScratchFolder) -> None:
    device = Device(folder, copies=2)
    (version,) = device.publish("a")
    assert list(device.run(BASE, version)) == [version]


def copy_of(device: Device, version: str) -> weakref.ref[Tensor]:
    return weakref.ref(device.versions.copies.peek(version).flat_P)


def test_dropping_frees_weights_and_copy_at_once_when_nothing_runs(
    folder: ScratchFolder, tmp_path: Path
) -> None:
    device = Device(folder, copies=4)
    a, b = device.publish("a", "b")  # the weights of one take as much as two copies
    device.run(a, b)
    alive = copy_of(device, a)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    device.versions.retire("a")
    gc.collect()
    assert alive() is None
    assert device.slots.in_use == [b]
    assert list(tmp_path.rglob("*.safetensors")) == []
    device.versions.retire("b")
    assert device.parking.on_device_bytes == 0


def test_dropping_frees_weights_and_copy_with_the_last_sample_that_runs(
    folder: ScratchFolder,
) -> None:
    device = Device(folder, copies=4)
    (version,) = device.publish("a")
    for _ in range(2):
        device.versions.begin(version)
    device.run(version)
    alive = copy_of(device, version)
    device.versions.retire("a")
    device.versions.end(version)
    device.run(version)
    assert alive() is not None
    device.versions.end(version)
    gc.collect()
    assert alive() is None
    assert device.slots.in_use == []
    assert device.parking.on_device_bytes == 0


def test_versions_that_run_together_fit_as_copies(folder: ScratchFolder) -> None:
    device = Device(folder, copies=4)
    versions = device.publish(*"abcde")
    assert device.versions.fit({BASE, *versions[:4]})
    assert not device.versions.fit(set(versions))
    plain = Versions(device.parking, "other")
    kept = [plain.add(name, adapter(1)) for name in "abc"]
    assert plain.fit(set(kept[:2]))
    assert not plain.fit(set(kept))


def test_ranks_and_unembeddings_are_those_of_the_versions_named(folder: ScratchFolder) -> None:
    device = Device(folder, copies=40)
    a = device.versions.add("a", adapter(1, LoraConfig(rank=4, train_unembed=False)))
    b = device.versions.add("b", adapter(2, LoraConfig(rank=20)))
    device.run(a, b)
    assert (device.slots.rank([a]), device.slots.rank([a, b])) == (16, 32)
    assert (device.slots.unembeds([a]), device.slots.unembeds([a, b])) == (False, True)
