"""Sampling from the toy model: tokens, stops, and every kind of prompt log-probability."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.engine.models.byte_text import BYTE_EOS
from tinkex.engine.protocol import SampleResult
from tinkex.testing.toy_model import DEVICE_S_PER_TOKEN, ToyModel, uniform, user_error
from tinkex.types import (
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
)

if TYPE_CHECKING:
    from tinkex.clock import Clock
    from tinkex.engine.protocol import Best, ModelSpec, OnToken, SampleOp
    from tinkex.testing.toy_model import Head
    from tinkex.types import SamplingParams, StopReason

_EMPTY_CELL = -99999.0
# Keeps alternative draws apart from the draws of sampled tokens.
_ALTERNATIVES = 1 << 40


@dataclass(slots=True)
class _Growing:
    """One sequence while it is sampled."""

    index: int
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    rows: list[int] = field(default_factory=list[int])
    stop_reason: StopReason | None = None


async def sample(
    op: SampleOp,
    head: Head,
    prompt: list[int],
    spec: ModelSpec,
    clock: Clock,
    *,
    token_s: float,
    cached_tokens: int,
    on_token: OnToken | None,
) -> SampleResult:
    """Sample every sequence of an operation, one position every `token_s` seconds of `clock`.

    Every draw depends on (seed, sample, position) alone.
    """
    limit = _limit(op, prompt, spec)
    # Without a seed the operation's own id makes calls differ, and a replay equal.
    seed = op.params.seed if op.params.seed is not None else zlib.crc32(op.op_id.encode())
    growing = [_Growing(index) for index in range(len(op.sequence_ids))]
    for _ in range(limit):
        alive = [g for g in growing if g.stop_reason is None]
        if not alive:
            break
        for sequence in alive:
            _grow(sequence, op, head, prompt, seed, on_token)
        if token_s > 0:
            await clock.sleep(token_s)
    generated = sum(len(g.tokens) for g in growing)
    response = SampleResponse(
        sequences=[
            _sequence(g, sequence_id, head, op.topk_sample_logprobs)
            for g, sequence_id in zip(growing, op.sequence_ids, strict=True)
        ],
        prompt_logprobs_np=_prompt_logprobs(op, head, prompt),
        topk_prompt_logprobs_np=_topk_prompt(op, head, prompt),
        target_prompt_logprobs=_targets(op, head, prompt),
        prompt_alt_tokens=_alternatives(op, head, prompt, seed),
        prompt_cache_hit_tokens=cached_tokens,
    )
    steps = max((len(g.tokens) for g in growing), default=0)
    return SampleResult(
        response=response,
        prompt_tokens=len(prompt),
        cached_tokens=cached_tokens,
        generated_tokens=generated,
        device_s=steps * token_s + (len(prompt) + generated) * DEVICE_S_PER_TOKEN,
    )


def _grow(
    sequence: _Growing,
    op: SampleOp,
    head: Head,
    prompt: list[int],
    seed: int,
    on_token: OnToken | None,
) -> None:
    params = op.params
    place = len(prompt) + len(sequence.tokens) - 1
    row = ToyModel.row(sequence.tokens[-1] if sequence.tokens else prompt[-1], place)
    u = uniform(seed, sequence.index, place)
    token = head.pick(row, u, params.temperature, params.top_k, params.top_p)
    logprob = float(head.logprobs[row, token])
    sequence.tokens.append(token)
    sequence.logprobs.append(logprob)
    sequence.rows.append(row)
    if on_token is not None:
        on_token(sequence.index, token, logprob, _best(head, row, op.topk_sample_logprobs))
    if _stops(sequence.tokens, params):
        sequence.stop_reason = "stop"


def _stops(tokens: list[int], params: SamplingParams) -> bool:
    stop = params.stop
    if stop is None:
        return tokens[-1] == BYTE_EOS
    choices = [stop] if isinstance(stop, str) else list(stop)
    text = bytes(token for token in tokens if token < BYTE_EOS)
    return any(
        (tokens[-1] == choice) if isinstance(choice, int) else text.endswith(choice.encode())
        for choice in choices
    )


def _best(head: Head, row: int, k: int) -> Best | None:
    ids, values = head.best(row, k)
    return (ids.tolist(), values.tolist()) if k else None


def _limit(op: SampleOp, prompt: list[int], spec: ModelSpec) -> int:
    if not prompt:
        raise user_error("the prompt is empty")
    if min(prompt) < 0 or max(prompt) >= spec.vocab_size:
        raise user_error(f"the prompt has a token outside 0..{spec.vocab_size - 1}")
    room = spec.max_context_length - len(prompt)
    if room < 0:
        raise user_error(
            f"the prompt has {len(prompt)} tokens, {spec.name} takes {spec.max_context_length}"
        )
    last_n = op.prompt_logprobs_last_n
    if last_n is not None and not 1 <= last_n <= max(len(prompt) - 1, 1):
        raise user_error(f"prompt_logprobs_last_n must lie between 1 and {len(prompt) - 1}")
    wanted = op.params.max_tokens
    return room if wanted is None else min(wanted, room)


def _sequence(growing: _Growing, sequence_id: str, head: Head, k: int) -> SampledSequence:
    best = [head.best(row, k) for row in growing.rows] if k else []
    topk = None
    if best:
        topk = TopkLogprobs(
            np.array([ids for ids, _ in best], np.int32),
            np.array([values for _, values in best], np.float32),
        )
    return SampledSequence(
        stop_reason=growing.stop_reason or "length",
        sequence_id=sequence_id,
        tokens_np=np.array(growing.tokens, np.int32),
        logprobs_np=np.array(growing.logprobs, np.float32),
        topk_logprobs_np=topk,
    )


def _prompt_logprobs(op: SampleOp, head: Head, prompt: list[int]) -> Any:
    if not op.prompt_logprobs:
        return None
    values = np.full(len(prompt), np.nan, np.float32)
    values[1:] = head.logprobs[ToyModel.rows(prompt)[:-1], prompt[1:]]
    if op.prompt_logprobs_last_n is not None:
        values[: len(prompt) - op.prompt_logprobs_last_n] = np.nan
    return values


def _topk_prompt(op: SampleOp, head: Head, prompt: list[int]) -> TopkLogprobs | None:
    k = op.topk_prompt_logprobs
    if not k:
        return None
    ids = np.zeros((len(prompt), k), np.int32)
    values = np.full((len(prompt), k), _EMPTY_CELL, np.float32)
    for position, row in enumerate(ToyModel.rows(prompt)[:-1], start=1):
        found, logprobs = head.best(int(row), k)
        ids[position, : len(found)], values[position, : len(found)] = found, logprobs
    return TopkLogprobs(ids, values)


def _targets(op: SampleOp, head: Head, prompt: list[int]) -> TensorData | None:
    wanted = op.target_prompt_logprobs
    if wanted is None:
        return None
    rows = ToyModel.rows(prompt)[:-1]
    shape = wanted.shape
    if shape is None or len(shape) != 2 or shape[0] != len(rows):
        raise user_error(f"target_prompt_logprobs must have shape [{len(rows)}, K], not {shape}")
    crow, col = wanted.sparse_crow_indices, wanted.sparse_col_indices
    if crow is None or col is None:
        ids = wanted.to_numpy()
        spread = np.broadcast_to(rows[:, None], ids.shape)
    else:
        ids = np.asarray(wanted.data, np.int64)
        spread = np.repeat(rows, np.diff(crow))
    if ids.size and ids.max() >= head.logprobs.shape[1]:
        raise user_error("target_prompt_logprobs has a token outside the vocabulary")
    values = np.where(ids < 0, 0.0, head.logprobs[spread, np.maximum(ids, 0)])
    return TensorData(
        data=values.astype(np.float32),
        dtype="float32",
        shape=shape,
        sparse_crow_indices=crow,
        sparse_col_indices=col,
    )


def _alternatives(op: SampleOp, head: Head, prompt: list[int], seed: int) -> PromptAltTokens | None:
    k = op.prompt_alt_tokens_k
    if not k:
        return None
    rows = [int(row) for row in ToyModel.rows(prompt)[:-1]]
    temperature = op.params.temperature
    ids = np.array(
        [
            [
                head.pick(row, uniform(seed, _ALTERNATIVES + draw, place), temperature, -1, 1.0)
                for draw in range(k)
            ]
            for place, row in enumerate(rows)
        ],
        np.int64,
    ).reshape(len(rows), k)
    logprobs = head.logprobs[np.array(rows, np.int64)[:, None], ids].astype(np.float32)
    return PromptAltTokens(
        tokens=TensorData.from_numpy(ids), logprobs=TensorData.from_numpy(logprobs)
    )
