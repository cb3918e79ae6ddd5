"""Checks a sampling request before it reaches the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tinkex.errors import InputError
from tinkex.types import EncodedTextChunk
from tinkex.types.bounds import MAX_TOPK, too_much_sampling

if TYPE_CHECKING:
    from tinkex.engine.decoder import DecoderConfig
    from tinkex.engine.protocol import SampleOp


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request's prompt, and how long its sequences may get with it."""

    prompt: list[int]
    max_length: int


def check(op: SampleOp, config: DecoderConfig, cache_tokens: int) -> Accepted:
    """The prompt and length of a request; raises `InputError` naming what is wrong."""
    if not op.sequence_ids:
        raise InputError("at least one sample must be asked for", "num_samples")
    prompt = _prompt(op, config)
    _check_params(op)
    _check_last_n(op, len(prompt))
    _check_targets(op, len(prompt), config.vocab_size)
    length = _max_length(op, len(prompt), config, cache_tokens)
    _check_work(op, len(prompt), length - len(prompt))
    return Accepted(prompt, length)


def _prompt(op: SampleOp, config: DecoderConfig) -> list[int]:
    prompt: list[int] = []
    for i, chunk in enumerate(op.prompt.chunks):
        path = f"prompt.chunks[{i}]"
        if not isinstance(chunk, EncodedTextChunk):
            raise InputError(f"{config.name} takes text only, not {type(chunk).__name__}", path)
        for j, token in enumerate(chunk.tokens):
            if not 0 <= token < config.vocab_size:
                raise InputError(
                    f"{token} is not a token of {config.name}: ids end at {config.vocab_size - 1}",
                    f"{path}.tokens[{j}]",
                )
        prompt += chunk.tokens
    if not prompt:
        raise InputError("must hold at least one token", "prompt")
    if len(prompt) > config.max_context:
        raise InputError(
            f"has {len(prompt)} tokens, {config.name} takes {config.max_context}", "prompt"
        )
    return prompt


def _check_params(op: SampleOp) -> None:
    params = op.params
    # Written so that NaN fails.
    if not 0 <= params.temperature < float("inf"):
        raise InputError("must be a number of 0 or more", "sampling_params.temperature")
    if not 0 <= params.top_p <= 1:
        raise InputError("must lie between 0 and 1", "sampling_params.top_p")
    if params.top_k < -1:
        raise InputError("must be -1 (all tokens) or more", "sampling_params.top_k")
    if params.max_tokens is not None and params.max_tokens < 0:
        raise InputError("must not be negative", "sampling_params.max_tokens")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if getattr(op, name) < 0:
            raise InputError("must not be negative; 0 asks for nothing", name)
        if getattr(op, name) > MAX_TOPK:
            raise InputError(f"must be at most {MAX_TOPK}", name)


def _check_work(op: SampleOp, prompt_tokens: int, new_tokens: int) -> None:
    targets = op.target_prompt_logprobs
    problem = too_much_sampling(
        samples=len(op.sequence_ids),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        topk_sample=op.topk_sample_logprobs,
        topk_prompt=op.topk_prompt_logprobs,
        alternatives=op.prompt_alt_tokens_k,
        targets=0 if targets is None else targets.size_bytes // 8,
    )
    if problem is not None:
        raise InputError(*problem)


def _check_last_n(op: SampleOp, prompt_length: int) -> None:
    last_n = op.prompt_logprobs_last_n
    if last_n is None:
        return
    if not op.prompt_logprobs:
        raise InputError("needs prompt_logprobs", "prompt_logprobs_last_n")
    most = max(prompt_length - 1, 1)
    if not 1 <= last_n <= most:
        raise InputError(f"must lie between 1 and {most}, got {last_n}", "prompt_logprobs_last_n")


def _check_targets(op: SampleOp, prompt_length: int, vocab_size: int) -> None:
    targets, path = op.target_prompt_logprobs, "target_prompt_logprobs"
    if targets is None:
        return
    if targets.dtype != "int64":
        raise InputError(f"must be int64, not {targets.dtype}", path)
    shape = targets.shape
    if shape is None or len(shape) != 2 or shape[0] != prompt_length - 1:
        raise InputError(f"must have shape [{prompt_length - 1}, K], not {shape}", path)
    ids = np.array(targets.data, np.int64)
    bad = np.flatnonzero((ids < -1) | (ids >= vocab_size))
    if bad.size:
        where = int(bad[0])
        raise InputError(
            f"{ids[where]} is not a token: ids end at {vocab_size - 1}, -1 asks for nothing",
            f"{path}.data[{where}]",
        )


def _max_length(op: SampleOp, prompt_length: int, config: DecoderConfig, cache_tokens: int) -> int:
    """Prompt and generated tokens together; `max_tokens` is cut at the context's end."""
    if prompt_length > cache_tokens:
        raise InputError(
            f"has {prompt_length} tokens and the cache holds {cache_tokens}: shorten it, or give "
            f"the engine a cache of at least {prompt_length} tokens",
            "prompt",
        )
    # The last sampled token is never computed, so it needs no slot in the cache.
    most = cache_tokens + 1
    wanted = op.params.max_tokens
    if wanted is None:
        return min(config.max_context, most)
    length = min(prompt_length + wanted, config.max_context)
    if length > most:
        raise InputError(
            f"{wanted} tokens after a prompt of {prompt_length} need a cache of {length - 1} "
            f"tokens and it holds {cache_tokens}: ask for at most {most - prompt_length}",
            "sampling_params.max_tokens",
        )
    return length
