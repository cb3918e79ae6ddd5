"""A batch of training operations, run one pass at a time.

The caller may do other work between passes. Only an operation's own lengths decide how it is cut
into slices; which slices share a pass depends on the memory that is free at that moment. A pass
that fails is split, so that only the operation at fault fails.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tinkex.engine.failures import failure, forget_frames, is_memory
from tinkex.engine.training.memory import TARGET_BYTES
from tinkex.engine.training.packing import cut, take_pass
from tinkex.engine.training.passes import run_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.clock import Clock
    from tinkex.engine.training.memory import PassMemory
    from tinkex.engine.training.packing import Slice
    from tinkex.engine.training.passes import PassContext, TrainingWork


@dataclass(frozen=True, slots=True)
class _Cost:
    """Bytes of a slice in a pass: fixed, and per token with and without a gradient."""

    fixed: int
    kept: int
    passing: int


@dataclass(slots=True)
class _Load:
    """The size of a pass: the sums over its slices."""

    tokens: int = 0
    fixed: int = 0
    kept: int = 0
    passing: int = 0
    backward: bool = False
    model_ids: set[str] = field(default_factory=set[str])

    def plus(self, piece: Slice, work: TrainingWork, cost: _Cost) -> _Load:
        return _Load(
            self.tokens + piece.tokens,
            self.fixed + cost.fixed + TARGET_BYTES * work.job.targets(piece.first, piece.last),
            self.kept + piece.tokens * cost.kept,
            self.passing + piece.tokens * cost.passing,
            self.backward or work.job.op.backward,
            self.model_ids | {work.job.op.model_id},
        )

    @property
    def bytes(self) -> int:
        # If one slice needs a gradient, autograd keeps the activations of all of them.
        return self.fixed + (self.kept if self.backward else self.passing)


class TrainingBatch:
    """Runs some operations; `fits_adapters` tells whether some adapters fit on the device."""

    def __init__(
        self,
        context: PassContext,
        memory: PassMemory,
        works: Sequence[TrainingWork],
        *,
        max_pass_tokens: int,
        fits_adapters: Callable[[set[str]], bool],
        clock: Clock,
    ) -> None:
        self._context = context
        self._memory = memory
        self._works = list(works)
        self._costs = [self._cost(work) for work in works]
        self._fits_adapters = fits_adapters
        self._clock = clock
        # Mutable state: slices that have not run, and operations that have not ended.
        self._waiting = deque(
            piece
            for number, work in enumerate(works)
            for piece in cut(number, work.job.lengths, self._most(work, max_pass_tokens))
        )
        self._open = list(range(len(works)))

    @property
    def done(self) -> bool:
        """Whether every operation has ended."""
        return not self._open

    def step(self, most_tokens: int) -> list[TrainingWork]:
        """Run one pass of about `most_tokens`; the operations that ended with it, in order."""
        load = _Load()

        def admit(piece: Slice) -> bool:
            nonlocal load
            more = load.plus(piece, self._works[piece.op], self._costs[piece.op])
            if load.tokens and not self._fits(more, most_tokens):
                return False
            load = more
            return True

        slices = take_pass(self._waiting, admit)
        before = self._clock.now()
        self._run(slices, recompute=not self._memory.fits(load.bytes))
        spent, tokens = self._clock.now() - before, sum(piece.tokens for piece in slices)
        for piece in slices:
            self._works[piece.op].device_s += spent * piece.tokens / tokens
        self._waiting = deque(p for p in self._waiting if self._works[p.op].error is None)
        running = {piece.op for piece in self._waiting}
        ended = [number for number in self._open if number not in running]
        self._open = [number for number in self._open if number in running]
        return [self._works[number] for number in ended]

    def _most(self, work: TrainingWork, wanted: int) -> int:
        job = work.job
        return self._memory.slice_tokens(
            work.lora, wanted, backward=job.op.backward, targets=job.targets()
        )

    def _cost(self, work: TrainingWork) -> _Cost:
        memory, lora = self._memory, work.lora
        return _Cost(
            memory.operation_bytes(lora, backward=work.job.op.backward),
            memory.token_bytes(lora, backward=True),
            memory.token_bytes(lora, backward=False),
        )

    def _fits(self, load: _Load, most_tokens: int) -> bool:
        return (
            load.tokens <= most_tokens
            and self._memory.fits(load.bytes)
            and self._fits_adapters(load.model_ids)
        )

    def _run(self, slices: list[Slice], *, recompute: bool) -> None:
        error = self._attempt(slices, recompute=recompute)
        if error is None:
            return
        for piece in slices:
            work = self._works[piece.op]
            if work.error is None:
                own = error if len(slices) == 1 else self._attempt([piece], recompute=False)
                if own is not None and is_memory(own) and not recompute:
                    own = self._attempt([piece], recompute=True)
                if own is not None:
                    doing = f"on a sequence of {max(work.job.lengths)} tokens"
                    work.error = failure(own, doing, work.job.op.op_id)

    def _attempt(self, slices: list[Slice], *, recompute: bool) -> BaseException | None:
        try:
            run_pass(self._context, self._works, slices, recompute=recompute)
        except Exception as error:  # noqa: BLE001 - becomes the error of an operation
            found = error
        else:
            return None
        # Freed now, so that the next attempt can use this memory.
        forget_frames(found)
        if self._context.device.type == "cuda":
            torch.cuda.empty_cache()
        return found
