"""Which matrices of a base model an adapter covers, and how large its own are.

Pure arithmetic on configurations: no tensors. An adapter's parameters are stored, in memory and in
checkpoints, in the order of `groups`: for each group every A, then every B.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

from tinkex.adapters.peft_layout import ATTENTION
from tinkex.engine.decoder import SHARED_INPUT, Projection, projection_shape
from tinkex.engine.protocol import MAX_RANK
from tinkex.errors import InputError, NothingToTrain

if TYPE_CHECKING:
    from tinkex.engine.decoder import DecoderConfig
    from tinkex.types import LoraConfig

ALPHA: Final = 32.0
"""An adapter adds `(ALPHA / rank) * B @ A` to the weight it covers."""
Matrix = Projection | Literal["unembed"]
"""A matrix that can carry an adapter."""


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """One covered matrix; the unembedding belongs to no layer."""

    layer: int | None
    matrix: Matrix
    inputs: int
    outputs: int

    @property
    def name(self) -> str:
        """A name that is unique within an adapter."""
        return self.matrix if self.layer is None else f"layers.{self.layer}.{self.matrix}"

    def parameters(self, rank: int) -> int:
        """Size of A and B together."""
        return rank * (self.inputs + self.outputs)


def matrix_shape(config: DecoderConfig, matrix: Matrix) -> tuple[int, int]:
    """Inputs and outputs of one matrix of the base model."""
    if matrix == "unembed":
        return config.hidden_size, config.vocab_size
    outputs, inputs = projection_shape(config, matrix)
    return inputs, outputs


def groups(config: DecoderConfig, lora: LoraConfig) -> tuple[tuple[LoraTarget, ...], ...]:
    """The matrices an adapter of this configuration covers; those of a group share an input."""
    covered = [
        names
        for names in SHARED_INPUT
        if (lora.train_attn if names[0] in ATTENTION else lora.train_mlp)
    ]
    found = [
        tuple(LoraTarget(layer, name, *matrix_shape(config, name)) for name in names)
        for layer in range(config.num_layers)
        for names in covered
    ]
    if lora.train_unembed:
        found.append((LoraTarget(None, "unembed", *matrix_shape(config, "unembed")),))
    return tuple(found)


def targets(config: DecoderConfig, lora: LoraConfig) -> tuple[LoraTarget, ...]:
    """Every covered matrix, layer by layer."""
    return tuple(target for group in groups(config, lora) for target in group)


@lru_cache(maxsize=64)
def parameter_count(config: DecoderConfig, lora: LoraConfig) -> int:
    """Number of trained parameters."""
    return sum(target.parameters(lora.rank) for target in targets(config, lora))


def check_lora(lora: LoraConfig) -> None:
    """Refuse an adapter this engine cannot make."""
    if not 1 <= lora.rank <= MAX_RANK:
        raise InputError(f"must be between 1 and {MAX_RANK}, got {lora.rank}", "lora_config.rank")
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise NothingToTrain(
            "switch on at least one of train_attn, train_mlp and train_unembed", "lora_config"
        )
