"""An adapter's matrices: one flat vector, seen as A and B per covered matrix.

With a flat vector optimizer steps, norms, copies and checkpoints are one operation each. The A of
matrices that share an input are adjacent, so that they form one matrix.

Shapes: P all parameters, R rank, I inputs and O outputs of one matrix, Z = R times the number
of matrices in a group.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from tinkex.engine.decoder import SHARED_INPUT
from tinkex.engine.lora.shapes import ALPHA, LoraTarget, Matrix, groups, parameter_count, targets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tinkex.engine.decoder import DecoderConfig
    from tinkex.types import LoraConfig

_GroupKey = tuple[int | None, tuple[Matrix, ...]]
_GROUP_OF: Final[dict[Matrix, tuple[Matrix, ...]]] = {
    "unembed": ("unembed",),
    **{name: names for names in SHARED_INPUT for name in names},
}


class Pair(NamedTuple):
    """The two factors of one covered matrix."""

    a_RI: Tensor
    b_OR: Tensor


class Group(NamedTuple):
    """The factors of matrices that share an input; each has R consecutive rows of A."""

    a_ZI: Tensor
    bs_OR: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The matrices of one adapter, views of `flat_P` that are made on first use."""

    config: DecoderConfig
    lora: LoraConfig
    flat_P: Tensor
    _made: dict[_GroupKey, Group] = field(repr=False, default_factory=dict["_GroupKey", "Group"])

    @property
    def scale(self) -> float:
        """The factor of B @ A."""
        return ALPHA / self.lora.rank

    def group(self, layer: int | None, matrices: tuple[Matrix, ...]) -> Group | None:
        """A and B of matrices that share an input, or None when they are not covered."""
        key = (layer, matrices)
        made = self._made.get(key)
        if made is None:
            place = _layout(self.config, self.lora).get(key)
            if place is None:
                return None
            made = self._made[key] = place.of(self.flat_P, self.lora.rank)
        return made

    def pair(self, layer: int | None, matrix: Matrix) -> Pair | None:
        """A and B of one matrix, or None when the adapter does not cover it."""
        matrices = _GROUP_OF[matrix]
        group = self.group(layer, matrices)
        if group is None:
            return None
        rank, number = self.lora.rank, matrices.index(matrix)
        return Pair(group.a_ZI[number * rank : (number + 1) * rank], group.bs_OR[number])

    def named(self) -> Iterator[tuple[LoraTarget, Pair]]:
        """Every covered matrix with its factors, in order."""
        for target in targets(self.config, self.lora):
            pair = self.pair(target.layer, target.matrix)
            assert pair is not None
            yield target, pair


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a group within the flat vector: every A, then every B."""

    start: int
    inputs: int
    outputs: tuple[int, ...]

    def of(self, flat_P: Tensor, rank: int) -> Group:
        start = flat_P.storage_offset() + self.start
        a_ZI = flat_P.as_strided((len(self.outputs) * rank, self.inputs), (self.inputs, 1), start)
        start += len(self.outputs) * rank * self.inputs
        bs_OR: list[Tensor] = []
        for outputs in self.outputs:
            bs_OR.append(flat_P.as_strided((outputs, rank), (rank, 1), start))
            start += outputs * rank
        return Group(a_ZI, tuple(bs_OR))


@lru_cache(maxsize=64)
def _layout(config: DecoderConfig, lora: LoraConfig) -> dict[_GroupKey, _Place]:
    places: dict[_GroupKey, _Place] = {}
    start = 0
    for group in groups(config, lora):
        outputs = tuple(target.outputs for target in group)
        names: tuple[Matrix, ...] = tuple(target.matrix for target in group)
        places[group[0].layer, names] = _Place(start, group[0].inputs, outputs)
        start += sum(target.parameters(lora.rank) for target in group)
    return places


def wrap(config: DecoderConfig, lora: LoraConfig, flat_P: Tensor) -> LoraWeights:
    """View a flat vector as the matrices of an adapter."""
    expected = parameter_count(config, lora)
    assert flat_P.shape == (expected,), f"expected {expected} parameters, got {flat_P.shape}"
    return LoraWeights(config, lora, flat_P)


def in_dtype(weights: LoraWeights, dtype: torch.dtype) -> LoraWeights:
    """The adapter in the precision of the activations: one conversion for all its matrices."""
    if weights.flat_P.dtype == dtype:
        return weights
    return wrap(weights.config, weights.lora, weights.flat_P.to(dtype))


def initial(
    config: DecoderConfig, lora: LoraConfig, seed: int, device: torch.device | str = "cpu"
) -> LoraWeights:
    """A fresh adapter: A uniform in ±1/sqrt(inputs), B zero.

    The numbers are drawn on the CPU, so every device starts from the same bits. Each A has
    its own random stream, so it does not depend on what else the adapter covers.
    """
    weights = wrap(config, lora, torch.zeros(parameter_count(config, lora)))
    for target, pair in weights.named():
        pair.a_RI.copy_(initial_a(target, lora.rank, seed))
    return wrap(config, lora, weights.flat_P.to(device))


def initial_a(target: LoraTarget, rank: int, seed: int) -> Tensor:
    """The A that `initial` gives one matrix."""
    digest = hashlib.blake2b(f"{seed}/{target.name}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1.0 / math.sqrt(target.inputs)
    return (torch.rand(rank, target.inputs, generator=generator) * 2.0 - 1.0) * bound


def seed_of(lora: LoraConfig, model_id: str) -> int:
    """The configured seed; without one it follows from the model's id.

    So a model that is recreated under its id after a restart has the same initial weights.
    """
    if lora.seed is not None:
        return lora.seed
    digest = hashlib.blake2b(model_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
