"""Sampling requests from submission to result, one pass at a time.

`Sampler` owns the running requests. It is synchronous and belongs to one thread, which calls `step`
until `idle`. A step plans a pass, runs it, scores prompts, samples tokens, and returns the requests
that ended. With CUDA kernels the device decodes one step ahead of the host: see `async_decode`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from tinkex.clock import SystemClock
from tinkex.engine.backends.torch.pick import best, sample_at_temperature_one
from tinkex.engine.sampler.async_decode import AsyncDecoder
from tinkex.engine.sampler.batcher import Batcher
from tinkex.engine.sampler.blocks import BlockPool
from tinkex.engine.sampler.checks import check
from tinkex.engine.sampler.request import SampleRun, next_uniforms
from tinkex.engine.sampler.runner import LoraAdapters, Runner
from tinkex.engine.sampler.stops import stop_rule
from tinkex.errors import RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from tinkex.clock import Clock
    from tinkex.engine.decoder import Decoder
    from tinkex.engine.protocol import OnToken, SampleOp
    from tinkex.engine.sampler.async_decode import DeviceSteps, PendingStep
    from tinkex.engine.sampler.batcher import Piece
    from tinkex.engine.sampler.request import Best
    from tinkex.engine.sampler.runner import Adapters, Pass
    from tinkex.engine.sampler.sequence import TokenSequence
    from tinkex.engine.sampler.stops import Decode

T = TypeVar("T")

_log = logging.getLogger(__name__)

BASE = "base"
"""The version that means no adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """How much one sampler may hold and do at a time."""

    cache_tokens: int
    """Size of the key/value cache, rounded down to whole blocks."""
    block_size: int = 16
    pass_tokens: int = 512
    """Most tokens of one pass; a longer prompt is computed in pieces."""
    max_sequences: int = 64
    """Most sequences that run at the same time."""
    logit_rows: int = 64
    """Most rows of logits that exist at the same time."""
    strict: bool = False
    """Whether results have the same bits whatever else is in the batch."""


class Sampler:
    """Samples from one base model and any number of versions of it.

    `fits` tells whether the weights of some versions fit on the device together; one always does.
    """

    def __init__(
        self,
        decoder: Decoder,
        settings: SamplerSettings,
        *,
        adapters: Adapters | None = None,
        decode: Decode | None = None,
        clock: Clock | None = None,
        fits: Callable[[set[str]], bool] | None = None,
    ) -> None:
        self._config = decoder.config
        self._backend = decoder.backend
        self._decode = decode
        self._clock = clock or SystemClock()
        self._logit_rows = settings.logit_rows
        pool = BlockPool(settings.cache_tokens // settings.block_size, settings.block_size)
        self._runner, steps = _runner(decoder, adapters, settings, pool)
        # All mutable state, besides the cache that the runner owns.
        self._batcher = Batcher(
            pool,
            max_tokens=settings.pass_tokens,
            max_sequences=settings.max_sequences,
            fits=fits,
        )
        self._runs: dict[TokenSequence, SampleRun] = {}
        self._ended: list[SampleRun] = []
        self._submitted = 0
        self._async = None if steps is None else AsyncDecoder(steps, self._batcher, self._runs)
        # Inference mode is faster, but its tensors must not be modified outside of it, as graphs
        # do.
        self._without_gradients = torch.inference_mode if steps is None else torch.no_grad
        self._pending: PendingStep | None = None
        """A decoding step that was started before the last one was read."""

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self._batcher and not self._ended

    @property
    def cache_tokens(self) -> int:
        """The most tokens that the cache holds."""
        return self._batcher.pool.num_blocks * self._batcher.pool.block_size

    @property
    def free_tokens(self) -> int:
        """Tokens of the cache that no running sequence uses."""
        return self._batcher.pool.available * self._batcher.pool.block_size

    @property
    def preemptions(self) -> int:
        """The number of preemptions so far."""
        return self._batcher.preemptions

    def submit(
        self, op: SampleOp, *, version: str = BASE, on_token: OnToken | None = None
    ) -> SampleRun:
        """Queue a request for the weights called `version`; raises `InputError` if it cannot run.

        `on_token` is called within `step`; if it raises, only this request fails.
        """
        accepted = check(op, self._config, self.cache_tokens)
        stops = stop_rule(
            op.params.stop,
            eos_token_ids=self._config.eos_token_ids,
            vocab_size=self._config.vocab_size,
            decode=self._decode,
        )
        run = SampleRun(
            op,
            version,
            accepted,
            number=self._submitted,
            vocab_size=self._config.vocab_size,
            stops=stops,
            on_token=on_token,
        )
        self._submitted += 1
        for sequence in run.unfinished:
            self._runs[sequence] = run
            self._batcher.add(sequence)
        self._settle(run)
        return run

    def cancel(self, run: SampleRun) -> None:
        """Drop a request and free its blocks at once; one that is done stays as it is."""
        if not run.done:
            run.cancelled = True
            self._drop(run)

    def step(self) -> list[SampleRun]:
        """Run one pass; return the requests that ended, in result or in error."""
        pending, self._pending = self._pending, None
        pieces = [] if pending is None or self._async is None else self._async.living(pending)
        if not pieces:
            pending, pieces = None, self._batcher.plan()
        if pieces:
            began = self._clock.now()
            runs = [self._runs[piece.sequence] for piece in pieces]
            tokens = sum(len(piece) for piece in pieces)
            # Non-finite values are detected when a token is sampled.
            with np.errstate(all="ignore"), self._without_gradients():
                for finished in self._passes(self._decode_pieces(pending, pieces)):
                    self._use(finished)
            spent_s = self._clock.now() - began
            for run, piece in zip(runs, pieces, strict=True):
                run.device_s += spent_s * len(piece) / tokens
            for run in dict.fromkeys(runs):
                self._settle(run)
        ended, self._ended = self._ended, []
        return ended

    def check(self) -> None:
        """Raise `AssertionError` when blocks leaked or requests were lost."""
        self._batcher.check()
        assert set(self._batcher) == set(self._runs)

    def _decode_pieces(self, pending: PendingStep | None, pieces: list[Piece]) -> list[Piece]:
        """Decode the pieces of a pending step, or those that a new one can; return the others."""
        if self._async is None:
            return pieces
        pending = pending or self._async.begin(pieces)
        if pending is None:
            return pieces
        decoding = self._async.living(pending)
        for piece in decoding:  # while the device computes
            self._batcher.done(piece)
        if len(decoding) == len(self._batcher):  # no other sequence waits
            self._pending = self._async.follow(pending)
        try:
            self._take_decoded(pending)
        except Exception as error:  # noqa: BLE001 - whatever it is ends in the requests' errors
            self._pending = None
            for piece in decoding:
                if run := self._runs.get(piece.sequence):
                    self._fail(run, f"sampling failed: {error}", error)
        taken = {piece.sequence for piece in decoding}
        return [piece for piece in pieces if piece.sequence not in taken]

    def _take_decoded(self, pending: PendingStep) -> None:
        """Append the tokens of a step; rows with filters or top-k outputs are sampled here."""
        tokens, logprobs = pending.step.wait()
        drawn: list[tuple[TokenSequence, SampleRun, int, float]] = []
        special: list[tuple[int, TokenSequence]] = []
        for number, row in enumerate(pending.rows):
            sequence = None if row.piece is None else row.piece.sequence
            run = None if sequence is None else self._runs.get(sequence)
            if sequence is None or run is None:
                continue
            if run.plain:
                drawn.append((sequence, run, tokens[number], logprobs[number]))
            else:
                special.append((number, sequence))
        for chunk in _chunks(special, self._logit_rows):
            rows, sequences = zip(*chunk, strict=True)
            logits_BV = pending.step.logits_BV
            self._draw_chunk(logits_BV[torch.tensor(rows, device=logits_BV.device)], sequences)
        for found in drawn:
            self._grow(*found, None)

    def _passes(self, pieces: list[Piece]) -> list[Pass]:
        """One pass over all pieces; if it fails, one per request, to fail only those at fault."""
        if not pieces:
            return []
        try:
            return [self._runner.run(pieces)]
        except Exception as error:  # noqa: BLE001 - whatever it is ends in the request's error
            own: dict[SampleRun, list[Piece]] = {}
            for piece in pieces:
                own.setdefault(self._runs[piece.sequence], []).append(piece)
            if len(own) == 1:
                self._fail(next(iter(own)), f"sampling failed: {error}", error)
                return []
            _log.warning("a pass over %d requests failed and is split: %s", len(own), error)
            return [finished for parts in own.values() for finished in self._passes(parts)]

    def _use(self, finished: Pass) -> None:
        """Score prompts and sample tokens from a pass."""
        for piece in finished.pieces:
            self._batcher.done(piece)
        try:
            self._score_prompts(finished)
            self._draw_tokens(finished)
        except Exception as error:  # noqa: BLE001 - whatever it is ends in the requests' errors
            for piece in finished.pieces:
                if run := self._runs.get(piece.sequence):
                    self._fail(run, f"sampling failed: {error}", error)

    def _score_prompts(self, finished: Pass) -> None:
        for piece, start in zip(finished.pieces, finished.starts, strict=True):
            run = self._runs.get(piece.sequence)  # None when another piece of it just failed
            if run is None or piece.sequence.sample != 0 or run.scores.complete:
                continue
            rows = run.scores.wanted(piece.start, piece.stop)
            for chunk in _chunks([start + row - piece.start for row in rows], self._logit_rows):
                logits_RV = self._runner.logits(finished.h_TD, chunk, [run.version] * len(chunk))
                lse_R = self._backend.normalizers(logits_RV)
                if not bool(lse_R.isfinite().all()):
                    self._fail_not_finite(run)
                    break
                run.scores.add(logits_RV, lse_R)
            run.scored()

    def _draw_tokens(self, finished: Pass) -> None:
        """Sample for every sequence whose last token was computed."""
        ready: list[tuple[int, TokenSequence]] = []
        for piece, start in zip(finished.pieces, finished.starts, strict=True):
            sequence = piece.sequence
            run = self._runs.get(sequence)
            if run is not None and piece.reaches_end and run.draws(sequence):
                row = start + len(piece) - 1
                ready += [(row, s) for s in (sequence, *run.held_back_by(sequence))]
        for chunk in _chunks(ready, self._logit_rows):
            rows, sequences = zip(*chunk, strict=True)
            versions = [sequence.version for sequence in sequences]
            self._draw_chunk(self._runner.logits(finished.h_TD, rows, versions), sequences)

    def _draw_chunk(self, logits_BV: Tensor, sequences: Sequence[TokenSequence]) -> None:
        runs = [self._runs[sequence] for sequence in sequences]
        numbers = next_uniforms(runs, sequences)
        bests: list[Best | None] = [None] * len(runs)
        if logits_BV.device.type == "cpu" and all(run.usual for run in runs):
            tokens, logprobs = sample_at_temperature_one(logits_BV, numbers)
        else:
            tokens_B = self._backend.sample(
                logits_BV, [r.draw(u) for r, u in zip(runs, numbers, strict=True)]
            )
            lse_B = self._backend.normalizers(logits_BV)
            tokens = _list(tokens_B)
            logprobs = _list(logits_BV.gather(1, tokens_B[:, None])[:, 0] - lse_B)
            bests = _bests(logits_BV, lse_B, [run.op.topk_sample_logprobs for run in runs])
        for row in zip(sequences, runs, tokens, logprobs, bests, strict=True):
            self._grow(*row)

    def _grow(
        self,
        sequence: TokenSequence,
        run: SampleRun,
        token: int,
        logprob: float,
        found: Best | None,
    ) -> None:
        """Append a token; one whose logits were not finite fails its request."""
        if run.done:  # another of its samples failed, or a callback cancelled it
            return
        if not math.isfinite(logprob):
            self._fail_not_finite(run)
            return
        try:
            run.grow(sequence, token, logprob, found)
        except Exception as error:  # noqa: BLE001 - the caller's own code
            self._fail(run, f"on_token or a stop string failed: {error}", error)

    def _settle(self, run: SampleRun) -> None:
        """Remove sequences that ended, and finish the request with the last of them."""
        if run.done:
            return
        for sequence in run.sequences:
            if sequence.stop_reason is not None and self._runs.pop(sequence, None):
                self._batcher.remove(sequence)
        if not run.unfinished:
            run.finish()
            self._ended.append(run)

    def _fail_not_finite(self, run: SampleRun) -> None:
        self._fail(run, f"the weights {run.version!r} give logits that are not finite", None)

    def _fail(self, run: SampleRun, message: str, cause: Exception | None) -> None:
        if run.done:
            return
        # Diverged weights will fail again; other errors may be transient.
        category = "user" if cause is None else "server"
        run.error = RequestFailedError(message, None, category)
        run.error.__cause__ = cause
        self._drop(run)
        self._ended.append(run)

    def _drop(self, run: SampleRun) -> None:
        for sequence in run.sequences:
            if self._runs.pop(sequence, None):
                self._batcher.remove(sequence)


def _runner(
    decoder: Decoder, adapters: Adapters | None, settings: SamplerSettings, pool: BlockPool
) -> tuple[Runner, DeviceSteps[Any] | None]:
    """The runner and, with a backend that has them, captured decoding steps."""
    adapters = adapters or LoraAdapters(decoder, _no_adapter)
    backend = decoder.backend
    if backend.sampling_adapters is None or backend.decode_steps is None:
        return Runner(
            decoder, adapters, num_blocks=pool.num_blocks, block_size=pool.block_size
        ), None
    known = isinstance(adapters, LoraAdapters)
    on_device = backend.sampling_adapters(
        decoder,
        adapters.peek if known else _no_adapter,
        slots=settings.max_sequences,
        copies=adapters.copies if known else None,
        strict=settings.strict,
    )
    runner = Runner(
        decoder,
        on_device,
        # One more block, that no sequence uses: padding rows of a step write there.
        num_blocks=pool.num_blocks + 1,
        block_size=pool.block_size,
        strict=settings.strict,
    )
    graphs = backend.decode_steps(
        decoder,
        runner.cache,
        on_device,
        block_size=pool.block_size,
        max_sequences=settings.max_sequences,
        max_blocks=min(pool.blocks_for(decoder.config.max_context), pool.num_blocks),
        spare_block=pool.num_blocks,
        strict=settings.strict,
    )
    return runner, graphs


def _no_adapter(version: str) -> None:
    del version


def _bests(logits_BV: Tensor, lse_B: Tensor, counts: list[int]) -> list[Best | None]:
    """The likeliest tokens of the rows that want some."""
    asked = [i for i, count in enumerate(counts) if count]
    found: list[Best | None] = [None] * len(counts)
    if asked:
        rows = torch.tensor(asked, device=logits_BV.device)
        ids_RK, values_RK = best(logits_BV[rows], lse_B[rows], max(counts))
        for i, ids, values in zip(asked, _list(ids_RK), _list(values_RK), strict=True):
            found[i] = (ids[: counts[i]], values[: counts[i]])
    return found


def _list(tensor: Tensor) -> list[Any]:
    return cast("list[Any]", tensor.tolist())  # pyright: ignore[reportUnknownMemberType] -- torch's own stub


def _chunks(items: list[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
