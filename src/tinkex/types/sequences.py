"""What sampling returns: arrays as they were received, and lists made on demand."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, cast, get_args

from tinkex.errors import InputError, InputTypeError, quoted
from tinkex.types.arrays import same_array, to_array
from tinkex.types.sampling import StopReason
from tinkex.types.tensors import PromptAltTokens, TensorData, TopkLogprobs, int32_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.types.arrays import Array
    from tinkex.types.value import Usage

TopkLists = list[list[tuple[int, float]] | None]
"""The best tokens of each position with their log-probabilities."""


@dataclass(frozen=True, eq=False, init=False, repr=False)
class SampledSequence:
    """One completion. Give tokens as an array (`tokens_np`) or as a list (`tokens`)."""

    stop_reason: StopReason
    sequence_id: str
    tokens_np: Array | None
    logprobs_np: Array | None
    topk_logprobs_np: TopkLogprobs | None

    def __init__(
        self,
        stop_reason: StopReason,
        sequence_id: str,
        tokens_np: Array | None = None,
        logprobs_np: Array | None = None,
        topk_logprobs_np: TopkLogprobs | None = None,
        _tokens_list: Sequence[int] | None = None,
        _logprobs_list: Sequence[float] | None = None,
        _topk_logprobs_list: TopkLists | None = None,
        *,
        tokens: Sequence[int] | None = None,
        logprobs: Sequence[float] | None = None,
        topk_logprobs: TopkLists | None = None,
    ) -> None:
        kind = "SampledSequence"
        if not isinstance(stop_reason, str) or stop_reason not in get_args(StopReason):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may not type-check
            raise InputError(
                f"must be 'length' or 'stop', got {quoted(stop_reason)}", f"{kind}.stop_reason"
            )
        if not isinstance(sequence_id, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may not type-check
            raise InputTypeError("expected str", f"{kind}.sequence_id")
        ids = _first(tokens_np, tokens, _tokens_list)
        values = _first(logprobs_np, logprobs, _logprobs_list)
        best = _first(topk_logprobs_np, topk_logprobs, _topk_logprobs_list)
        if ids is not None:
            ids = _flat(int32_array(ids, f"{kind}.tokens"), f"{kind}.tokens")
        if values is not None:
            path = f"{kind}.logprobs"
            values = _flat(to_array(values, "float32", path), path)
            if ids is not None and len(ids) != len(values):
                raise InputError(f"{len(values)} log-probabilities for {len(ids)} tokens", path)
        self.__dict__.update(
            stop_reason=stop_reason,
            sequence_id=sequence_id,
            tokens_np=ids,
            logprobs_np=values,
            topk_logprobs_np=_topk(best, f"{kind}.topk_logprobs"),
        )

    @classmethod
    def _make(
        cls,
        stop_reason: StopReason,
        sequence_id: str,
        tokens_np: Array,
        logprobs_np: Array | None,
        topk_logprobs_np: TopkLogprobs | None,
    ) -> Self:
        """Build one from values that a decoder has checked."""
        self = cls.__new__(cls)
        state = self.__dict__
        state["stop_reason"] = stop_reason
        state["sequence_id"] = sequence_id
        state["tokens_np"] = tokens_np
        state["logprobs_np"] = logprobs_np
        state["topk_logprobs_np"] = topk_logprobs_np
        return self

    @cached_property
    def tokens(self) -> list[int]:
        """The token ids; the stop token is among them."""
        return [] if self.tokens_np is None else cast("list[int]", self.tokens_np.tolist())

    @cached_property
    def logprobs(self) -> list[float] | None:
        """The log-probability of each token."""
        return None if self.logprobs_np is None else cast("list[float]", self.logprobs_np.tolist())

    @cached_property
    def topk_logprobs(self) -> TopkLists | None:
        """The best tokens at each position."""
        return None if self.topk_logprobs_np is None else self.topk_logprobs_np.to_lists()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampledSequence):
            return NotImplemented
        return (
            self.stop_reason == other.stop_reason
            and self.sequence_id == other.sequence_id
            and same_array(self.tokens_np, other.tokens_np)
            and same_array(self.logprobs_np, other.logprobs_np)
            and self.topk_logprobs_np == other.topk_logprobs_np
        )

    def __repr__(self) -> str:
        count = 0 if self.tokens_np is None else len(self.tokens_np)
        ids = [] if self.tokens_np is None else cast("list[int]", self.tokens_np[:8].tolist())
        shown = ", ".join(str(token) for token in ids) + (", ..." if count > len(ids) else "")
        return (
            f"SampledSequence(stop_reason={self.stop_reason!r}, "
            f"sequence_id={self.sequence_id!r}, {count} tokens=[{shown}])"
        )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _flat(array: Array, path: str) -> Array:
    if array.ndim != 1:
        raise InputError(f"expected one dimension, got shape {list(array.shape)}", path)
    return array


def _topk(value: Any, path: str) -> TopkLogprobs | None:
    if value is None or isinstance(value, TopkLogprobs):
        return value
    try:
        return TopkLogprobs.from_lists(value)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputTypeError(
            "expected TopkLogprobs, or lists of (token, log-probability)", path
        ) from error


@dataclass(frozen=True, eq=False)
class SampleResponse:
    """The answer to a sample request. In `prompt_logprobs_np` NaN means not computed."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs_np: Array | None = field(default=None, repr=False)
    topk_prompt_logprobs_np: TopkLogprobs | None = field(default=None, repr=False)
    target_prompt_logprobs: TensorData | None = None
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None
    _prompt_logprobs_list: InitVar[Sequence[float | None] | None] = None
    _topk_prompt_logprobs_list: InitVar[TopkLists | None] = None
    usage: Usage | None = field(default=None, kw_only=True)

    def __post_init__(
        self,
        _prompt_logprobs_list: Sequence[float | None] | None,
        _topk_prompt_logprobs_list: TopkLists | None,
    ) -> None:
        kind = "SampleResponse"
        if not isinstance(self.sequences, list | tuple):
            raise InputTypeError("expected a list of SampledSequence", f"{kind}.sequences")
        for i, sequence in enumerate(self.sequences):
            if not isinstance(sequence, SampledSequence):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may not type-check
                raise InputTypeError("expected SampledSequence", f"{kind}.sequences[{i}]")
        logprobs = _first(self.prompt_logprobs_np, _prompt_logprobs_list)
        if logprobs is not None:
            values = to_array(logprobs, "float32", f"{kind}.prompt_logprobs_np")
            self.__dict__["prompt_logprobs_np"] = values
        best = _first(self.topk_prompt_logprobs_np, _topk_prompt_logprobs_list)
        self.__dict__["topk_prompt_logprobs_np"] = _topk(best, f"{kind}.topk_prompt_logprobs_np")
        hits = self.prompt_cache_hit_tokens
        if isinstance(hits, bool) or not isinstance(hits, int):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may not type-check
            raise InputTypeError("expected int", f"{kind}.prompt_cache_hit_tokens")
        for name, wanted in _OPTIONAL.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, wanted):
                raise InputTypeError(f"expected {wanted.__name__} or None", f"{kind}.{name}")

    @classmethod
    def _make(
        cls,
        sequences: list[SampledSequence],
        prompt_logprobs_np: Array | None,
        topk_prompt_logprobs_np: TopkLogprobs | None,
        target_prompt_logprobs: TensorData | None,
        prompt_cache_hit_tokens: int,
        prompt_alt_tokens: PromptAltTokens | None,
    ) -> Self:
        """Build one from values that a decoder has checked."""
        self = cls.__new__(cls)
        state = self.__dict__
        state["sequences"] = sequences
        state["prompt_logprobs_np"] = prompt_logprobs_np
        state["topk_prompt_logprobs_np"] = topk_prompt_logprobs_np
        state["target_prompt_logprobs"] = target_prompt_logprobs
        state["prompt_cache_hit_tokens"] = prompt_cache_hit_tokens
        state["prompt_alt_tokens"] = prompt_alt_tokens
        state["usage"] = None
        return self

    @cached_property
    def prompt_logprobs(self) -> list[float | None] | None:
        """One log-probability per prompt token, None where it was not computed."""
        if self.prompt_logprobs_np is None:
            return None
        values = cast("list[float]", self.prompt_logprobs_np.tolist())
        return [None if value != value else value for value in values]

    @cached_property
    def topk_prompt_logprobs(self) -> TopkLists | None:
        """The best tokens at each prompt position."""
        if self.topk_prompt_logprobs_np is None:
            return None
        return self.topk_prompt_logprobs_np.to_lists()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampleResponse):
            return NotImplemented
        return (
            list(self.sequences) == list(other.sequences)
            and same_array(self.prompt_logprobs_np, other.prompt_logprobs_np)
            and self.topk_prompt_logprobs_np == other.topk_prompt_logprobs_np
            and self.target_prompt_logprobs == other.target_prompt_logprobs
            and self.prompt_cache_hit_tokens == other.prompt_cache_hit_tokens
            and self.prompt_alt_tokens == other.prompt_alt_tokens
        )


_OPTIONAL: dict[str, type] = {
    "target_prompt_logprobs": TensorData,
    "prompt_alt_tokens": PromptAltTokens,
}
