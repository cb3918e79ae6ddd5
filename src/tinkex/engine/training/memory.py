"""Estimates of the memory of training, before it runs: plain arithmetic, no tensors.

Most of it are the activations that autograd saves. A sequence whose activations do not fit is
computed with activation checkpointing: only the input of every block is saved, and each block is
recomputed in the backward pass. A sequence that still does not fit is refused with the number of
tokens that would.

The figures describe `backends/torch/layers.py` and `lora/layers.py`, term by term; the CUDA kernels
save less. Attention is assumed to save its inputs, its output and one value per head and token,
never a matrix of scores.

An operation may have many targets per token, and sparse targets are small only until they are
filled: the result has a value for each. They exist from the check of the operation to its result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tinkex.engine.lora import parameter_count
from tinkex.errors import InputError

if TYPE_CHECKING:
    from tinkex.engine.decoder import DecoderConfig
    from tinkex.types import LoraConfig

TARGET_BYTES: Final = 256
"""Bytes of one target: its inputs, the columns of its loss in float64 and what autograd saves of
them, its gradient and its results. On a CUDA device most of that is host memory.

Measured on a CPU: 70 bytes with cross_entropy, 170 with ppo, 220 with all that gspo reads.
"""
_F32: Final = 4
_PROJECTIONS: Final = 7
_LOGIT_CHUNKS: Final = 3
"""Chunks of logits that exist at the same time: the logits, their gradient, and a temporary."""


def block_bytes(config: DecoderConfig, rank: int, itemsize: int) -> int:
    """Bytes that one block saves per token for the backward pass."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms = 2 * _F32 * (hidden + 1)
    if config.qk_norm:
        norms += _F32 * (queries + keys + config.num_heads + config.num_kv_heads)
    # Rotated queries and keys; the values are views of one tensor with the unrotated ones.
    attention = itemsize * (2 * queries + 3 * keys) + _F32 * config.num_heads
    inputs = itemsize * (2 * hidden + queries + inner)  # of the four groups of projections
    gate = itemsize * 3 * inner  # gate, its activation, and what that is multiplied with
    return norms + attention + inputs + gate + itemsize * _PROJECTIONS * rank


def passing_bytes(config: DecoderConfig, itemsize: int) -> int:
    """Temporary bytes per token within one block, besides what is saved."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return itemsize * (4 * inner + 4 * hidden) + _F32 * 2 * hidden


def ends_bytes(config: DecoderConfig, itemsize: int) -> int:
    """Bytes per token before the first block and after the last."""
    hidden = config.hidden_size
    return itemsize * 3 * hidden + 2 * _F32 * (hidden + 1) + _F32 * config.head_dim


def check_adapter(config: DecoderConfig, lora: LoraConfig, room_bytes: int | None) -> None:
    """Refuse an adapter whose training state cannot fit on the device."""
    # Its weights, two moments and the gradient.
    parameters = parameter_count(config, lora)
    needed = 4 * _F32 * parameters
    if room_bytes is None or needed <= room_bytes:
        return
    most = room_bytes // (needed // lora.rank)
    fits = f"a rank of {most} fits" if most else "not even a rank of 1 fits"
    raise InputError(
        f"{lora.rank} makes an adapter of {parameters} parameters, which takes {needed} bytes to "
        f"train; {room_bytes} bytes are set aside for adapters: {fits}",
        "lora_config.rank",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """The memory budget of training passes on one base model; None is no limit."""

    config: DecoderConfig
    itemsize: int
    """Bytes of one element of the activations."""
    logits_bytes: int
    limit_bytes: int | None

    def token_bytes(self, lora: LoraConfig, *, backward: bool, recompute: bool = False) -> int:
        """Bytes of each token of a pass."""
        config, size = self.config, self.itemsize
        block = block_bytes(config, lora.rank, size)
        around = passing_bytes(config, size) + ends_bytes(config, size)
        if not backward:
            return block + around
        if recompute:
            return config.num_layers * size * config.hidden_size + block + around
        return config.num_layers * block + around

    def operation_bytes(self, lora: LoraConfig, *, backward: bool) -> int:
        """Bytes of an operation of any length: cast factors, and its gradient twice."""
        parameters = parameter_count(self.config, lora)
        cast = 0 if self.itemsize == _F32 else self.itemsize * parameters
        return cast + (2 * _F32 * parameters if backward else 0)

    def fits(self, pieces_bytes: int) -> bool:
        """Whether a pass over slices of this size fits."""
        return self.limit_bytes is None or self._head + pieces_bytes <= self.limit_bytes

    def most_tokens(self, lora: LoraConfig, *, backward: bool) -> int | None:
        """The longest sequence, with one target per token, that fits a pass; None is no limit."""
        room = self._room(lora, backward=backward)
        if room is None:
            return None
        each = self.token_bytes(lora, backward=backward, recompute=True) + TARGET_BYTES
        return max(room // each, 0)

    def most_targets(self, lora: LoraConfig, tokens: int, *, backward: bool) -> int | None:
        """How many targets fit with a sequence of `tokens`."""
        room = self._room(lora, backward=backward)
        if room is None:
            return None
        room -= tokens * self.token_bytes(lora, backward=backward, recompute=True)
        return max(room // TARGET_BYTES, 0)

    def slice_tokens(self, lora: LoraConfig, wanted: int, *, backward: bool, targets: int) -> int:
        """Tokens of a slice: at most `wanted`, and a power of two where memory is the limit.

        The slices decide the last bits of an operation's sums; a power of two keeps them the same
        on machines with about the same memory.
        """
        room = self._room(lora, backward=backward)
        if room is None:
            return wanted
        room -= targets * TARGET_BYTES
        most = max(room // self.token_bytes(lora, backward=backward), 0)
        return wanted if most >= wanted else 1 << max(most.bit_length() - 1, 0)

    def _room(self, lora: LoraConfig, *, backward: bool) -> int | None:
        """Bytes for the tokens and targets of a pass of one operation."""
        if self.limit_bytes is None:
            return None
        return self.limit_bytes - self._head - self.operation_bytes(lora, backward=backward)

    @property
    def _head(self) -> int:
        # A chunk has at least 16 rows, however small its bound.
        rows = 16 * _F32 * self.config.vocab_size
        return _LOGIT_CHUNKS * max(self.logits_bytes, rows)
