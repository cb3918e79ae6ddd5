"""How many bytes a training pass takes, before it runs: plain arithmetic, no tensors.

What autograd keeps of a block is most of it. A sequence whose activations do not all fit is
computed with only the input of every block kept, and one block at a time again for the
backward pass; a sequence that does not fit even so is refused with the number that would.

The figures describe the plain path of `models/layers.py` and `lora/layers.py`, term by term;
paths with kernels of their own keep less. Attention is assumed to keep its inputs, its output
and one number per head and token, never a matrix of scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tinkex.engine.lora import parameter_count

if TYPE_CHECKING:
    from tinkex.engine.models.base import DecoderConfig
    from tinkex.types import LoraConfig

_F32: Final = 4
_PROJECTIONS: Final = 7
_LOGIT_CHUNKS: Final = 3
"""Chunks of logits that exist at the same time: the logits, their slopes, and a temporary."""


def block_bytes(config: DecoderConfig, rank: int, itemsize: int) -> int:
    """What one block keeps of one token for the backward pass."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms = 2 * _F32 * (hidden + 1)
    if config.qk_norm:
        norms += _F32 * (queries + keys + config.num_heads + config.num_kv_heads)
    # Rotated queries and keys; the values lie in one tensor with what was not yet rotated.
    attention = itemsize * (2 * queries + 3 * keys) + _F32 * config.num_heads
    inputs = itemsize * (2 * hidden + queries + inner)  # of the four groups of projections
    gate = itemsize * 3 * inner  # gate, its activation, and what that is multiplied with
    return norms + attention + inputs + gate + itemsize * _PROJECTIONS * rank


def passing_bytes(config: DecoderConfig, itemsize: int) -> int:
    """What one token takes while it passes through one block, besides what is kept."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return itemsize * (4 * inner + 4 * hidden) + _F32 * 2 * hidden


def ends_bytes(config: DecoderConfig, itemsize: int) -> int:
    """What one token takes before the first block and after the last."""
    hidden = config.hidden_size
    return itemsize * 3 * hidden + 2 * _F32 * (hidden + 1) + _F32 * config.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """The memory that training passes on one base model may take; None is no limit."""

    config: DecoderConfig
    itemsize: int
    """Bytes of one number of the activations."""
    logits_bytes: int
    limit_bytes: int | None

    def token_bytes(self, lora: LoraConfig, *, backward: bool, recompute: bool = False) -> int:
        """What each token of a pass takes."""
        config, size = self.config, self.itemsize
        block = block_bytes(config, lora.rank, size)
        around = passing_bytes(config, size) + ends_bytes(config, size)
        if not backward:
            return block + around
        if recompute:
            return config.num_layers * size * config.hidden_size + block + around
        return config.num_layers * block + around

    def operation_bytes(self, lora: LoraConfig, *, backward: bool) -> int:
        """What an operation takes whatever its length: cast factors, and its gradient twice."""
        parameters = parameter_count(self.config, lora)
        cast = 0 if self.itemsize == _F32 else self.itemsize * parameters
        return cast + (2 * _F32 * parameters if backward else 0)

    def fits(self, pieces_bytes: int) -> bool:
        """Whether a pass over pieces of this size has room."""
        return self.limit_bytes is None or self._head + pieces_bytes <= self.limit_bytes

    def piece_bytes(
        self, lora: LoraConfig, tokens: int, *, backward: bool, recompute: bool = False
    ) -> int:
        """What one operation's part of a pass takes."""
        each = self.token_bytes(lora, backward=backward, recompute=recompute)
        return self.operation_bytes(lora, backward=backward) + tokens * each

    def most_tokens(self, lora: LoraConfig, *, backward: bool, recompute: bool) -> int | None:
        """The longest sequence that fits into a pass of its own; None is no limit."""
        if self.limit_bytes is None:
            return None
        room = self.limit_bytes - self._head - self.operation_bytes(lora, backward=backward)
        return max(room // self.token_bytes(lora, backward=backward, recompute=recompute), 0)

    def slice_tokens(self, lora: LoraConfig, wanted: int, *, backward: bool) -> int:
        """At most `wanted`, and a power of two where memory is what limits.

        How an operation is cut decides the last bits of its sums; a power of two keeps that
        the same on machines that have about the same memory.
        """
        most = self.most_tokens(lora, backward=backward, recompute=False)
        if most is None or most >= wanted:
            return wanted
        return 1 << max(most.bit_length() - 1, 0)

    @property
    def _head(self) -> int:
        # A chunk has at least 16 rows, however small its bound.
        rows = 16 * _F32 * self.config.vocab_size
        return _LOGIT_CHUNKS * max(self.logits_bytes, rows)
