"""Sample results as protobuf."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tinkex.errors import InputError
from tinkex.types import (
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    StopReason,
    TopkLogprobs,
)
from tinkex.wire.values import fill_tensor, pack, parse, read_tensor, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.wire import tinkex_pb2 as pb

_STOP_REASONS: tuple[StopReason, ...] = ("stop", "length")
_STOP_NUMBERS: dict[StopReason, int] = {"stop": 0, "length": 1}


def encode_sample_response(response: SampleResponse, *, deterministic: bool = False) -> bytes:
    """Serialize a result; sequence ids travel in the future's envelope, not here."""
    from tinkex.wire import tinkex_pb2 as pb

    message = pb.SampleResponse(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        _fill_sequence(message.sequences.add(), sequence)
    if response.prompt_logprobs_np is not None:
        message.prompt_logprobs = pack(response.prompt_logprobs_np, "<f4")
    if response.topk_prompt_logprobs_np is not None:
        _fill_topk(message.topk_prompt_logprobs, response.topk_prompt_logprobs_np)
    if response.target_prompt_logprobs is not None:
        fill_tensor(message.target_prompt_logprobs, response.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None:
        fill_tensor(message.prompt_alt_tokens.tokens, response.prompt_alt_tokens.tokens)
        fill_tensor(message.prompt_alt_tokens.logprobs, response.prompt_alt_tokens.logprobs)
    return message.SerializeToString(deterministic=deterministic)


def decode_sample_response(
    data: bytes, sequence_ids: Sequence[str], *, keep_empty: bool = False
) -> SampleResponse:
    """Read a result and give its sequences the ids that came with the future.

    Clients take an empty array for none. With `keep_empty` it stays one, so that the result is
    encoded to the same bytes again.
    """
    from tinkex.wire import tinkex_pb2 as pb

    message = parse(pb.SampleResponse, data)
    if len(message.sequences) != len(sequence_ids):
        raise InputError(
            f"{len(message.sequences)} sequences for {len(sequence_ids)} sequence ids",
            "sequences",
        )
    if message.prompt_cache_hit_tokens < 0:
        raise InputError("must not be negative", "prompt_cache_hit_tokens")
    logprobs = message.prompt_logprobs
    some = message.HasField("prompt_logprobs") if keep_empty else bool(logprobs)
    sequences: list[SampledSequence] = []
    for index, sequence in enumerate(message.sequences):
        sequences.append(_read_sequence(sequence, sequence_ids[index], index, keep_empty))
    return SampleResponse._make(  # pyright: ignore[reportPrivateUsage] - checked above
        sequences=sequences,
        prompt_logprobs_np=unpack(logprobs, "<f4", "prompt_logprobs") if some else None,
        topk_prompt_logprobs_np=(
            _read_topk(message.topk_prompt_logprobs, "topk_prompt_logprobs", keep_empty)
            if message.HasField("topk_prompt_logprobs")
            else None
        ),
        target_prompt_logprobs=(
            read_tensor(message.target_prompt_logprobs, "target_prompt_logprobs")
            if message.HasField("target_prompt_logprobs")
            else None
        ),
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
        prompt_alt_tokens=(
            _read_alt_tokens(message.prompt_alt_tokens)
            if message.HasField("prompt_alt_tokens")
            else None
        ),
    )


def _fill_sequence(message: pb.SampledSequence, sequence: SampledSequence) -> None:
    message.stop_reason = _STOP_NUMBERS[sequence.stop_reason]
    if sequence.tokens_np is not None:
        message.tokens = pack(sequence.tokens_np, "<i4")
    if sequence.logprobs_np is not None:
        message.logprobs = pack(sequence.logprobs_np, "<f4")
    if sequence.topk_logprobs_np is not None:
        _fill_topk(message.topk_sampled_logprobs, sequence.topk_logprobs_np)


def _read_sequence(
    message: pb.SampledSequence, sequence_id: str, index: int, keep_empty: bool
) -> SampledSequence:
    path = f"sequences[{index}]"
    stop_reason, packed = message.stop_reason, message.logprobs
    some = message.HasField("logprobs") if keep_empty else bool(packed)
    if stop_reason not in (0, 1):
        raise InputError(f"unknown stop reason number {stop_reason}", path)
    tokens = unpack(message.tokens, "<i4", f"{path}.tokens")
    logprobs = unpack(packed, "<f4", f"{path}.logprobs") if some else None
    if logprobs is not None and logprobs.size != tokens.size:
        raise InputError(f"{logprobs.size} values for {tokens.size} tokens", f"{path}.logprobs")
    topk = (
        _read_topk(message.topk_sampled_logprobs, f"{path}.topk_sampled_logprobs", keep_empty)
        if message.HasField("topk_sampled_logprobs")
        else None
    )
    return SampledSequence._make(  # pyright: ignore[reportPrivateUsage] - checked above
        stop_reason=_STOP_REASONS[stop_reason],
        sequence_id=sequence_id,
        tokens_np=tokens,
        logprobs_np=logprobs,
        topk_logprobs_np=topk,
    )


def _fill_topk(message: pb.TopkLogprobs, topk: TopkLogprobs) -> None:
    message.length, message.k = cast("tuple[int, int]", topk.token_ids.shape)
    message.token_ids = pack(topk.token_ids, "<i4")
    message.logprobs = pack(topk.logprobs, "<f4")


def _read_topk(message: pb.TopkLogprobs, path: str, keep_empty: bool) -> TopkLogprobs | None:
    length, k = message.length, message.k
    size = length * k * 4
    if size == 0 and not keep_empty:
        return None
    if len(message.token_ids) < size or len(message.logprobs) < size:
        raise InputError(f"{length} x {k} cells need {size} bytes each", path)
    return TopkLogprobs(
        token_ids=unpack(message.token_ids[:size], "<i4", path).reshape(length, k),
        logprobs=unpack(message.logprobs[:size], "<f4", path).reshape(length, k),
    )


def _read_alt_tokens(message: pb.PromptAltTokens) -> PromptAltTokens:
    tokens = read_tensor(message.tokens, "prompt_alt_tokens.tokens")
    logprobs = read_tensor(message.logprobs, "prompt_alt_tokens.logprobs")
    if tokens.shape != logprobs.shape:
        raise InputError(
            f"shape {logprobs.shape} differs from the tokens' {tokens.shape}",
            "prompt_alt_tokens.logprobs",
        )
    return PromptAltTokens(tokens=tokens, logprobs=logprobs)
