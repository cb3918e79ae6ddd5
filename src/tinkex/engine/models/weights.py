"""The frozen tensors of a decoder, and filling them from a file of any format.

Projections that share an input are adjacent in memory: the rows of q, k and v are one tensor, and
so are those of gate and up. Names of tensors are Hugging Face's.

Shapes: T tokens, D hidden, d head size, V vocabulary, I inputs and O outputs of a projection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from tinkex.adapters.peft_layout import module_name
from tinkex.engine.backends.torch.linear import Linear
from tinkex.engine.decoder import PROJECTIONS, SHARED_INPUT, Projection, projection_shape
from tinkex.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tinkex.engine.backends.table import MakeLinear
    from tinkex.engine.decoder import DecoderConfig


class TensorSource(Protocol):
    """Tensors in files, by Hugging Face name."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the tensor's shape, or None when there is no such tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """Return the tensor on the CPU, in whatever float type the file has."""
        ...

    def where(self, name: str) -> str:
        """Name the file that holds the tensor, or should."""
        ...

    def names(self) -> frozenset[str]:
        """Every tensor there is."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer block."""

    input_norm_D: Tensor
    post_attention_norm_D: Tensor
    weights: dict[Projection, Tensor] = field(default_factory=dict[Projection, "Tensor"])
    biases: dict[Projection, Tensor] = field(default_factory=dict[Projection, "Tensor"])
    linears: dict[tuple[Projection, ...], Linear] = field(
        default_factory=dict[tuple[Projection, ...], Linear]
    )
    """The same memory as `weights` and `biases`, by names that share an input."""
    head_norms_2d: Tensor | None = None
    """The norms of queries and of keys, where the family has them."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Everything a decoder multiplies with."""

    embed_VD: Tensor
    final_norm_D: Tensor
    unembed_VD: Tensor
    layers: tuple[LayerWeights, ...]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor once, under its Hugging Face name."""
        yield "model.embed_tokens.weight", self.embed_VD
        for number, layer in enumerate(self.layers):
            for name, tensor in _named_in_layer(layer):
                yield f"model.layers.{number}.{name}", tensor
        yield "model.norm.weight", self.final_norm_D
        if self.unembed_VD is not self.embed_VD:
            yield "lm_head.weight", self.unembed_VD


def _named_in_layer(layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", layer.input_norm_D
    for name in PROJECTIONS:
        module = module_name(name)
        yield f"{module}.weight", layer.weights[name]
        if name in layer.biases:
            yield f"{module}.bias", layer.biases[name]
    if layer.head_norms_2d is not None:
        for name, norm_d in zip(("q_norm", "k_norm"), layer.head_norms_2d, strict=True):
            yield f"self_attn.{name}.weight", norm_d
    yield "post_attention_layernorm.weight", layer.post_attention_norm_D


def allocate(
    config: DecoderConfig,
    biased: tuple[Projection, ...],
    *,
    dtype: torch.dtype,
    device: torch.device,
    linear: MakeLinear = Linear,
) -> DecoderWeights:
    """Uninitialised memory for a decoder's weights."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def layer() -> LayerWeights:
        made = LayerWeights(
            input_norm_D=empty(config.hidden_size),
            post_attention_norm_D=empty(config.hidden_size),
            head_norms_2d=empty(2, config.head_dim) if config.qk_norm else None,
        )
        for group in SHARED_INPUT:
            shapes = [projection_shape(config, name) for name in group]
            rows = [outputs for outputs, _ in shapes]
            joined_OI, bias_O = empty(sum(rows), shapes[0][1]), None
            made.weights.update(zip(group, joined_OI.split_with_sizes(rows), strict=True))
            if config.attention_bias and group[0] in biased:
                bias_O = empty(sum(rows))
                made.biases.update(zip(group, bias_O.split_with_sizes(rows), strict=True))
            made.linears[group] = linear(joined_OI, bias_O, rows)
        return made

    embed_VD = empty(config.vocab_size, config.hidden_size)
    return DecoderWeights(
        embed_VD=embed_VD,
        final_norm_D=empty(config.hidden_size),
        unembed_VD=embed_VD if config.tied_embeddings else empty(*embed_VD.shape),
        layers=tuple(layer() for _ in range(config.num_layers)),
    )


def check_tensors(
    source: TensorSource, config: DecoderConfig, biased: tuple[Projection, ...]
) -> None:
    """Refuse a source that lacks a tensor, has one of another shape, or has one too many.

    Runs before any memory is allocated or any tensor read.
    """
    expected: set[str] = set()
    shapes = allocate(config, biased, dtype=torch.float32, device=torch.device("meta"))
    for name, slot in shapes.named():
        expected.add(name)
        shape = source.shape(name)
        if shape is None:
            raise ModelError(f"{source.where(name)}: the tensor {name!r} is missing")
        if shape != tuple(slot.shape):
            raise ModelError(
                f"{source.where(name)}: the tensor {name!r} has the shape {list(shape)}; "
                f"the configuration asks for {list(slot.shape)}"
            )
    for name in sorted(source.names() - expected):
        # Some files repeat a tied head, and old ones contain the rotary frequencies.
        if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
            raise ModelError(
                f"{source.where(name)}: the tensor {name!r} has no place in {config.arch} "
                "with this configuration"
            )
