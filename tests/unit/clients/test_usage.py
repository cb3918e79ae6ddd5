"""Every result says what it used, and the session adds it up."""

from __future__ import annotations

import pytest

from tests.unit.clients.world import MODEL, World, datum
from tinkex import AdamParams, ModelInput, SamplingParams
from tinkex.testing import Delays, faults

pytestmark = pytest.mark.req("B17")

PROMPT = ModelInput.from_ints([1, 2, 3, 4, 5])
PARAMS = SamplingParams(max_tokens=4, seed=1)


def test_training_results_carry_tokens_queue_time_and_device_seconds():
    async def scenario(world: World) -> None:
        world.server.engine.delays = Delays(train_s=2.0)
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            future = training.forward_backward([datum(6), datum(3)], "cross_entropy")
            assert future.usage is None
            output = await future
            assert output.usage is not None
            assert future.usage == output.usage
            assert output.usage.trained_tokens == 9
            assert output.usage.prompt_tokens == 0
            assert output.usage.device_s == pytest.approx(2.0, abs=0.1)
            assert output.usage.queue_s is not None
            scored = await training.forward([datum(6)], "cross_entropy")
            assert scored.usage is not None
            assert (scored.usage.prompt_tokens, scored.usage.trained_tokens) == (6, 0)
            step = await training.optim_step(AdamParams())
            saved = await training.save_state("a")
            assert step.usage is not None
            assert saved.usage is not None
            total = service.usage()
            assert (total.trained_tokens, total.prompt_tokens) == (9, 6)
            assert total.device_s == pytest.approx(4.0, abs=0.2)

    World().run(scenario)


def test_a_chunked_call_counts_each_token_once():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            data = [datum(2 + i) for i in range(5)]
            output = await training.forward_backward(data, "cross_entropy")
            assert output.usage is not None
            assert output.usage.trained_tokens == 2 + 3 + 4 + 5 + 6
            assert service.usage().trained_tokens == 20

    World({"fwdbwd_max_chunk_len": 2}).run(scenario)


@pytest.mark.parametrize("feed", [True, False])
def test_samples_carry_prompt_cached_and_generated_tokens(feed: bool):
    async def scenario(world: World) -> None:
        async with world.service() as service:
            sampler = await service.create_sampling_client_async(base_model=MODEL)
            first = await sampler.sample(PROMPT, 3, PARAMS)
            assert first.usage is not None
            assert first.usage.prompt_tokens == 5
            assert first.usage.generated_tokens == sum(len(s.tokens) for s in first.sequences)
            assert first.usage.cached_tokens == 0
            again = await sampler.sample(PROMPT, 1, PARAMS)
            assert again.usage is not None
            assert again.usage.cached_tokens == 4
            total = service.usage()
            assert total.prompt_tokens == 10
            assert total.generated_tokens == (
                first.usage.generated_tokens + again.usage.generated_tokens
            )

    World({"sample_use_retrieve_futures": feed}).run(scenario)


def test_what_was_retried_or_failed_is_not_counted_twice():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            world.server.faults.on("retrieve_future", faults.drop(handled=True), times=2)
            world.server.faults.on("forward_backward", faults.drop(handled=True))
            await training.forward_backward([datum(6)], "cross_entropy")
            assert service.usage().trained_tokens == 6
            world.server.faults.on("forward_backward", faults.reply(400))
            with pytest.raises(Exception, match="400"):
                await training.forward_backward([datum(6)], "cross_entropy")
            assert service.usage().trained_tokens == 6

    World().run(scenario)
