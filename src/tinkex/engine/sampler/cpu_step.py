"""A decoding step on a CPU: the block that all families share, written out for few rows.

Gives the bits of `Decoder.hidden`. With few rows every call of the library takes longer than
its arithmetic, so here are fewer calls, and they write to memory that stays.

Shapes: B sequences, R >= B rows, D hidden, H heads, G key/value heads, d head size, N = H + G,
Y = (H + 2*G)*d, M intermediate size, I inputs and O outputs of a product.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional as F

from tinkex.engine.attention.invariant import round_up
from tinkex.engine.attention.lone import LoneTokens
from tinkex.engine.lora import adapted_in_place
from tinkex.engine.lora.thin import STEP
from tinkex.engine.models.layers import swiglu
from tinkex.engine.models.linear import ROW_STEP
from tinkex.engine.models.weights import StoredDecoder
from tinkex.engine.sampler.adapters import LoraAdapters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.attention.paged import Span
    from tinkex.engine.lora import Adapt
    from tinkex.engine.models.base import Decoder, Projection
    from tinkex.engine.models.linear import Linear
    from tinkex.engine.models.weights import LayerWeights
    from tinkex.engine.sampler.runner import Adapters, Segment

_FEW: Final = 2**21
"""Up to so many numbers are read from a layer's keys; beyond, their arithmetic takes longer."""


class CpuSteps:
    """Steps of any number of sequences."""

    def __init__(
        self, decoder: StoredDecoder, adapters: LoraAdapters, cache: Tensor, *, block_size: int
    ) -> None:
        self._decoder = decoder
        self._adapters = adapters
        self._cache = cache
        self._block_size = block_size
        self._most_blocks = _FEW // (cache.shape[2] * cache.shape[4] * block_size)
        layer = decoder.stored.layers[0]
        self._row_step = max(linear.row_step for linear in layer.linears.values())
        # Mutable state: room for steps, by their number of rows.
        self._made: dict[int, _Step] = {}

    def suits(self, spans: Sequence[Span]) -> bool:
        """Whether these are single tokens with contexts that are short in sum."""
        return (
            all(len(span) == 1 for span in spans)
            and sum(len(span.blocks) for span in spans) <= self._most_blocks
        )

    @torch.inference_mode()
    def hidden(
        self, tokens: list[int], spans: Sequence[Span], segments: Sequence[Segment]
    ) -> Tensor:
        """h_BD after the final norm, until the next step."""
        found = self._adapters.segments(segments)
        adapted = any(segment.weights is not None for segment in found)
        rows = self._rows(len(tokens), adapted=adapted)
        found[-1] = replace(found[-1], stop=rows)
        step = self._made.get(rows)
        if step is None:
            made = _Step(self._decoder, self._cache, rows, block_size=self._block_size)
            step = self._made[rows] = made
        return step.hidden(tokens, spans, adapted_in_place(found))[: len(tokens)]

    def _rows(self, tokens: int, *, adapted: bool) -> int:
        """How many rows to compute; the last of them may be nobody's."""
        # Products with adapters want longer steps. They are filled up one by one where more
        # rows would cost more than that.
        step = STEP if adapted and self._row_step > 1 else self._row_step
        return max(round_up(tokens, step), ROW_STEP)


def cpu_steps(
    decoder: Decoder, adapters: Adapters, cache: Tensor, *, block_size: int
) -> CpuSteps | None:
    """What decodes on a CPU in float32, or None elsewhere."""
    if cache.device.type != "cpu" or cache.dtype != torch.float32:
        return None
    if not (isinstance(decoder, StoredDecoder) and isinstance(adapters, LoraAdapters)):
        return None
    return CpuSteps(decoder, adapters, cache, block_size=block_size)


class _Step:
    """Steps of one number of rows."""

    def __init__(
        self, decoder: StoredDecoder, cache: Tensor, rows: int, *, block_size: int
    ) -> None:
        config, self._weights = decoder.config, decoder.stored
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        empty = self._weights.embed_VD.new_empty
        self._rows = rows
        self._norm = _Norm((rows, config.hidden_size), config.rms_eps)
        self._head_norm = _Norm((rows, heads + kv_heads, dim), config.rms_eps)
        self._qkv_RY = empty(rows, (heads + 2 * kv_heads) * dim)
        self._qk_RNd = self._qkv_RY[:, : (heads + kv_heads) * dim].view(rows, -1, dim)
        self._swapped_RNd = torch.empty_like(self._qk_RNd)
        self._halves = *self._qk_RNd.chunk(2, dim=-1), *self._swapped_RNd.chunk(2, dim=-1)
        self._heads = heads, kv_heads
        self._gate_up = empty(rows, 2 * config.intermediate_size)
        self._gate_RM, self._up_RM = self._gate_up.chunk(2, dim=1)
        self._delta_RD = empty(rows, config.hidden_size)
        self._attend = LoneTokens(cache, self._qkv_RY, block_size=block_size)
        self._frequencies_F = decoder.frequencies_F

    def hidden(self, tokens: list[int], spans: Sequence[Span], adapt: Adapt | None) -> Tensor:
        """h_RD after the final norm."""
        unused = [0] * (self._rows - len(tokens))
        positions_R = torch.tensor([span.start for span in spans] + unused, dtype=torch.float32)
        angles_R1F = positions_R.view(-1, 1, 1) * self._frequencies_F
        cos_R1F, sin_R1F = angles_R1F.cos(), angles_R1F.sin()
        turn = torch.cat((cos_R1F, cos_R1F), dim=-1), sin_R1F, -sin_R1F
        self._attend.begin(spans)
        h_RD = F.embedding(torch.tensor(tokens + unused), self._weights.embed_VD)
        for number, layer in enumerate(self._weights.layers):
            h_RD = self._block(number, layer, h_RD, turn, adapt)
        return self._norm(h_RD, self._weights.final_norm_D)

    def _block(
        self,
        number: int,
        layer: LayerWeights,
        h_RD: Tensor,
        turn: tuple[Tensor, Tensor, Tensor],
        adapt: Adapt | None,
    ) -> Tensor:
        qkv, o, gate_up, down = layer.linears.items()

        def project(
            which: tuple[tuple[Projection, ...], Linear], x_RI: Tensor, y_RO: Tensor
        ) -> None:
            names, linear = which
            linear.into(x_RI, y_RO)
            if adapt is not None:
                adapt(number, names, x_RI, y_RO)

        project(qkv, self._norm(h_RD, layer.input_norm_D), self._qkv_RY)
        self._turn(layer, *turn)
        self._attend(number)
        project(o, self._attend.o_RX, self._delta_RD)
        h_RD = h_RD + self._delta_RD
        project(gate_up, self._norm(h_RD, layer.post_attention_norm_D), self._gate_up)
        project(down, swiglu(self._gate_RM, self._up_RM), self._delta_RD)
        return h_RD + self._delta_RD

    def _turn(
        self, layer: LayerWeights, cos_R1d: Tensor, sin_R1F: Tensor, back_R1F: Tensor
    ) -> None:
        """Normalise queries and keys where the family does, and rotate them, in place."""
        qk_RNd = self._qk_RNd
        if layer.head_norms_2d is not None:
            weight_Nd = layer.head_norms_2d.repeat_interleave(torch.tensor(self._heads), dim=0)
            qk_RNd.copy_(self._head_norm(qk_RNd, weight_Nd))
        first_RNF, second_RNF, into_first_RNF, into_second_RNF = self._halves
        torch.mul(second_RNF, back_R1F, out=into_first_RNF)
        torch.mul(first_RNF, sin_R1F, out=into_second_RNF)
        qk_RNd.mul_(cos_R1d).add_(self._swapped_RNd)


class _Norm:
    """The norm of `layers.rms_norm` into memory that stays."""

    def __init__(self, shape: tuple[int, ...], eps: float) -> None:
        self._y = torch.empty(shape)
        self._scale = torch.empty(*shape[:-1], 1)
        self._eps = eps

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        y, scale = self._y, self._scale
        torch.mean(torch.square(x, out=y), -1, keepdim=True, out=scale).add_(self._eps).rsqrt_()
        return torch.mul(x, scale, out=y).mul_(weight)
