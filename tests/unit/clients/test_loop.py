"""A whole training loop against the fake server, on the virtual clock."""

from __future__ import annotations

from tests.unit.clients.world import MODEL, World, datum
from tinkex import AdamParams, ModelInput, SamplingParams


async def whole_loop(world: World) -> None:
    async with world.service() as service:
        training = await service.create_lora_training_client_async(MODEL, rank=4, seed=1)
        first = await training.forward_backward([datum(), datum(first=9)], "cross_entropy")
        for _ in range(5):
            training.forward_backward([datum(), datum(first=9)], "cross_entropy")
            await training.optim_step(AdamParams(learning_rate=0.1))
        last = await training.forward([datum(), datum(first=9)], "cross_entropy")
        assert last.metrics["loss:sum"] < first.metrics["loss:sum"]
        assert len(last.loss_fn_outputs) == 2

        path = (await training.save_state("final")).path
        sampler = await training.save_weights_and_get_sampling_client_async()
        prompt = ModelInput.from_ints([1, 2, 3])
        params = SamplingParams(max_tokens=5, seed=1)
        answer = await sampler.sample_async(prompt, 2, params)
        assert [len(s.tokens) for s in answer.sequences] == [5, 5]
        assert len(await sampler.compute_logprobs_async(prompt)) == 3

        resumed = await service.create_training_client_from_state_with_optimizer_async(path)
        again = await resumed.forward([datum(), datum(first=9)], "cross_entropy")
        assert again.metrics["loss:sum"] == last.metrics["loss:sum"]
        assert service.usage().trained_tokens == 6 * 8
    assert world.routes("finish_session") == ["finish_session"]


def test_a_whole_loop_runs_with_per_request_polling():
    World().run(whole_loop)


def test_a_whole_loop_runs_with_every_flag_on():
    flags = {
        "sample_use_retrieve_futures": True,
        "sample_join_sampling_session": True,
        "create_model_via_load_weights": True,
        "proto_compress_fwdbwd": True,
        "pjwt_auth_enabled": True,
        "custom_loss_server_side": True,
    }
    World(flags).run(whole_loop)
