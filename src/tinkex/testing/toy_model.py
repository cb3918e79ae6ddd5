"""A language model small enough to read: a fixed table of logits plus a learned bias.

The next token depends on the last token and its position through one of a few rows of a
fixed table; an adapter is one bias per vocabulary entry. That is a real distribution with
real gradients: losses go down, samples and prompts agree on log-probabilities, and two
equal calls give equal numbers.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.errors import RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from tinkex.engine.protocol import ModelSpec
    from tinkex.types import ModelInput

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]

ROWS = 32
_MASK = (1 << 64) - 1
_PICTURE_TOKENS = 16
DEVICE_S_PER_TOKEN = 1e-6


class Head:
    """The distributions of one state of the weights. Immutable; small tables are kept."""

    def __init__(self, table: Floats, bias: Floats) -> None:
        self.bias = bias
        logits = table + bias
        top = logits.max(axis=1, keepdims=True)
        norm = top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
        self.logprobs: Floats = logits - norm
        # Mutable state: cumulative distributions by row and sampling settings.
        self._cumulative: dict[tuple[int, float, int, float], Floats] = {}

    def pick(self, row: int, u: float, temperature: float, top_k: int, top_p: float) -> int:
        """The token at `u` in [0, 1) of a row's distribution; temperature 0 is the best one."""
        if temperature == 0:
            return int(self.logprobs[row].argmax())
        key = (row, temperature, top_k, top_p)
        cumulative = self._cumulative.get(key)
        if cumulative is None:
            cumulative = self._cumulative[key] = self._distribution(*key)
        target = u * float(cumulative[-1])
        return int(np.searchsorted(cumulative, target, side="right"))

    def best(self, row: int, k: int) -> tuple[Ints, Floats]:
        """The k likeliest tokens of a row and their log-probabilities."""
        values = self.logprobs[row]
        ids = np.argsort(-values, kind="stable")[:k]
        return ids, values[ids]

    def _distribution(self, row: int, temperature: float, top_k: int, top_p: float) -> Floats:
        logits = self.logprobs[row] / temperature
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        order = np.argsort(-chances, kind="stable")
        kept = len(order) if top_k < 1 else min(top_k, len(order))
        if top_p < 1:
            enough = int(np.searchsorted(chances[order].cumsum(), top_p)) + 1
            kept = min(kept, enough)
        chances[order[kept:]] = 0.0
        return chances.cumsum()


class ToyModel:
    """A base model of the fake engine."""

    def __init__(self, spec: ModelSpec) -> None:
        numbers = np.random.Generator(np.random.PCG64(zlib.crc32(spec.name.encode())))
        self.spec = spec
        self._table: Floats = numbers.normal(size=(ROWS, spec.vocab_size))
        self.zeros: Floats = np.zeros(spec.vocab_size)
        self.base = self.head(self.zeros)
        """The distributions without an adapter."""

    def head(self, bias: Floats) -> Head:
        """The distributions with a bias."""
        return Head(self._table, bias)

    @staticmethod
    def rows(tokens: Sequence[int] | Ints) -> Ints:
        """For each position the table row that predicts what follows it."""
        ids = np.asarray(tokens, dtype=np.int64)
        return (ids * 31 + np.arange(len(ids)) * 7) % ROWS

    @staticmethod
    def row(token: int, position: int) -> int:
        """`rows` for one position."""
        return (token * 31 + position * 7) % ROWS


def input_tokens(value: ModelInput) -> list[int]:
    """The token ids of an input; pictures and sound become ids made from their bytes."""
    tokens: list[int] = []
    for chunk in value.chunks:
        kind: Any = chunk.type
        if kind == "encoded_text":
            tokens.extend(int(token) for token in getattr(chunk, "tokens"))  # noqa: B009
            continue
        content = getattr(chunk, "data", None) or getattr(chunk, "dmel", None)
        if content is None:
            content = str(getattr(chunk, "location", "")).encode()
        count = getattr(chunk, "expected_tokens", None) or _PICTURE_TOKENS
        tokens.extend([zlib.crc32(content) % 256] * int(count))
    return tokens


def uniform(*parts: int) -> float:
    """A number in [0, 1) that depends on the parts alone (splitmix64)."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


def user_error(message: str) -> RequestFailedError:
    """The failure of a request that its caller can correct."""
    return RequestFailedError(message, None, "user")
