"""Decoding a step ahead, with steps that a CPU computes: nothing but the order of work changes."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.unit.engine.sampler import kit
from tinkex.engine.backends.torch.cross_entropy import normalizers
from tinkex.engine.backends.torch.pick import Draw, pick
from tinkex.engine.sampler import sampler as module
from tinkex.engine.sampler.batcher import Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.sampler import Sampler
    from tinkex.engine.sampler.async_decode import DecodeRow
    from tinkex.engine.sampler.request import SampleRun
    from tinkex.engine.sampler.runner import Runner

SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class CpuStep:
    """What a device would still be busy with."""

    steps: CpuSteps
    tokens: list[int]
    logprobs: list[float]
    error: Exception | None = None

    @property
    def logits_BV(self) -> Tensor:
        return self.steps.logits_BV

    def wait(self) -> tuple[list[int], list[float]]:
        if self.error is not None:
            raise self.error
        return self.tokens, self.logprobs


class CpuSteps:
    """Steps as a device runs them: in the order in which they began, unknown until waited for."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.followed = 0
        self.idle_rows = 0
        self.error: Exception | None = None
        self.logits_BV = torch.empty(0)
        """Those of the last step alone, as on a device."""

    def size(self, count: int) -> int:
        return next(size for size in SIZES if size >= count)

    def start(self, rows: Sequence[DecodeRow], after: CpuStep | None = None) -> CpuStep:
        assert [row.version for row in rows] == sorted(row.version for row in rows)
        self.followed += after is not None
        self.idle_rows += sum(row.piece is None for row in rows)
        pieces: dict[int, Piece] = {}
        for number, row in enumerate(rows):
            if row.piece is None:
                continue
            known = row.piece.sequence
            drawn = [] if after is None else [after.tokens[number]]
            sequence = replace(known, tokens=[*known.tokens, *drawn], blocks=list(known.blocks))
            pieces[number] = Piece(sequence, row.piece.start, row.piece.stop)
            assert pieces[number].reaches_end
        done = self._runner.run(list(pieces.values()))
        place = {piece.sequence: row for piece, row in zip(done.pieces, done.starts, strict=True)}
        tokens, logprobs = [0] * len(rows), [0.0] * len(rows)
        self.logits_BV = torch.zeros(len(rows), kit.tiny().config.vocab_size)
        for number, piece in pieces.items():
            logits_1V = self._runner.logits(
                done.h_TD, [place[piece.sequence]], [piece.sequence.version]
            )
            draw = Draw(rows[number].temperature, -1, 1.0, rows[number].uniform)
            token = int(pick(logits_1V, [draw])[0])
            self.logits_BV[number] = logits_1V[0]
            tokens[number] = token
            logprobs[number] = float(logits_1V[0, token] - normalizers(logits_1V)[0])
        return CpuStep(self, tokens, logprobs, self.error)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[CpuSteps]:
    """Every sampler made from here on decodes in steps; what runs them, sampler by sampler."""
    made: list[CpuSteps] = []
    plain = module._runner

    def with_steps(*args: Any) -> tuple[Runner, CpuSteps]:
        runner, _ = plain(*args)
        made.append(CpuSteps(runner))
        return runner, made[-1]

    monkeypatch.setattr(module, "_runner", with_steps)
    return made


def _ops(seed: int, count: int) -> list[Any]:
    chance = random.Random(seed)
    ops: list[Any] = []
    for number in range(count):
        params: dict[str, Any] = {
            "max_tokens": chance.randint(1, 24),
            "temperature": chance.choice([0.0, 1.0, 1.0, 1.5]),
            "seed": number,
        }
        if chance.random() < 0.5:  # most likely one of the first tokens, so it ends early
            params["stop"] = list(range(chance.randint(0, 100)))
        if chance.random() < 0.25:
            params["top_k"] = 5
        extra = {"prompt_logprobs": True} if chance.random() < 0.2 else None
        prompt = kit.text(chance.randint(1, 12), number % 3)
        samples = chance.choice([1, 1, 3])
        ops.append(kit.op(prompt, num_samples=samples, op_id=f"{number}", extra=extra, **params))
    return ops


def _all(target: Sampler, ops: Sequence[Any], seed: int) -> list[Any]:
    """Run all; some join while others run."""
    chance = random.Random(seed)
    runs: list[Any] = []
    left = list(ops)
    while left or not target.idle:
        while left and (target.idle or chance.random() < 0.2):
            runs.append(target.submit(left.pop(0)))
        target.step()
        target.check()
    return [kit.answer(run).response for run in runs]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cache_tokens", [4096, 96])
def test_results_are_those_of_plain_passes(
    steps: list[CpuSteps], monkeypatch: pytest.MonkeyPatch, seed: int, cache_tokens: int
) -> None:
    ops = _ops(seed, 30)
    ahead = kit.sampler(cache_tokens=cache_tokens, max_sequences=8)
    found = _all(ahead, ops, seed)
    assert steps[0].followed > 20
    assert steps[0].idle_rows > 0
    monkeypatch.undo()
    plain = _all(kit.sampler(cache_tokens=cache_tokens, max_sequences=8), ops, seed)
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.prompt_logprobs == theirs.prompt_logprobs
        for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
            assert (mine.tokens, mine.stop_reason) == (other.tokens, other.stop_reason)
            assert mine.logprobs == other.logprobs


def _begun(target: Sampler, count: int) -> list[SampleRun]:
    """Requests for twenty tokens, a few steps on their way."""
    runs = [target.submit(kit.op(kit.text(5, n), max_tokens=20)) for n in range(count)]
    for _ in range(4):
        target.step()
    return runs


def test_cancelling_a_request_affects_no_other(steps: list[CpuSteps]) -> None:
    target = kit.sampler()
    lost, kept = _begun(target, 2)
    target.cancel(lost)
    target.check()
    kit.drive(target)
    assert lost.cancelled
    alone = kit.sample(kit.sampler(), kit.op(kit.text(5, 1), max_tokens=20))
    assert kit.tokens(kit.answer(kept)) == kit.tokens(alone)
    assert steps[0].followed > 0


def test_a_step_that_was_started_for_an_ended_request_is_dropped(steps: list[CpuSteps]) -> None:
    target = kit.sampler()
    (run,) = _begun(target, 1)
    target.cancel(run)
    assert target.idle
    target.check()
    again = kit.sample(target, kit.op(kit.text(5), max_tokens=20))
    assert len(kit.tokens(again)[0]) == 20
    assert steps[0].followed > 0


def test_a_step_that_fails_fails_its_requests_alone(steps: list[CpuSteps]) -> None:
    target = kit.sampler()
    (lost,) = _begun(target, 1)
    steps[0].error = RuntimeError("the device is gone")
    kit.drive(target)
    assert "the device is gone" in str(lost.error)
    steps[0].error = None
    assert len(kit.tokens(kit.sample(target, kit.op(kit.text(5), max_tokens=9)))[0]) == 9
