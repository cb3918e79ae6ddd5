"""The frozen weights of samples, kept while they have a name or a sample uses them.

A name is a snapshot or a saved location. Its weights may be replaced or dropped; samples that
started with them keep them. Every version has a unique id that is never reused, so that the KV
cache of one version is never used for another.

All are on shelves of one `Parking` and count against its budgets: the weights, and the copies that
a CUDA device samples from. Weights that were read from a file can be read again, so they are
dropped instead of parked while no sample uses them.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import TYPE_CHECKING

from tinkex.engine.checkpoints.parking import Packed
from tinkex.engine.lora import wrap
from tinkex.engine.sampler import BASE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tinkex.engine.checkpoints.parking import Parking
    from tinkex.engine.lora import LoraWeights


class Versions:
    """The versions of one base model.

    `copied_as` is the precision of the copies that sampling reads, None where it reads the weights
    themselves.
    """

    def __init__(
        self, parking: Parking, base_model: str, copied_as: torch.dtype | None = None
    ) -> None:
        self._parking = parking
        self._copied_as = copied_as
        self._numbers = count(1)
        # Mutable state: weights by id and their copies on the device, the id of each name, ids
        # whose weights are stored in a file, and how many samples use an id.
        self._weights = parking.shelf(f"sampling/{base_model}", pack_weights)
        self.copies = parking.copies(f"sampling copies/{base_model}", pack_weights)
        self._named: dict[str, str] = {}
        self._in_files: set[str] = set()
        self._users: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._weights)

    def add(self, name: str, weights: LoraWeights, *, in_file: bool = False) -> str:
        """Give a name to some weights, instead of its current ones.

        With `in_file` they may be dropped again: see `find`.
        """
        version = f"{name}@{next(self._numbers)}"
        self._weights[version] = weights
        if in_file:
            self._in_files.add(version)
            self._weights.set_spare(version, spare=True)
        self.retire(name)
        self._named[name] = version
        return version

    def find(self, name: str) -> str | None:
        """The current version of a name; None also where its file has to be read again."""
        version = self._named.get(name)
        if version is not None and version not in self._weights:
            self.retire(name)
            return None
        return version

    def retire(self, name: str) -> None:
        """Remove a name; unknown ones are ignored."""
        version = self._named.pop(name, None)
        if version is not None:
            self._free_if_unused(version)

    def begin(self, version: str) -> None:
        """Count a sample that uses the version."""
        self._users[version] += 1
        if version in self._in_files:
            self._weights.set_spare(version, spare=False)

    def end(self, version: str) -> None:
        """Count a sample that no longer uses the version."""
        self._users[version] -= 1
        if not self._users[version]:
            del self._users[version]
            if version in self._in_files:
                self._weights.set_spare(version, spare=True)
            if version != BASE:
                self._free_if_unused(version)

    def weights(self, version: str) -> LoraWeights | None:
        """The weights of a version, on the device; None for the base model."""
        return None if version == BASE else self._weights[version]

    def peek(self, version: str) -> LoraWeights | None:
        """The weights of a version on any device, to be copied; None for the base model."""
        return None if version == BASE else self._weights.peek(version)

    def fit(self, versions: set[str]) -> bool:
        """Whether the weights of these versions fit on the device together."""
        room = self._parking.device_bytes
        return room is None or sum(map(self._sampled_bytes, versions - {BASE})) <= room

    def _sampled_bytes(self, version: str) -> int:
        size = self._weights.size_of(version)
        return size if self._copied_as is None else size // 4 * self._copied_as.itemsize

    def _free_if_unused(self, version: str) -> None:
        if version not in self._users and version not in self._named.values():
            self._weights.discard(version)
            self.copies.discard(version)
            self._in_files.discard(version)


def pack_weights(weights: LoraWeights) -> Packed[LoraWeights]:
    """Weights as one tensor, and back."""
    config, lora = weights.config, weights.lora

    def rebuild(tensors: dict[str, Tensor]) -> LoraWeights:
        return wrap(config, lora, tensors["weights"])

    return Packed({"weights": weights.flat_P}, rebuild)
