"""What every `Engine` must do; a subclass says how one is made.

The engine may be shared by the tests of a class, so each test names its adapters, snapshots and
locations after itself. Where the engines rightly differ, nothing is asked for:

- `FakeEngine` replaces an adapter that is created twice; the others refuse the second.
- Words differ. What is asked for is the category, the id or path, and which operation failed.
- `FakeEngine` computes each operation by itself. The others compute a batch together, so numbers
  of one operation in different company are compared with a tolerance: 1e-5 in float32.
"""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from tinkex.engine.protocol import (
    GAUGES,
    AdapterSpec,
    OptimOp,
    OptimResult,
    SampleOp,
    TrainOp,
    TrainResult,
    Weights,
)
from tinkex.errors import RequestFailedError
from tinkex.types import (
    AdamOptimizerConfig,
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    SamplingParams,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tinkex.engine.protocol import Best, Engine, Layout, SampleResult

MODEL = "tinkex/tiny"
TEXT = list(b"a stitch in time saves nine")
STEP = AdamParams(learning_rate=1e-2)
LAYOUTS: Final[tuple[Layout, ...]] = ("peft", "tinker")
OUTSIDE = 1_000_000
"""No token of any model."""


def spec(model_id: str, rank: int = 4, base_model: str = MODEL) -> AdapterSpec:
    return AdapterSpec(
        model_id=model_id,
        base_model=base_model,
        lora=LoraConfig(rank=rank, seed=1),
        optimizer=AdamOptimizerConfig(),
    )


def datum(tokens: Sequence[int] = TEXT, **inputs: Any) -> Datum:
    weights = [1.0] * (len(tokens) - 1)
    return Datum(
        ModelInput.from_ints(list(tokens[:-1])),
        {"target_tokens": list(tokens[1:]), "weights": weights, **inputs},
    )


def train_op(model_id: str, *data: Datum, op_id: str = "t", **options: Any) -> TrainOp:
    return TrainOp(
        op_id=op_id,
        model_id=model_id,
        data=data or [datum()],
        **{"loss_fn": "cross_entropy", **options},
    )


def optim_op(model_id: str, op_id: str = "o") -> OptimOp:
    return OptimOp(op_id=op_id, model_id=model_id, params=STEP)


def sample_op(weights: Weights, samples: int = 1, **options: Any) -> SampleOp:
    fields: dict[str, Any] = {
        "op_id": "s",
        "prompt": ModelInput.from_ints(TEXT[:5]),
        "params": SamplingParams(max_tokens=6, seed=3, stop=[]),
        **options,
    }
    return SampleOp(weights=weights, sequence_ids=[f"q{i}" for i in range(samples)], **fields)


def tensor_names(content: bytes) -> set[str]:
    """The tensors of a safetensors file, read without the library."""
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]).keys() - {"__metadata__"}


def both(module: str) -> set[str]:
    """The two tensors of an adapted module."""
    return {f"{module}.lora_{factor}.weight" for factor in "AB"}


def base() -> Weights:
    return Weights(base_model=MODEL)


def published(snapshot: str) -> Weights:
    return Weights(base_model=MODEL, snapshot=snapshot)


def saved(location: str) -> Weights:
    return Weights(base_model=MODEL, location=location)


def tokens_of(result: SampleResult) -> list[list[int]]:
    return [sequence.tokens for sequence in result.response.sequences]


async def step(engine: Engine, model_id: str) -> tuple[float, dict[str, float]]:
    """Train once on `TEXT`: the loss, and the metrics of the step."""
    (trained,) = await engine.train([train_op(model_id)])
    (stepped,) = await engine.optim_step([optim_op(model_id)])
    assert isinstance(trained, TrainResult), trained
    assert isinstance(stepped, OptimResult), stepped
    return trained.output.metrics["loss:sum"], stepped.metrics


async def scores(engine: Engine, weights: Weights) -> list[float | None] | None:
    """The log-probabilities that weights give to `TEXT`."""
    op = sample_op(
        weights,
        prompt=ModelInput.from_ints(TEXT),
        params=SamplingParams(max_tokens=1, seed=1),
        prompt_logprobs=True,
    )
    return (await engine.sample(op)).response.prompt_logprobs


async def refusal(call: Awaitable[Any]) -> str:
    """The message of a call that fails as the caller's fault."""
    with pytest.raises(RequestFailedError) as caught:
        await call
    assert caught.value.category == "user"
    assert not caught.value.retryable
    return caught.value.message


def failed(answer: object) -> str:
    """The same of one answer in a batch."""
    assert isinstance(answer, RequestFailedError)
    assert answer.category == "user"
    return answer.message


class EngineSuite:
    """Inherit this and define `open_engine`, or `engine` itself to share one."""

    pytestmark = pytest.mark.anyio

    def open_engine(self, tmp_path: Any) -> AbstractAsyncContextManager[Engine]:
        """A fresh engine that serves `tinkex/tiny`, and runs one sequence at a time."""
        raise NotImplementedError

    @pytest.fixture
    async def engine(self, tmp_path: Any) -> AsyncIterator[Engine]:
        async with self.open_engine(tmp_path) as engine:
            yield engine

    @pytest.fixture
    def name(self, request: pytest.FixtureRequest) -> str:
        """What this test calls its things."""
        return request.node.name

    # -- training -----------------------------------------------------------------------------

    async def test_it_lists_its_base_models(self, engine: Engine) -> None:
        found = {model.name: model for model in engine.models}
        assert found[MODEL].max_context_length > 0
        assert found[MODEL].vocab_size > max(TEXT)
        assert list(engine.models) == list(engine.models)

    async def test_training_lowers_the_loss(self, engine: Engine, name: str) -> None:
        await engine.create_adapter(spec(name))
        losses = [(await step(engine, name))[0] for _ in range(4)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0]

    @pytest.mark.req("B18")
    async def test_results_say_what_was_computed_and_what_the_step_did(
        self, engine: Engine, name: str
    ) -> None:
        await engine.create_adapter(spec(name))
        (trained,) = await engine.train([train_op(name, datum(), datum(TEXT[:9]))])
        assert isinstance(trained, TrainResult)
        lengths = [len(output["logprobs"].to_numpy()) for output in trained.output.loss_fn_outputs]
        assert lengths == [len(TEXT) - 1, 8]
        assert trained.tokens == sum(lengths)
        assert trained.device_s > 0
        (stepped,) = await engine.optim_step([optim_op(name)])
        assert isinstance(stepped, OptimResult)
        metrics = stepped.metrics
        assert metrics.keys() >= {"grad_norm", "grad_norm_clipped", "update_norm", "learning_rate"}
        assert metrics["step"] == 1
        assert metrics["grad_norm"] > 0

    async def test_forward_leaves_no_gradient_and_backward_calls_add_up(
        self, engine: Engine, name: str
    ) -> None:
        norms: list[float] = []
        for backward, calls in ((False, 1), (True, 1), (True, 2)):
            model_id = f"{name}-{backward}-{calls}"
            await engine.create_adapter(spec(model_id))
            for _ in range(calls):
                await engine.train([train_op(model_id, backward=backward)])
            (stepped,) = await engine.optim_step([optim_op(model_id)])
            assert isinstance(stepped, OptimResult)
            norms.append(stepped.metrics["grad_norm"])
        assert norms[0] == 0
        assert norms[1] > 0
        assert norms[2] == pytest.approx(2 * norms[1], rel=1e-5)

    async def test_a_batch_answers_in_order_and_a_bad_operation_leaves_the_others_alone(
        self, engine: Engine, name: str
    ) -> None:
        models = [f"{name}-{i}" for i in range(3)]
        for model_id in models:
            await engine.create_adapter(spec(model_id))
        texts = [TEXT, TEXT[:20], TEXT[:7]]
        alone = [
            (await engine.train([train_op(m, datum(text), backward=False)]))[0]
            for m, text in zip(models, texts, strict=True)
        ]
        answers = await engine.train(
            [
                train_op(models[0], datum(texts[0])),
                train_op("nobody", datum()),
                train_op(models[1], datum(texts[1])),
                train_op(models[1], datum(), datum([1, OUTSIDE, 2])),
                train_op(models[2], datum(texts[2])),
            ]
        )
        assert "'nobody'" in failed(answers[1])
        assert "data[1]" in failed(answers[3])
        for mine, before in zip((answers[0], answers[2], answers[4]), alone, strict=True):
            assert isinstance(mine, TrainResult)
            assert isinstance(before, TrainResult)
            loss = before.output.metrics["loss:sum"]
            assert mine.output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)

    async def test_a_refused_operation_adds_nothing_to_the_gradient(
        self, engine: Engine, name: str
    ) -> None:
        norms: list[float] = []
        for bad in ([], [train_op(f"{name}-1", datum(), datum([1, OUTSIDE, 2]))]):
            model_id = f"{name}-{len(bad)}"
            await engine.create_adapter(spec(model_id))
            await engine.train([train_op(model_id)])
            for op in bad:
                failed((await engine.train([op]))[0])
            (stepped,) = await engine.optim_step([optim_op(model_id)])
            assert isinstance(stepped, OptimResult)
            norms.append(stepped.metrics["grad_norm"])
        assert norms[0] == norms[1]

    async def test_steps_of_a_batch_answer_in_order(self, engine: Engine, name: str) -> None:
        for i in range(2):
            await engine.create_adapter(spec(f"{name}-{i}"))
        await step(engine, f"{name}-1")
        ops = [optim_op(f"{name}-0"), optim_op("nobody"), optim_op(f"{name}-1")]
        first, wrong, second = await engine.optim_step(ops)
        assert isinstance(first, OptimResult)
        assert isinstance(second, OptimResult)
        assert "'nobody'" in failed(wrong)
        assert (first.metrics["step"], second.metrics["step"]) == (1, 2)

    async def test_different_models_are_trained_at_the_same_time(
        self, engine: Engine, name: str
    ) -> None:
        models = [f"{name}-{i}" for i in range(4)]

        async def run(model_id: str) -> float:
            await engine.create_adapter(spec(model_id))
            await step(engine, model_id)
            return (await step(engine, model_id))[0]

        losses = await asyncio.gather(*(run(model_id) for model_id in models))
        # The same seed and data: the same run, whatever else was computed with it.
        assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)

    # -- state --------------------------------------------------------------------------------

    @pytest.mark.req("B16")
    async def test_a_loaded_model_goes_on_as_the_saved_one_bit_for_bit(
        self, engine: Engine, name: str
    ) -> None:
        await engine.create_adapter(spec(name))
        await step(engine, name)
        stored = await engine.save_adapter(name, f"{name}/one", optimizer=True)
        assert stored.has_optimizer
        assert stored.size_bytes > 0
        await engine.create_adapter(spec(f"{name}-again"))
        await engine.load_adapter(f"{name}-again", f"{name}/one", optimizer=True)
        unbroken = [await step(engine, name) for _ in range(2)]
        assert [await step(engine, f"{name}-again") for _ in range(2)] == unbroken

    @pytest.mark.req("B16")
    async def test_a_model_saved_while_it_gathers_a_gradient_goes_on_with_that_gradient(
        self, engine: Engine, name: str
    ) -> None:
        await engine.create_adapter(spec(name))
        await step(engine, name)
        await engine.train([train_op(name, datum(TEXT[:9]))])
        await engine.save_adapter(name, f"{name}/half", optimizer=True)
        await engine.create_adapter(spec(f"{name}-again"))
        await engine.load_adapter(f"{name}-again", f"{name}/half", optimizer=True)
        unbroken = [await step(engine, name) for _ in range(2)]
        assert [await step(engine, f"{name}-again") for _ in range(2)] == unbroken
        # The same without what had been gathered is another run.
        await engine.load_adapter(f"{name}-again", f"{name}/half", optimizer=False)
        assert await step(engine, f"{name}-again") != unbroken[0]

    async def test_loading_weights_alone_starts_the_optimizer_afresh(
        self, engine: Engine, name: str
    ) -> None:
        await engine.create_adapter(spec(name))
        await step(engine, name)
        smaller = await engine.save_adapter(name, f"{name}/weights", optimizer=False)
        assert not smaller.has_optimizer
        loss = (await step(engine, name))[0]
        await engine.create_adapter(spec(f"{name}-again"))
        await engine.load_adapter(f"{name}-again", f"{name}/weights", optimizer=False)
        again, metrics = await step(engine, f"{name}-again")
        assert again == loss
        assert metrics["step"] == 1
        await refusal(engine.load_adapter(name, f"{name}/weights", optimizer=True))

    async def test_an_adapter_of_another_rank_is_not_loaded(
        self, engine: Engine, name: str
    ) -> None:
        await engine.create_adapter(spec(name, rank=4))
        await engine.save_adapter(name, f"{name}/rank-4", optimizer=True)
        await engine.create_adapter(spec(f"{name}-8", rank=8))
        said = await refusal(engine.load_adapter(f"{name}-8", f"{name}/rank-4", optimizer=True))
        assert "rank" in said

    async def test_a_copy_outlives_what_it_was_copied_from(self, engine: Engine, name: str) -> None:
        await engine.create_adapter(spec(name))
        await step(engine, name)
        await engine.save_adapter(name, f"{name}/a", optimizer=True)
        before = await scores(engine, saved(f"{name}/a"))
        await engine.copy_saved(f"{name}/a", f"{name}/b")
        await engine.delete_saved(f"{name}/a")
        await refusal(engine.load_adapter(name, f"{name}/a", optimizer=False))
        await refusal(scores(engine, saved(f"{name}/a")))
        assert await scores(engine, saved(f"{name}/b")) == before
        await engine.load_adapter(name, f"{name}/b", optimizer=True)

    async def test_an_export_has_the_files_of_peft(self, engine: Engine, name: str) -> None:
        await engine.create_adapter(spec(name))
        await engine.save_adapter(name, f"{name}/x", optimizer=False)
        heads: dict[str, set[str]] = {}
        for layout in LAYOUTS:
            files = await engine.export_saved(f"{name}/x", layout)
            assert files.keys() == {"adapter_config.json", "adapter_model.safetensors"}
            config = json.loads(files["adapter_config.json"])
            assert (config["r"], config["lora_alpha"]) == (4, 32)
            names = tensor_names(files["adapter_model.safetensors"])
            assert all(name.startswith("base_model.model.") for name in names)
            heads[layout] = {name for name in names if ".layers." not in name}
        assert heads == {
            "peft": both("base_model.model.lm_head"),
            "tinker": both("base_model.model.model.unembed_tokens"),
        }
        assert await engine.export_saved(f"{name}/x") == await engine.export_saved(
            f"{name}/x", "peft"
        )

    @pytest.mark.parametrize("layout", LAYOUTS)
    async def test_an_export_that_is_imported_computes_the_same(
        self, engine: Engine, name: str, layout: Layout, tmp_path: Path
    ) -> None:
        await engine.create_adapter(spec(name))
        await step(engine, name)
        await engine.save_adapter(name, f"{name}/x", optimizer=True)
        for file, content in (await engine.export_saved(f"{name}/x", layout)).items():
            (tmp_path / file).write_bytes(content)
        imported = await engine.import_saved(MODEL, tmp_path, f"{name}/{layout}")
        assert imported.lora.rank == 4
        assert imported.size_bytes > 0
        before = await scores(engine, saved(f"{name}/x"))
        assert await scores(engine, saved(f"{name}/{layout}")) == pytest.approx(before, abs=1e-5)
        await engine.load_adapter(name, f"{name}/{layout}", optimizer=False)
        await refusal(engine.load_adapter(name, f"{name}/{layout}", optimizer=True))

    async def test_what_is_no_adapter_is_not_imported(
        self, engine: Engine, name: str, tmp_path: Path
    ) -> None:
        await engine.create_adapter(spec(name))
        await engine.save_adapter(name, f"{name}/x", optimizer=False)
        files = await engine.export_saved(f"{name}/x")
        for file, content in files.items():
            (tmp_path / file).write_bytes(content)
        assert "'no-base'" in await refusal(engine.import_saved("no-base", tmp_path, f"{name}/bad"))
        (tmp_path / "adapter_model.safetensors").write_bytes(
            files["adapter_model.safetensors"][:-1]
        )
        assert "is cut off" in await refusal(engine.import_saved(MODEL, tmp_path, f"{name}/bad"))
        await refusal(scores(engine, saved(f"{name}/bad")))

    async def test_unknown_names_are_refused_with_the_name(self, engine: Engine, name: str) -> None:
        await engine.create_adapter(spec(name))
        assert "'no-base'" in await refusal(engine.create_adapter(spec("m", base_model="no-base")))
        for call in (
            engine.save_adapter("nobody", f"{name}/x", optimizer=True),
            engine.publish("nobody", f"{name}-snapshot"),
        ):
            assert "'nobody'" in await refusal(call)
        for call in (
            engine.load_adapter(name, "nowhere", optimizer=False),
            engine.copy_saved("nowhere", f"{name}/x"),
            engine.export_saved("nowhere"),
            engine.save_snapshot("never", f"{name}/x"),
            engine.sample(sample_op(saved("nowhere"))),
            engine.sample(sample_op(published("never"))),
            engine.sample(sample_op(Weights(base_model="no-base"))),
        ):
            await refusal(call)

    async def test_dropping_frees_a_name_and_unknown_names_are_fine(
        self, engine: Engine, name: str
    ) -> None:
        await engine.create_adapter(spec(name))
        await engine.publish(name, f"{name}-snapshot")
        await engine.drop_adapter(name)
        assert repr(name) in failed((await engine.train([train_op(name)]))[0])
        # What was published does not need the adapter.
        await engine.sample(sample_op(published(f"{name}-snapshot")))
        await engine.drop_snapshot(f"{name}-snapshot")
        await refusal(engine.sample(sample_op(published(f"{name}-snapshot"))))
        await engine.drop_adapter(name)
        await engine.drop_snapshot("never")
        await engine.delete_saved("nowhere")

    # -- sampling -----------------------------------------------------------------------------

    async def test_a_snapshot_keeps_its_weights_while_training_goes_on(
        self, engine: Engine, name: str
    ) -> None:
        await engine.create_adapter(spec(name))
        await step(engine, name)
        await engine.publish(name, f"{name}-1")
        before = await scores(engine, published(f"{name}-1"))
        await step(engine, name)
        await engine.publish(name, f"{name}-2")
        assert await scores(engine, published(f"{name}-1")) == before
        assert await scores(engine, published(f"{name}-2")) != before

    async def test_a_saved_adapter_samples_as_the_snapshot_of_the_same_weights(
        self, engine: Engine, name: str
    ) -> None:
        await engine.create_adapter(spec(name))
        await step(engine, name)
        await engine.publish(name, f"{name}-1")
        await engine.save_adapter(name, f"{name}/1", optimizer=False)
        await step(engine, name)
        expected = await scores(engine, published(f"{name}-1"))
        assert await scores(engine, saved(f"{name}/1")) == expected
        assert await scores(engine, base()) != expected

    async def test_a_saved_snapshot_is_what_was_published_and_outlives_it(
        self, engine: Engine, name: str
    ) -> None:
        await engine.create_adapter(spec(name))
        await step(engine, name)
        await engine.publish(name, f"{name}-1")
        await step(engine, name)
        stored = await engine.save_snapshot(f"{name}-1", f"{name}/1")
        assert not stored.has_optimizer
        assert stored.size_bytes > 0
        before = await scores(engine, published(f"{name}-1"))
        await engine.drop_snapshot(f"{name}-1")
        await engine.drop_adapter(name)
        assert await scores(engine, saved(f"{name}/1")) == before
        await engine.create_adapter(spec(f"{name}-again"))
        await engine.load_adapter(f"{name}-again", f"{name}/1", optimizer=False)
        await engine.publish(f"{name}-again", f"{name}-2")
        assert await scores(engine, published(f"{name}-2")) == before
        await refusal(engine.load_adapter(f"{name}-again", f"{name}/1", optimizer=True))

    async def test_streamed_tokens_are_those_of_the_result(self, engine: Engine) -> None:
        streamed: dict[int, list[tuple[int, float]]] = {}

        def on_token(sample: int, token: int, logprob: float, best: Best | None) -> None:
            assert best is None
            streamed.setdefault(sample, []).append((token, logprob))

        result = await engine.sample(sample_op(base(), samples=3), on_token)
        sequences = result.response.sequences
        assert [sequence.sequence_id for sequence in sequences] == ["q0", "q1", "q2"]
        assert result.generated_tokens == sum(len(sequence.tokens) for sequence in sequences)
        assert result.prompt_tokens == 5
        for i, sequence in enumerate(sequences):
            assert [token for token, _ in streamed[i]] == sequence.tokens
            # The result carries float32, the stream what they were made from.
            logprobs = [logprob for _, logprob in streamed[i]]
            assert sequence.logprobs == pytest.approx(logprobs, rel=1e-6)

    async def test_streamed_tokens_bring_the_likeliest_ones_when_asked(
        self, engine: Engine
    ) -> None:
        streamed: dict[int, list[list[int]]] = {}

        def on_token(sample: int, token: int, logprob: float, best: Best | None) -> None:
            assert best is not None
            streamed.setdefault(sample, []).append(list(best[0]))

        op = replace(sample_op(base(), samples=2), topk_sample_logprobs=3)
        for i, sequence in enumerate((await engine.sample(op, on_token)).response.sequences):
            rows = sequence.topk_logprobs or []
            assert streamed[i] == [[token for token, _ in row or ()] for row in rows]
            assert len(streamed[i]) == len(sequence.tokens)

    @pytest.mark.req("B15")
    async def test_the_same_seed_gives_the_same_tokens_whatever_else_runs(
        self, engine: Engine
    ) -> None:
        op = sample_op(base(), samples=2)
        first = tokens_of(await engine.sample(op))
        assert first[0] != first[1]
        other = sample_op(base(), samples=2, params=SamplingParams(max_tokens=6, seed=4, stop=[]))
        results = await asyncio.gather(*(engine.sample(each) for each in (other, op, other, op)))
        found = [tokens_of(result) for result in results]
        assert found[1] == found[3] == first
        assert found[0] == found[2] != first
        greedy = sample_op(base(), 2, params=SamplingParams(max_tokens=6, temperature=0.0, stop=[]))
        best = tokens_of(await engine.sample(greedy))
        assert best[0] == best[1]

    async def test_a_cached_prompt_is_found_only_with_the_same_salt(self, engine: Engine) -> None:
        prompt = ModelInput.from_ints([(7 * i + i * i) % 251 for i in range(40)])
        hits = [
            (await engine.sample(sample_op(base(), prompt=prompt, cache_salt=salt))).cached_tokens
            for salt in ("one", "two", "one")
        ]
        assert hits[:2] == [0, 0]
        assert hits[2] > 0

    # Without its place back the second sample would wait for a hundred thousand tokens.
    async def test_a_cancelled_sample_gives_its_place_back(self, engine: Engine) -> None:
        heard = asyncio.Event()
        long = SamplingParams(max_tokens=7000, seed=1, stop=[])
        op = sample_op(base(), samples=16, params=long)
        waiting = asyncio.ensure_future(engine.sample(op, lambda *_: heard.set()))
        await heard.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        result = await engine.sample(sample_op(base()))
        assert result.generated_tokens == 6

    # -- numbers ------------------------------------------------------------------------------

    async def test_stats_count_what_was_done_and_say_what_is_held(
        self, engine: Engine, name: str
    ) -> None:
        before = await engine.stats()
        await engine.create_adapter(spec(name))
        await engine.train([train_op(name), train_op(name, backward=False), train_op("nobody")])
        await engine.publish(name, f"{name}-1")
        result = await engine.sample(sample_op(published(f"{name}-1"), samples=2))
        after = await engine.stats()
        assert before.keys() >= set(GAUGES)
        gained = {key: after[key] - before[key] for key in GAUGES}
        assert gained.pop("kv_blocks_used") >= 0
        assert gained.pop("adapters_resident_bytes") > 0
        assert gained == {
            "adapters_resident": 2,
            "adapters_parked": 0,
            "adapters_parked_bytes": 0,
            "adapters_capacity_bytes": 0,
            "samples_running": 0,
            "kv_blocks_total": 0,
            "tokens_trained_total": len(TEXT) - 1,
            "tokens_scored_total": len(TEXT) - 1,
            "tokens_prompt_total": 5,
            "tokens_generated_total": result.generated_tokens,
        }

    async def test_stats_say_how_many_samples_run(self, engine: Engine) -> None:
        heard = asyncio.Event()
        op = sample_op(base(), params=SamplingParams(max_tokens=7000, seed=1, stop=[]))
        waiting = asyncio.ensure_future(engine.sample(op, lambda *_: heard.set()))
        await heard.wait()
        running = (await engine.stats())["samples_running"]
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert running == 1

    # -- bad input ----------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("data", "options", "said"),
        [
            ([], {}, "data"),
            ([datum(), datum([1, OUTSIDE, 2])], {}, "data[1]"),
            ([datum(weights=[1.0, 1.0])], {}, "data[0]"),
            ([Datum(ModelInput.from_ints([1, 2]))], {}, 'data[0].loss_fn_inputs["target_tokens"]'),
            ([datum()], {"loss_fn": "no_such_loss"}, "no_such_loss"),
        ],
        ids=["nothing", "token outside", "lengths differ", "no targets", "unknown loss"],
    )
    async def test_bad_data_is_refused_by_its_path(
        self, engine: Engine, name: str, data: list[Datum], options: dict[str, Any], said: str
    ) -> None:
        await engine.create_adapter(spec(name))
        op = TrainOp(op_id="t", model_id=name, data=data, **{"loss_fn": "cross_entropy", **options})
        assert said in failed((await engine.train([op]))[0])

    @pytest.mark.parametrize(
        "prompt", [[], [1, OUTSIDE], [1] * 20_000], ids=["empty", "token outside", "too long"]
    )
    async def test_a_bad_prompt_is_refused_by_its_path(
        self, engine: Engine, prompt: list[int]
    ) -> None:
        op = sample_op(base(), prompt=ModelInput.from_ints(prompt))
        assert "prompt" in await refusal(engine.sample(op))
