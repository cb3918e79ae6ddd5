"""Few tokens on a CPU, as in decoding: the block of Llama and Qwen, written out for them.

Gives the bits of `Decoder.hidden`. It serves a family only if the family declares one of the forms
below and a small model of it passes a trial: see `cpu_trial`. Any other is computed plainly.

With few rows every call of a library takes longer than its arithmetic, so here are fewer calls, and
they write to memory that stays. Sums, exponentials and products are torch's, in whose order they
add up; what rounds the same way everywhere is left to numpy, whose calls take half as long.

Shapes: B sequences, R >= B rows, D hidden, H heads, G key/value heads, d head size, N = H + G,
F = d/2, Y = (H + 2*G)*d, M intermediate size, I inputs and O outputs of a product, K steps.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from tinkex.engine.attention.invariant import round_up
from tinkex.engine.attention.lone import LoneTokens
from tinkex.engine.attention.paged import PagedTokens
from tinkex.engine.lora import adapted_in_place
from tinkex.engine.lora.thin import STEP
from tinkex.engine.models.base import BlockForm
from tinkex.engine.models.layers import SILU_ALONE, SILU_STEP, rotation, swiglu
from tinkex.engine.models.packed import ROW_STEP
from tinkex.engine.models.weights import StoredDecoder
from tinkex.engine.sampler.adapters import LoraAdapters
from tinkex.engine.sampler.cpu_trial import gives_the_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tinkex.engine.attention.paged import Span
    from tinkex.engine.lora import Adapt
    from tinkex.engine.models.base import Decoder, DecoderConfig, Projection
    from tinkex.engine.models.weights import LayerWeights
    from tinkex.engine.sampler.runner import Adapters, Segment

    Floats = NDArray[np.float32]
    Product = Callable[[], object]

_FEW: Final = 2**21
"""Up to so many numbers are read from a layer's keys; beyond, their arithmetic takes longer."""
_FEW_ROWS: Final = 64
"""Up to so many tokens are computed here; beyond, sums that several threads share pay."""
_AHEAD: Final = 64
"""Steps whose rotations are made at a time."""


_FORM: Final = BlockForm(norms=("attention", "mlp", "last"), rotation="halves", activation="silu")
_WITH_HEAD_NORMS: Final = replace(_FORM, norms=("attention", "queries", "keys", "mlp", "last"))


class CpuSteps:
    """Passes of few tokens, and decoding steps of any number of sequences."""

    def __init__(
        self, decoder: StoredDecoder, adapters: LoraAdapters, cache: Tensor, *, block_size: int
    ) -> None:
        self._model = _Model(decoder)
        self._adapters = adapters
        self._cache = cache
        self._block_size = block_size
        self._most_blocks = _FEW // (cache.shape[2] * cache.shape[4] * block_size)
        layer = decoder.stored.layers[0]
        self._row_step = max(linear.row_step for linear in layer.linears.values())
        # Mutable state: the last decoding step, whose memory may suit the next.
        self._step: _Step | None = None

    def suits(self, spans: Sequence[Span]) -> bool:
        """Whether these are few tokens, or single ones whose contexts are short in sum."""
        return sum(map(len, spans)) <= _FEW_ROWS or self._decodes(spans)

    def _decodes(self, spans: Sequence[Span]) -> bool:
        return (
            all(len(span) == 1 for span in spans)
            and sum(len(span.blocks) for span in spans) <= self._most_blocks
        )

    def hidden(
        self, tokens: list[int], spans: Sequence[Span], segments: Sequence[Segment]
    ) -> Tensor:
        """h_RD after the final norm, until the next step; rows after the tokens' are nobody's.

        Within `torch.inference_mode`, as everything here.
        """
        found = self._adapters.segments(segments)
        adapted = any(segment.weights is not None for segment in found)
        rows = self._rows(len(tokens), adapted=adapted)
        step = self._step_for(spans, len(tokens), rows)
        if not adapted:
            return step.hidden(tokens, spans, None)
        found[-1] = replace(found[-1], stop=rows)
        return step.hidden(tokens, spans, adapted_in_place(found))

    def _step_for(self, spans: Sequence[Span], count: int, rows: int) -> _Step:
        def make(attention: type[LoneTokens | PagedTokens]) -> _Step:
            qkv_RY = torch.zeros(rows, self._model.qkv_width)
            attend = attention(self._cache, qkv_RY, count, block_size=self._block_size)
            return _Step(self._model, qkv_RY, attend, count)

        if not self._decodes(spans):
            return make(PagedTokens)
        if self._step is None or self._step.shape != (count, rows):
            self._step = make(LoneTokens)
        return self._step

    def _rows(self, tokens: int, *, adapted: bool) -> int:
        """How many rows to compute; the last of them may be nobody's."""
        # Products with adapters want longer steps. They are filled up one by one where more
        # rows would cost more than that.
        step = STEP if adapted and self._row_step > 1 else self._row_step
        return max(round_up(tokens, step), ROW_STEP)


def cpu_steps(
    decoder: Decoder, adapters: Adapters, cache: Tensor, *, block_size: int
) -> CpuSteps | None:
    """What decodes on a CPU in float32; None where `Decoder.hidden` has to do it."""
    if cache.device.type != "cpu" or cache.dtype != torch.float32:
        return None
    if not (isinstance(decoder, StoredDecoder) and isinstance(adapters, LoraAdapters)):
        return None
    if not _implements(decoder):
        return None
    return CpuSteps(decoder, adapters, cache, block_size=block_size)


def _implements(decoder: StoredDecoder) -> bool:
    """Whether the steps here compute what the decoder does."""
    config = decoder.config
    if decoder.own_form() != (_WITH_HEAD_NORMS if config.qk_norm else _FORM):
        return False
    return gives_the_same_bits(type(decoder), config, CpuSteps)


class _Model:
    """The weights of a decoder as steps read them."""

    def __init__(self, decoder: StoredDecoder) -> None:
        config, weights = decoder.config, decoder.stored
        self.config = config
        self.qkv_width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.frequencies_F = decoder.frequencies_F
        self.embed_VD = weights.embed_VD.numpy()
        self.final_norm_D = weights.final_norm_D.numpy()
        self.layers = [_Layer(layer, config) for layer in weights.layers]


class _Layer:
    """The weights of a block."""

    def __init__(self, weights: LayerWeights, config: DecoderConfig) -> None:
        self.input_norm_D = weights.input_norm_D.numpy()
        self.post_attention_norm_D = weights.post_attention_norm_D.numpy()
        self.qkv, self.o, self.gate_up, self.down = weights.linears.items()
        self.head_norms_Nd: Floats | None = None
        if weights.head_norms_2d is not None:
            heads = config.num_heads, config.num_kv_heads
            self.head_norms_Nd = weights.head_norms_2d.numpy().repeat(heads, axis=0)


class _Room(NamedTuple):
    """What a product of a block reads, and where it is written."""

    names: tuple[Projection, ...]
    x_RI: Tensor
    y_RO: Tensor
    product: Product


class _Step:
    """Passes of `count` tokens; `attend` reads and writes in the rows of `qkv_RY`."""

    def __init__(
        self, model: _Model, qkv_RY: Tensor, attend: LoneTokens | PagedTokens, count: int
    ) -> None:
        config, rows = model.config, len(qkv_RY)
        heads, dim = config.num_heads + config.num_kv_heads, config.head_dim
        self.shape = count, rows
        self._model = model
        self._own = 0 if count == 1 else slice(count)
        # Rows that are nobody's are zero where they are read.
        self._h_BD = np.empty((count, config.hidden_size), np.float32)
        self._x_RD = torch.zeros(rows, config.hidden_size)
        self._norm = (_LoneNorm if count == 1 else _Norm)(self._x_RD[self._own], config.rms_eps)
        self._qkv_RY, self._attend = qkv_RY, attend
        qk_BNd = qkv_RY[:count, : heads * dim].view(count, heads, dim)
        self._head_norm = _Norm(qk_BNd, config.rms_eps)
        ahead = _AHEAD if isinstance(attend, LoneTokens) else 1
        self._turn = _Turn(qk_BNd, model.frequencies_F, ahead)
        self._delta_RD = torch.empty(rows, config.hidden_size)
        self._delta = self._delta_RD.numpy()[self._own]
        self._gate_up = torch.empty(rows, 2 * config.intermediate_size)
        self._gate = _Gate(self._gate_up, count)
        self._y_RM = torch.zeros(rows, config.intermediate_size)
        self._y_BM = self._y_RM.numpy()[:count]
        self._products = [self._rooms(layer) for layer in model.layers]

    def _rooms(self, layer: _Layer) -> list[_Room]:
        """The products of a layer, from where to where."""
        found = (
            (layer.qkv, self._x_RD, self._qkv_RY),
            (layer.o, self._attend.o_RX, self._delta_RD),
            (layer.gate_up, self._x_RD, self._gate_up),
            (layer.down, self._y_RM, self._delta_RD),
        )
        return [
            _Room(names, x_RI, y_RO, linear.into(x_RI, y_RO))
            for (names, linear), x_RI, y_RO in found
        ]

    def hidden(self, tokens: list[int], spans: Sequence[Span], adapt: Adapt | None) -> Tensor:
        """h_RD after the final norm."""
        self._turn.begin([place for span in spans for place in range(span.start, span.stop)])
        self._attend.begin(spans)
        self._model.embed_VD.take(tokens, 0, self._h_BD, "clip")
        h = self._h_BD[self._own]
        for number, layer in enumerate(self._model.layers):
            self._block(number, layer, h, adapt)
        self._norm(h, self._model.final_norm_D)
        return self._x_RD

    def _block(self, number: int, layer: _Layer, h: Floats, adapt: Adapt | None) -> None:
        def project(room: _Room) -> None:
            room.product()
            if adapt is not None:
                adapt(number, room.names, room.x_RI, room.y_RO)

        to_qkv, to_o, to_gate_up, to_down = self._products[number]
        self._norm(h, layer.input_norm_D)
        project(to_qkv)
        if layer.head_norms_Nd is not None:
            self._head_norm(self._turn.qk_BNd, layer.head_norms_Nd)
        self._turn()
        self._attend(number)
        project(to_o)
        np.add(h, self._delta, h)
        self._norm(h, layer.post_attention_norm_D)
        project(to_gate_up)
        self._gate(self._y_BM)
        project(to_down)
        np.add(h, self._delta, h)


class _Norm:
    """The norm of `layers.rms_norm`, written to `y`."""

    def __init__(self, y: Tensor, eps: float) -> None:
        rows, size = y.shape[:-1], y.shape[-1]
        self._y = y.numpy()
        self._squares = torch.empty(y.shape)
        self._sums = torch.empty(*rows, 1)
        self._same = self._squares.numpy(), self._sums.numpy()
        # Numpy is quickest with operands of one shape.
        self._lone = np.float32(size), np.float32(eps), np.float32(1.0)
        self._numbers = [np.full((*rows, 1), number) for number in self._lone]

    def __call__(self, x: Floats, weight: Floats) -> None:
        y, (squares, scale), (size, eps, one) = self._y, self._same, self._numbers
        np.multiply(x, x, squares)
        torch.sum(self._squares, -1, True, out=self._sums)
        np.divide(scale, size, scale)
        np.add(scale, eps, scale)
        np.sqrt(scale, scale)
        np.divide(one, scale, scale)
        np.multiply(x, scale, y)
        np.multiply(y, weight, y)


class _LoneNorm(_Norm):
    """The same for a single row: plain numbers take less time than arrays of one."""

    def __call__(self, x: Floats, weight: Floats) -> None:
        y, (squares, sums), (size, eps, one) = self._y, self._same, self._lone
        np.multiply(x, x, squares)
        torch.sum(self._squares, -1, True, out=self._sums)
        # The root of a double, rounded, is the root that a float has.
        np.multiply(x, one / np.float32(math.sqrt(sums[0] / size + eps)), y)
        np.multiply(y, weight, y)


class _Turn:
    """Rotates queries and keys in place, as `layers.Rotation` does."""

    def __init__(self, qk_BNd: Tensor, frequencies_F: Tensor, ahead: int) -> None:
        self.qk_BNd = qk_BNd.numpy()
        self._ahead = ahead
        count, heads, dim = self.qk_BNd.shape
        self._frequencies_F = frequencies_F
        self._other_BN2F = self.qk_BNd.reshape(count, heads, 2, dim // 2)[:, :, ::-1]
        """Each head's second half, then its first."""
        self._cos_BNd, self._turned_BNd = np.empty((2, count, heads, dim), np.float32)
        self._sin_BN2F = np.empty(self._other_BN2F.shape, np.float32)
        self._turned_BN2F = self._turned_BNd.reshape(self._other_BN2F.shape)
        # Mutable state: the factors of some steps, which of them is next, and the positions of
        # the first.
        self._cos_KB1d = self._sin_KB12F = np.empty(0, np.float32)
        self._number = ahead
        self._first: list[int] = []

    def begin(self, positions: list[int]) -> None:
        """Take the positions of the next tokens."""
        number = self._number
        if number == self._ahead or positions != [first + number for first in self._first]:
            number = 0
            self._look_ahead(positions)
        self._number = number + 1
        self._cos_BNd[:], self._sin_BN2F[:] = self._cos_KB1d[number], self._sin_KB12F[number]

    def _look_ahead(self, positions: list[int]) -> None:
        self._first = positions
        positions_KB = np.arange(self._ahead)[:, None] + np.array(positions)
        made = rotation(torch.from_numpy(positions_KB.ravel()), self._frequencies_F)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
        shape = self._ahead, len(positions), 1, 1, -1
        cos, sin = made.cos_T1F.numpy().reshape(shape), made.sin_T1F.numpy().reshape(shape)
        self._cos_KB1d = np.concatenate((cos, cos), -1)[:, :, 0]
        self._sin_KB12F = np.concatenate((-sin, sin), -2)

    def __call__(self) -> None:
        qk_BNd = self.qk_BNd
        np.multiply(self._other_BN2F, self._sin_BN2F, self._turned_BN2F)
        np.multiply(qk_BNd, self._cos_BNd, qk_BNd)
        np.add(qk_BNd, self._turned_BNd, qk_BNd)


class _Gate:
    """`layers.swiglu` of the first rows of a joined product, which it overwrites."""

    def __init__(self, gate_up: Tensor, count: int) -> None:
        width = gate_up.shape[1] // 2
        self._own_BO = gate_up if len(gate_up) == count else gate_up[:count]
        same = self._own_BO.numpy()
        self._gate_BM, self._up_BM = same[:, :width], same[:, width:]
        gate_BM = self._own_BO.narrow(1, 0, width)
        # A thread must take whole rows, and takes so many alone.
        step = max((SILU_ALONE - 1) // width, 1)
        self._parts = [gate_BM]
        if count > step:
            self._parts = [gate_BM[row : row + step] for row in range(0, count, step)]
        self._usual = width % SILU_STEP == 0

    def __call__(self, y_BM: Floats) -> None:
        if not self._usual:
            np.copyto(y_BM, swiglu(*self._own_BO.chunk(2, dim=1)).numpy())
            return
        for gate in self._parts:
            F.silu(gate, inplace=True)
        np.multiply(self._gate_BM, self._up_BM, y_BM)
