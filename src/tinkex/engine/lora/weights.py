"""An adapter's matrices: one flat vector, seen as A and B per covered matrix.

The flat vector makes optimizer steps, norms, copies and checkpoints one operation each.

Shapes: P all parameters, R rank, I inputs and O outputs of one matrix.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from tinkex.engine.lora.shapes import ALPHA, Matrix, Target, parameter_count, targets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tinkex.engine.models.base import DecoderConfig
    from tinkex.types import LoraConfig

Key = tuple[int | None, Matrix]


class Pair(NamedTuple):
    """The two factors of one covered matrix."""

    a_RI: Tensor
    b_OR: Tensor


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The matrices of one adapter; `pairs` are views of `flat_P`."""

    config: DecoderConfig
    lora: LoraConfig
    flat_P: Tensor
    pairs: dict[Key, Pair] = field(repr=False)

    @property
    def scale(self) -> float:
        """What B @ A is multiplied with."""
        return ALPHA / self.lora.rank

    def pair(self, layer: int | None, matrix: Matrix) -> Pair | None:
        """A and B of one matrix, or None when the adapter does not cover it."""
        return self.pairs.get((layer, matrix))

    def named(self) -> Iterator[tuple[Target, Pair]]:
        """Every covered matrix with its factors, in order."""
        for target in targets(self.config, self.lora):
            yield target, self.pairs[target.layer, target.matrix]

    def leaves(self) -> LoraWeights:
        """The same memory as fresh autograd leaves, one per factor.

        Each operation differentiates leaves of its own, so its gradient is known apart from
        those of other operations on the same adapter.
        """
        pairs = {
            key: Pair(*(factor.detach().requires_grad_() for factor in pair))
            for key, pair in self.pairs.items()
        }
        return LoraWeights(self.config, self.lora, self.flat_P, pairs)


def wrap(config: DecoderConfig, lora: LoraConfig, flat_P: Tensor) -> LoraWeights:
    """See a flat vector as the matrices of an adapter."""
    expected = parameter_count(config, lora)
    assert flat_P.shape == (expected,), f"expected {expected} parameters, got {flat_P.shape}"
    pairs: dict[Key, Pair] = {}
    start = 0
    for target in targets(config, lora):
        middle = start + lora.rank * target.inputs
        end = middle + lora.rank * target.outputs
        pairs[target.layer, target.matrix] = Pair(
            flat_P[start:middle].view(lora.rank, target.inputs),
            flat_P[middle:end].view(target.outputs, lora.rank),
        )
        start = end
    return LoraWeights(config, lora, flat_P, pairs)


def initial(
    config: DecoderConfig, lora: LoraConfig, seed: int, device: torch.device | str = "cpu"
) -> LoraWeights:
    """A fresh adapter: A uniform in ±1/sqrt(inputs), B zero.

    The numbers are drawn on the CPU, so every device starts from the same bits. Each A has
    a stream of its own: it does not depend on what else the adapter covers.
    """
    weights = wrap(config, lora, torch.zeros(parameter_count(config, lora)))
    for target, pair in weights.named():
        pair.a_RI.copy_(initial_a(target, lora.rank, seed))
    return wrap(config, lora, weights.flat_P.to(device))


def initial_a(target: Target, rank: int, seed: int) -> Tensor:
    """The A that `initial` gives one matrix."""
    digest = hashlib.blake2b(f"{seed}/{target.name}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1.0 / math.sqrt(target.inputs)
    return (torch.rand(rank, target.inputs, generator=generator) * 2.0 - 1.0) * bound


def seed_of(lora: LoraConfig, model_id: str) -> int:
    """The configured seed; without one it follows from the model's id.

    So a model that is made again under its id, after a restart, starts from the same bits.
    """
    if lora.seed is not None:
        return lora.seed
    digest = hashlib.blake2b(model_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
