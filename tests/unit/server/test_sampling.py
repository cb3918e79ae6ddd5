"""Sampling: which weights, which tokens, which log-probabilities, how many at once."""

from __future__ import annotations

import pytest

from tinkex.server.scheduler.upkeep import PRUNE_INTERVAL_S
from tinkex.testing.fake_engine import Delays
from tinkex.types import TensorData

from .conftest import Api, Start, datum

pytestmark = pytest.mark.anyio


async def publish(api: Api, model: str, seq: int, number: int) -> str:
    """An unnamed save: a sampler of the weights as they are now."""
    body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": number}
    answer = await api.result(await api.post("/save_weights_for_sampler", body))
    assert "path" not in answer
    return answer["sampling_session_id"]


async def logprobs(api: Api, sampler: str, seq: int) -> list[float | None]:
    return (await api.sampled(await api.sample(sampler, seq, prompt_logprobs=True))).prompt_logprobs


async def test_every_sample_has_an_id_and_a_repeated_request_the_same_ones(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    first = await api.sample(sampler, num_samples=3)
    again = await api.sample(sampler, num_samples=3)
    assert first == again
    assert len(set(first["sample_sequence_ids"])) == 3
    response = await api.sampled(first)
    assert [s.sequence_id for s in response.sequences] == first["sample_sequence_ids"]
    assert [c.name for c in api.server.engine.calls] == ["sample"]


async def test_a_sampler_keeps_the_weights_it_was_made_for(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    before = await publish(api, model, 1, 0)
    await api.train(model, 2)
    await api.result(await api.step(model, 3))
    after = await publish(api, model, 4, 1)
    old, new = await logprobs(api, before, 0), await logprobs(api, after, 0)
    assert old != new
    assert await logprobs(api, before, 1) == old
    base = await api.sampler(session, 2)
    assert await logprobs(api, base, 0) == old


async def test_prompt_logprobs_equal_what_training_computes_for_the_same_tokens(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    await api.train(model, 1)
    await api.result(await api.step(model, 2))
    sampler = await publish(api, model, 3, 0)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [9, 8, 7, 6]}]}
    future = await api.sample(sampler, prompt=prompt, prompt_logprobs=True)
    response = await api.sampled(future)
    trained = await api.output(
        await api.train(model, 4, datum([9, 8, 7], target_tokens=[8, 7, 6]), forward_only=True)
    )
    assert response.prompt_logprobs[0] is None
    expected = trained.loss_fn_outputs[0]["logprobs"].tolist()
    assert response.prompt_logprobs[1:] == expected


async def test_sampled_logprobs_equal_prompt_logprobs_of_the_same_tokens(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    drawn = (await api.sampled(await api.sample(sampler))).sequences[0]
    tokens = [1, 2, 3, *drawn.tokens]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    scored = await api.sampled(await api.sample(sampler, 1, prompt=prompt, prompt_logprobs=True))
    assert scored.prompt_logprobs[3:] == drawn.logprobs


async def test_an_unnamed_save_retried_with_another_number_gives_the_first_sampler(
    api: Api,
) -> None:
    model = await api.model()
    assert await publish(api, model, 1, 0) == await publish(api, model, 1, 5)


async def test_prompt_options_have_the_shapes_of_the_protocol(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    wanted = {"data": [1, -1, 2, 3], "dtype": "int64", "shape": [2, 2]}
    response = await api.sampled(
        await api.sample(
            sampler,
            prompt_logprobs=True,
            prompt_logprobs_last_n=1,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=3,
            target_prompt_logprobs=wanted,
            prompt_alt_tokens_k=4,
        )
    )
    assert response.prompt_logprobs[:2] == [None, None]
    assert response.prompt_logprobs[2] < 0
    assert response.topk_prompt_logprobs[0] is None
    assert [len(row) for row in response.topk_prompt_logprobs[1:]] == [2, 2]
    assert [len(row) for row in response.sequences[0].topk_logprobs] == [3] * 4
    targets = response.target_prompt_logprobs.to_numpy()
    assert targets.shape == (2, 2)
    assert targets[0, 1] == 0
    assert response.prompt_alt_tokens.tokens.to_numpy().shape == (2, 4)
    assert response.prompt_alt_tokens.logprobs.to_numpy().shape == (2, 4)


async def test_sparse_targets_come_back_in_their_own_layout(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    wanted = TensorData(
        data=[7],
        dtype="int64",
        shape=[2, 3],
        sparse_crow_indices=[0, 0, 1],
        sparse_col_indices=[2],
    )
    future = await api.sample(sampler, target_prompt_logprobs=wanted.to_json())
    found = (await api.sampled(future)).target_prompt_logprobs
    assert found.sparse_crow_indices == [0, 0, 1]
    assert found.sparse_col_indices == [2]
    assert found.data[0] < 0


async def test_equal_seeds_give_equal_tokens_and_samples_of_one_call_differ(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    params = {"max_tokens": 12, "seed": 2**64 - 1}

    async def draw(seq: int, **more: object) -> list[list[int]]:
        future = await api.sample(sampler, seq, num_samples=2, sampling_params={**params, **more})
        return [s.tokens for s in (await api.sampled(future)).sequences]

    first = await draw(0)
    assert await draw(1) == first
    assert first[0] != first[1]
    assert await draw(2, seed=1) != first
    assert await draw(3, seed=None) != await draw(4, seed=None)
    greedy = await draw(5, temperature=0)
    assert greedy[0] == greedy[1] == (await draw(6, temperature=0, seed=5))[0]
    assert (await draw(7, top_k=1))[0] == greedy[0]
    assert (await draw(8, top_p=0.0))[0] == greedy[0]


@pytest.mark.parametrize(
    ("stop", "reason", "length"),
    [([], "length", 50), (None, "length", 50)],
)
async def test_stops_end_a_sequence_and_an_empty_list_never_does(
    api: Api, stop: object, reason: str, length: int
) -> None:
    sampler = await api.sampler(await api.session())
    params = {"max_tokens": 50, "seed": 3}
    plain = await api.sampled(await api.sample(sampler, sampling_params={**params, "stop": stop}))
    tokens = plain.sequences[0].tokens
    assert (plain.sequences[0].stop_reason, len(tokens)) == (reason, length)
    stopped = await api.sampled(
        await api.sample(sampler, 1, sampling_params={**params, "stop": [tokens[10]]})
    )
    cut = stopped.sequences[0]
    assert cut.stop_reason == "stop"
    assert cut.tokens == tokens[: tokens.index(tokens[10]) + 1]
    letters = [t for t in tokens if t < 128]
    text = await api.sampled(
        await api.sample(sampler, 2, sampling_params={**params, "stop": chr(letters[0])})
    )
    assert text.sequences[0].tokens[-1] == letters[0]


async def test_impossible_samples_fail_and_say_why(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    for seq, (members, said) in enumerate(
        [
            ({"prompt": {"chunks": []}}, "empty"),
            ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [99999]}]}}, "outside"),
            ({"prompt_logprobs_last_n": 9, "prompt_logprobs": True}, "last_n"),
            (
                {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 9000}]}},
                "9000 tokens",
            ),
        ]
    ):
        failed = await api.outcome(await api.sample(sampler, seq, **members))
        assert failed["category"] == "user"
        assert said in failed["error"]


async def test_pictures_and_pointers_are_accepted_as_prompts(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    chunks = [
        {"type": "encoded_text", "tokens": [1]},
        {"type": "image", "data": "AAECAw==", "format": "png", "expected_tokens": 3},
        {"type": "image_asset_pointer", "location": "x", "format": "jpeg", "expected_tokens": 2},
    ]
    future = await api.sample(sampler, prompt={"chunks": chunks}, prompt_logprobs=True)
    assert len((await api.sampled(future)).prompt_logprobs) == 6


async def test_too_many_samples_are_told_to_slow_down(start: Start) -> None:
    async with start(Delays(sample_s=50), max_samples_in_flight=2) as api:
        sampler = await api.sampler(await api.session())
        first = await api.sample(sampler, 0)
        await api.sample(sampler, 1)
        body = {
            "sampling_session_id": sampler,
            "seq_id": 2,
            "prompt": {"chunks": []},
            "sampling_params": {},
        }
        reply = await api.call("POST", "/asample", body)
        assert reply.status == 429
        assert reply.headers["retry-after"]
        assert await api.sample(sampler, 0) == first
        await api.result(first)
        await api.sample(sampler, 2)


async def test_copies_are_numbered_from_one(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    body = {"sampling_session_id": sampler}
    counters = [await api.post("/join_sampling_session", body) for _ in range(2)]
    assert [c["client_counter"] for c in counters] == [1, 2]


async def test_a_sampler_describes_itself_to_its_owner_only(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    assert await api.get(f"/samplers/{sampler}") == {
        "sampler_id": sampler,
        "base_model": "tinkex/tiny",
    }
    assert (await api.other().call("GET", f"/samplers/{sampler}")).status == 404


async def test_a_sampler_needs_something_to_sample_from(api: Api) -> None:
    session = await api.session()
    body = {"session_id": session, "sampling_session_seq_id": 0}
    assert (await api.call("POST", "/create_sampling_session", body)).status == 400
    body["model_path"] = "tinker://no/weights/thing"
    assert (await api.call("POST", "/create_sampling_session", body)).status == 404


async def test_a_sampler_whose_weights_were_dropped_says_why(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    first = await api.sample(sampler, 0)
    await api.result(first)
    await api.server.store.close_samplers([sampler], "a newer one has taken its place")
    assert await api.sample(sampler, 0) == first
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {}}
    reply = await api.call("POST", "/asample", body)
    assert reply.status == 400
    assert "no weights any more: a newer one has taken its place." in reply.body.decode()


async def test_the_session_of_a_client_without_heartbeats_ends_when_its_result_does(
    start: Start,
) -> None:
    async with start(result_ttl_s=1000) as api:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        body = {"base_model": "tinkex/tiny", "prompt": prompt, "sampling_params": {"max_tokens": 1}}
        await api.result(await api.post("/asample", {**body, "num_samples": 1}))
        created = await api.post("/create_model", {"base_model": "tinkex/tiny"})
        await api.result(created)
        store = api.server.store
        await api.clock.sleep(1000)
        assert await store.count_sessions(active=True) == 2
        await api.clock.sleep(2 * PRUNE_INTERVAL_S)
        (model_session,) = await store.sessions(active=True)
        assert created["model_id"].startswith(model_session.session_id)


async def test_clients_before_sampling_sessions_name_the_weights_in_each_request(
    api: Api,
) -> None:
    body = {
        "base_model": "tinkex/tiny",
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 3, "seed": None, "stop": None},
    }
    result = await api.result(await api.post("/asample", body))
    assert len(result["sequences"][0]["tokens"]) == 3
    assert result["sequences"][0]["stop_reason"] == "length"


async def test_the_end_token_stops_unless_the_stop_list_says_otherwise(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    await api.train(model, 1, datum([1, 2, 3], target_tokens=[256, 256, 256]))
    await api.step(model, 2, learning_rate=100.0)
    sampler = await publish(api, model, 3, 0)
    ended = (await api.sampled(await api.sample(sampler))).sequences[0]
    assert (ended.stop_reason, ended.tokens) == ("stop", [256])
    params = {"max_tokens": 4, "stop": []}
    endless = (await api.sampled(await api.sample(sampler, 1, sampling_params=params))).sequences[0]
    assert (endless.stop_reason, endless.tokens) == ("length", [256] * 4)
