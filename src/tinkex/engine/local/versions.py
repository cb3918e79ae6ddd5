"""The frozen weights that samples name: kept while they have a name or a sample uses them.

A name is a snapshot or a saved location. What it stands for may be replaced or dropped; the
samples that began with it keep what they had. Every version has an id that never returns, so
that cached keys and values of one are never taken for those of another.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import TYPE_CHECKING

from tinkex.engine.lora import wrap
from tinkex.engine.parking import Packed
from tinkex.engine.sampler import BASE

if TYPE_CHECKING:
    from torch import Tensor

    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.parking import Parking


class Versions:
    """The versions of one base model."""

    def __init__(self, parking: Parking, base_model: str) -> None:
        self._numbers = count(1)
        # Mutable state: weights by id, the id of each name, and how many samples use an id.
        self._weights = parking.shelf(f"sampling/{base_model}", pack_weights)
        self._named: dict[str, str] = {}
        self._users: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._weights)

    def add(self, name: str, weights: LoraWeights) -> str:
        """Give a name to some weights, instead of those it had."""
        version = f"{name}@{next(self._numbers)}"
        self._weights[version] = weights
        self.retire(name)
        self._named[name] = version
        return version

    def find(self, name: str) -> str | None:
        """The version that a name stands for now."""
        return self._named.get(name)

    def retire(self, name: str) -> None:
        """Take a name away; unknown ones are fine."""
        version = self._named.pop(name, None)
        if version is not None:
            self._free_if_unused(version)

    def begin(self, version: str) -> None:
        """A sample uses it from now on."""
        self._users[version] += 1

    def end(self, version: str) -> None:
        """One sample less uses it."""
        self._users[version] -= 1
        if not self._users[version]:
            del self._users[version]
            if version != BASE:
                self._free_if_unused(version)

    def weights(self, version: str) -> LoraWeights | None:
        """The weights of a version, on the device; None for the base model."""
        return None if version == BASE else self._weights[version]

    def _free_if_unused(self, version: str) -> None:
        if version not in self._users and version not in self._named.values():
            del self._weights[version]


def pack_weights(weights: LoraWeights) -> Packed[LoraWeights]:
    """Weights as one tensor, and back."""
    config, lora = weights.config, weights.lora

    def rebuild(tensors: dict[str, Tensor]) -> LoraWeights:
        return wrap(config, lora, tensors["weights"])

    return Packed({"weights": weights.flat_P}, rebuild)
