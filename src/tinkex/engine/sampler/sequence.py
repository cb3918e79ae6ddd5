"""One sequence while it is sampled: its tokens, and how many of them the cache has.

The batcher updates `computed` and `blocks`, the request appends tokens; nothing else writes here.
No tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinkex.engine.sampler.blocks import block_key, root_key

if TYPE_CHECKING:
    from tinkex.types import StopReason


@dataclass(slots=True, eq=False, kw_only=True)
class TokenSequence:
    """Prompt and generated tokens of one sample.

    `turn` orders sequences, smallest first. `max_length` counts prompt and generated tokens.
    `reusable` is how many leading tokens may come out of the prefix cache: a position whose
    log-probabilities are still wanted must be computed.
    """

    turn: tuple[int, int]
    sample: int
    version: str
    prompt_length: int
    max_length: int
    tokens: list[int]
    reusable: int
    cache_salt: str = ""
    """Its owner, and part of the hash of its blocks: only sequences with the same salt share them.
    """
    logprobs: list[float] = field(default_factory=list[float])
    blocks: list[int] = field(default_factory=list[int])
    computed: int = 0
    running: bool = False
    cached: int | None = None
    """Prompt tokens found in the prefix cache when the sequence first ran."""
    waits_for: bytes | None = None
    """A block that another sequence is computing and this one will share."""
    stop_reason: StopReason | None = None
    first: TokenSequence | None = None
    """The first sample of the same request, if this is another."""
    _keys: list[bytes] = field(default_factory=list[bytes])

    @property
    def owner(self) -> str:
        """Who shares passes with other owners."""
        return self.cache_salt

    @property
    def pending(self) -> int:
        """Tokens that the cache lacks; at 1 the sequence decodes, above it prefills."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def held_back(self) -> bool:
        """Whether the first sample is computing the row that this one starts with."""
        first = self.first
        return (
            first is not None
            and first.running
            and len(first.tokens) == len(self.tokens) == self.prompt_length
        )

    @property
    def cache_length(self) -> int:
        """The most tokens in the cache: the last sampled one is never computed."""
        return max(self.max_length - 1, self.prompt_length)

    def keys(self, block_size: int) -> list[bytes]:
        """The names of all full blocks of the tokens so far."""
        keys = self._keys
        while (end := (len(keys) + 1) * block_size) <= len(self.tokens):
            parent = keys[-1] if keys else root_key(self.version, self.cache_salt)
            keys.append(block_key(parent, self.tokens[end - block_size : end]))
        return keys
