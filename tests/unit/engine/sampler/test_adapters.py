"""Several versions of the weights in one pass, and weights that go wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.unit.engine.projections import base_projections
from tests.unit.engine.sampler.kit import (
    BaseOnly,
    answer,
    drive,
    logits,
    op,
    sample,
    sampler,
    text,
    tiny,
    tokens,
)
from tinkex.engine.attention.packed import PackedAttention
from tinkex.engine.lora import Segment, Targets, adapted_projections, initial, sweep
from tinkex.engine.sampler import LoraAdapters
from tinkex.types import LoraConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.decoder import Project
    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.sampler import Adapters, VersionRows

TOLERANCE = 1e-5


class LowRank:
    """A plain stand-in for LoRA: every version but "base" adds its own B·A to every projection."""

    def __init__(self, ranks: dict[str, int]) -> None:
        self._ranks = ranks
        self._made: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self._base = base_projections(tiny())

    def project(self, segments: Sequence[VersionRows]) -> Project:
        for segment in segments:
            if segment.version not in self._ranks:
                raise LookupError(f"no weights called {segment.version}")

        def project(layer: int, names: Any, x_TI: Tensor) -> tuple[Tensor, ...]:
            outputs = self._base(layer, names, x_TI)
            for name, out in zip(names, outputs, strict=True):
                for s in segments:
                    shape = (out.shape[1], x_TI.shape[1])
                    out[s.start : s.stop] += self._delta(
                        s.version, f"{layer}{name}", shape, x_TI[s.start : s.stop]
                    )
            return outputs

        return project

    def logits(self, h_RD: Tensor, segments: Sequence[VersionRows]) -> Tensor:
        unembed_VD = tiny().unembed_VD
        out = F.linear(h_RD, unembed_VD)
        for s in segments:
            rows = h_RD[s.start : s.stop]
            out[s.start : s.stop] += self._delta(
                s.version, "unembed", tuple(unembed_VD.shape), rows
            )
        return out

    def _delta(self, version: str, name: str, shape: tuple[int, ...], x: Tensor) -> Tensor | float:
        if self._ranks[version] == 0:
            return 0.0
        a, b = self._factors(version, name, shape)
        return 0.3 * (x @ a.T @ b.T)

    def _factors(self, version: str, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if (version, name) not in self._made:
            rank = self._ranks[version]
            seed = int.from_bytes((version + name).encode(), "little") % 2**31
            generator = torch.Generator().manual_seed(seed)
            a = torch.randn(rank, shape[1], generator=generator) / shape[1] ** 0.5
            b = torch.randn(shape[0], rank, generator=generator) / rank**0.5
            self._made[version, name] = (a, b)
        return self._made[version, name]


RANKS = {"base": 0, "v1": 1, "v2": 8, "v3": 5}


@pytest.fixture
def adapters() -> LowRank:
    return LowRank(RANKS)


def test_many_versions_in_one_batch_answer_as_each_would_alone(adapters: LowRank) -> None:
    def one(i: int) -> Any:
        return op(text(6 + 3 * i), op_id=str(i), temperature=1.0, seed=i, max_tokens=12)

    versions = ["v2", "base", "v1", "v3", "v1", "base", "v2"]
    together = sampler(adapters=adapters, pass_tokens=16, max_sequences=8)
    runs = [together.submit(one(i), version=v) for i, v in enumerate(versions)]
    drive(together)
    for i, (run, version) in enumerate(zip(runs, versions, strict=True)):
        alone = sample(sampler(adapters=adapters), one(i), version=version)
        assert tokens(answer(run)) == tokens(alone)
        left = answer(run).response.sequences[0].logprobs_np
        right = alone.response.sequences[0].logprobs_np
        assert np.abs(left - right).max() < TOLERANCE


def test_versions_give_their_own_text_and_their_own_logprobs(adapters: LowRank) -> None:
    target = sampler(adapters=adapters)
    found = {}
    for version in RANKS:
        extra = {"prompt_logprobs": True}
        found[version] = sample(target, op(text(14), extra=extra), version=version).response
    assert len({tuple(r.sequences[0].tokens) for r in found.values()}) == len(RANKS)
    plain = torch.log_softmax(logits(text(14)), -1)[torch.arange(13), torch.tensor(text(14)[1:])]
    scores = found["base"].prompt_logprobs_np
    assert scores is not None
    assert np.abs(scores[1:] - plain.numpy()).max() < TOLERANCE
    others = found["v1"].prompt_logprobs_np
    assert others is not None
    assert np.abs(scores[1:] - others[1:]).max() > 0.1


def lora(seed: int, **config: Any) -> LoraWeights:
    """A trained-looking adapter: B is no longer zero."""
    weights = initial(tiny().config, LoraConfig(**config), seed)
    noise_P = torch.randn(weights.flat_P.shape, generator=torch.Generator().manual_seed(seed))
    # The scale is 32 / rank; without this a small rank would drown the base model.
    weights.flat_P.add_(noise_P, alpha=0.1 * (weights.lora.rank / 32) ** 0.5)
    return weights


VERSIONS: dict[str, LoraWeights | None] = {
    "base": None,
    "small": lora(1, rank=1),
    "odd": lora(2, rank=5, train_unembed=False),
    "mlp": lora(3, rank=16, train_attn=False, train_unembed=False),
}


def test_lora_versions_of_any_rank_and_targets_sample_together_as_alone() -> None:
    adapters = LoraAdapters(tiny(), VERSIONS.__getitem__)
    together = sampler(adapters=adapters)
    runs = {
        version: together.submit(op(text(11), op_id=version, max_tokens=10), version=version)
        for version in (*VERSIONS, "unknown")
    }
    drive(together)
    assert runs.pop("unknown").error is not None
    assert len({tuple(tokens(answer(run))[0]) for run in runs.values()}) == len(VERSIONS)
    for version, run in runs.items():
        alone = sample(sampler(adapters=adapters), op(text(11), max_tokens=10), version=version)
        assert tokens(answer(run)) == tokens(alone)


@pytest.mark.parametrize("version", VERSIONS)
def test_sampled_logprobs_are_those_of_the_trainers_own_layers(version: str) -> None:
    weights = VERSIONS[version]
    adapters = LoraAdapters(tiny(), VERSIONS.__getitem__)
    found = sample(
        sampler(adapters=adapters),
        op(text(11), temperature=1.0, seed=1, max_tokens=30),
        version=version,
    ).response.sequences[0]
    ids = text(11) + found.tokens
    with torch.no_grad():
        segments = [Segment(0, len(ids), weights)]
        h_TD = tiny().hidden(
            torch.tensor(ids),
            torch.arange(len(ids)),
            PackedAttention([len(ids)]),
            adapted_projections(tiny(), segments),
        )
        targets = Targets(torch.tensor([*ids[1:], 0]), [1] * len(ids))
        swept = sweep(h_TD, tiny(), segments, targets)
    trained = swept.logprobs_M[10:-1].numpy()
    assert np.abs(trained - found.logprobs_np).max() < TOLERANCE


def test_a_version_that_cannot_be_used_fails_its_own_request_only(adapters: LowRank) -> None:
    target = sampler(adapters=adapters)
    good = target.submit(op(text(9), op_id="good"), version="v1")
    lost = target.submit(op(text(9), op_id="lost"), version="gone")
    drive(target)
    assert lost.error is not None
    assert "no weights called gone" in lost.error.message
    assert tokens(answer(good)) == tokens(
        sample(sampler(adapters=adapters), op(text(9)), version="v1")
    )


class Diverged(BaseOnly):
    """Version "nan" produces NaN everywhere, keys and values included."""

    def project(self, segments: Sequence[VersionRows]) -> Project:
        def project(layer: int, names: Any, x_TI: Tensor) -> tuple[Tensor, ...]:
            outputs = inner(layer, names, x_TI)
            for out in outputs:
                for s in segments:
                    if s.version == "nan":
                        out[s.start : s.stop] = torch.nan
            return outputs

        inner = super().project(segments)
        return project


def diverged(version: str) -> LoraWeights | None:
    """The same as an adapter."""
    if version != "nan":
        return None
    weights = lora(1, rank=4)
    weights.flat_P.fill_(torch.nan)
    return weights


@pytest.mark.parametrize("adapters", [Diverged(tiny()), LoraAdapters(tiny(), diverged)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("extra", [{}, {"prompt_logprobs": True}])
def test_weights_that_are_not_finite_fail_their_request_and_leave_nothing_behind(
    adapters: Adapters, temperature: float, extra: dict[str, Any]
) -> None:
    target = sampler(adapters=adapters, cache_tokens=48)
    good = target.submit(op(text(9), op_id="good", max_tokens=20))
    wrong = op(text(20, 2), op_id="bad", num_samples=2, extra=extra, temperature=temperature)
    bad = target.submit(wrong, version="nan")
    drive(target)
    assert bad.error is not None
    assert "not finite" in bad.error.message
    assert not bad.error.retryable
    reference = tokens(sample(sampler(), op(text(9), max_tokens=20)))
    assert tokens(answer(good)) == reference
    # The next request reuses the blocks that held NaN.
    assert tokens(sample(target, op(text(9), max_tokens=20))) == reference
    whole = sample(target, op(text(40), max_tokens=3))
    assert tokens(whole) == tokens(sample(sampler(), op(text(40), max_tokens=3)))


def test_numbers_of_a_neighbour_that_still_runs_are_never_read() -> None:
    target = sampler(adapters=Diverged(tiny()), pass_tokens=24, max_sequences=8)
    first = target.submit(op([1, 2], op_id="first"))
    # Contexts of three and four blocks are attended together; the shorter one is filled up.
    good = [target.submit(op(text(n, n), op_id=str(n), max_tokens=12)) for n in (9, 14)]
    target.step()
    target.step()
    target.cancel(first)
    bad = target.submit(op(text(100, 2), op_id="bad"), version="nan")
    target.step()
    assert bad.sequences[0].blocks[0] == 0  # where a careless filling would point
    drive(target)
    assert bad.error is not None
    for n, run in zip((9, 14), good, strict=True):
        alone = sample(sampler(), op(text(n, n), max_tokens=12))
        assert tokens(answer(run)) == tokens(alone)


class OutOfMemory(BaseOnly):
    """Fails whenever a pass has more than a few tokens, as a full device would."""

    def project(self, segments: Sequence[VersionRows]) -> Project:
        if segments[-1].stop > 20:
            raise MemoryError("no room for activations")
        return super().project(segments)


def test_a_pass_that_does_not_fit_is_split_and_only_what_never_fits_fails() -> None:
    target = sampler(adapters=OutOfMemory(tiny()))
    small = [target.submit(op(text(15, i), op_id=str(i))) for i in range(3)]
    large = target.submit(op(text(60), op_id="large"))
    drive(target)
    for i, run in enumerate(small):
        assert tokens(answer(run)) == tokens(sample(sampler(), op(text(15, i))))
    assert large.error is not None
    assert "no room for activations" in large.error.message
    assert large.error.retryable
    assert target.free_tokens == target.cache_tokens


class HeadFails(BaseOnly):
    def logits(self, h_RD: Tensor, segments: Sequence[VersionRows]) -> Tensor:
        raise MemoryError("no room for logits")


def test_a_failing_head_ends_in_an_error_and_not_in_a_hang() -> None:
    target = sampler(adapters=HeadFails(tiny()))
    run = target.submit(op(text(9)))
    assert drive(target) == [run]
    assert run.error is not None
    assert "no room for logits" in run.error.message


class Watched(BaseOnly):
    """Notes how many rows of logits were asked for at a time."""

    def __init__(self) -> None:
        super().__init__(tiny())
        self.rows: list[int] = []

    def logits(self, h_RD: Tensor, segments: Sequence[VersionRows]) -> Tensor:
        self.rows.append(len(h_RD))
        return super().logits(h_RD, segments)


def test_logits_of_a_whole_prompt_never_exist() -> None:
    watched = Watched()
    target = sampler(adapters=watched, logit_rows=4)
    sample(target, op(text(30), num_samples=9, extra={"prompt_logprobs": True}))
    assert max(watched.rows) == 4


def test_rows_without_a_request_get_no_logits() -> None:
    watched = Watched()
    sample(sampler(adapters=watched), op(text(30), max_tokens=5))
    assert sum(watched.rows) == 5
