"""Training: order, retries, gaps, batches, failures, older clients."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from tinkex.testing.fake_engine import Delays
from tinkex.wire.compression import compress
from tinkex.wire.proto_training import encode_forward_backward

from .conftest import PROTOBUF, Api, Start, datum

pytestmark = pytest.mark.anyio


def engine_calls(api: Api, name: str) -> list[tuple[str, ...]]:
    return [call.ids for call in api.server.engine.calls if call.name == name]


async def test_repeated_training_on_the_same_data_lowers_the_loss(api: Api) -> None:
    model = await api.model()
    losses = []
    for step in range(3):
        losses.append(await api.loss(await api.train(model, 2 * step + 1)))
        metrics = (await api.result(await api.step(model, 2 * step + 2)))["metrics"]
        assert metrics["step"] == step + 1
        assert metrics["grad_norm"] > 0
    assert losses[0] > losses[1] > losses[2]


async def test_outputs_come_per_datum_in_the_shape_of_their_targets(api: Api) -> None:
    model = await api.model()
    wide = datum([1, 2], target_tokens=[[5, 6, 7], [8, 9, 1]], weights=[[1.0, 0, -1]] * 2)
    output = await api.output(await api.train(model, 1, datum([1, 2, 3]), wide, datum([4])))
    shapes = [o["logprobs"].to_numpy().shape for o in output.loss_fn_outputs]
    assert shapes == [(3,), (2, 3), (1,)]


async def test_a_forward_pass_leaves_the_gradient_alone(api: Api) -> None:
    model = await api.model()
    await api.output(await api.train(model, 1, forward_only=True))
    metrics = (await api.result(await api.step(model, 2)))["metrics"]
    assert metrics["grad_norm"] == 0


async def test_gradients_add_up_until_the_step(api: Api) -> None:
    model = await api.model()
    once = await api.result(await gradients_then_step(api, model, 1, times=1))
    twice = await api.result(await gradients_then_step(api, await api.model(), 1, times=2))
    assert twice["metrics"]["grad_norm"] == pytest.approx(2 * once["metrics"]["grad_norm"])


async def gradients_then_step(api: Api, model: str, seq: int, times: int) -> object:
    for index in range(times):
        await api.train(model, seq + index)
    return await api.step(model, seq + times)


@pytest.mark.req("S5")
async def test_a_request_sent_again_gets_the_same_future_and_runs_once(api: Api) -> None:
    model = await api.model()
    first = await api.train(model, 1)
    again = await api.train(model, 1, datum([7, 8]))
    assert first == again
    await api.result(first)
    assert await api.train(model, 1) == first
    assert len(engine_calls(api, "train")) == 1


async def test_chunks_that_arrive_before_the_first_run_with_it_in_one_batch(api: Api) -> None:
    model = await api.model()
    third, second = await api.train(model, 3), await api.train(model, 2)
    assert msgspec.json.decode((await api.poll(third)).body)["type"] == "try_again"
    first = await api.train(model, 1)
    for future in (first, second, third):
        await api.result(future)
    assert engine_calls(api, "train") == [(f"{model}:1", f"{model}:2", f"{model}:3")]


async def test_a_step_submitted_before_its_gradient_waits_for_it(api: Api) -> None:
    model = await api.model()
    step = await api.step(model, 2)
    await api.clock.sleep(30)
    gradient = await api.train(model, 1)
    await api.result(gradient)
    assert (await api.result(step))["metrics"]["grad_norm"] > 0


async def test_after_the_gap_timeout_operations_go_ahead_without_the_missing_one(
    start: Start,
) -> None:
    async with start(gap_timeout_s=60) as api:
        model = await api.model()
        future = await api.train(model, 2)
        begun = api.clock.now()
        await api.result(future)
        assert api.clock.now() - begun == pytest.approx(60)
        late = await api.outcome(await api.train(model, 1))
        assert late["category"] == "server"
        assert "after its turn" in late["error"]
        await api.result(await api.train(model, 3))


async def test_models_train_together_in_one_engine_call(start: Start) -> None:
    async with start(Delays(train_s=1)) as api:
        session = await api.session()
        models = [await api.model(session, number) for number in range(3)]
        busy = await api.train(models[0], 1)
        await api.clock.sleep(0.5)
        futures = [await api.train(m, 2 if m == models[0] else 1) for m in models]
        for future in [busy, *futures]:
            await api.result(future)
        assert [len(ids) for ids in engine_calls(api, "train")] == [1, 3]


async def test_bad_data_fails_its_own_future_and_nothing_behind_it(api: Api) -> None:
    model = await api.model()
    bad = await api.train(model, 1, datum(), datum([1, 2], weights=[1.0]))
    good = await api.train(model, 2)
    failed = await api.outcome(bad)
    assert failed["category"] == "user"
    assert 'data[1].loss_fn_inputs["weights"]' in failed["error"]
    assert await api.loss(good) > 0


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (datum([1, 5000]), "token outside"),
        (datum([1, 2], target_tokens=[1, 2, 3]), "target_tokens"),
    ],
)
async def test_the_failure_names_what_is_wrong(api: Api, broken: object, said: str) -> None:
    model = await api.model()
    failed = await api.outcome(await api.train(model, 1, broken))  # type: ignore[arg-type]
    assert said in failed["error"]


async def test_a_batch_that_cannot_be_read_keeps_its_turn_and_fails_there(api: Api) -> None:
    model = await api.model()
    body = bytearray(
        encode_forward_backward(
            model_id=model, seq_id=1, data=[datum([1, 2, 3])], loss_fn="cross_entropy"
        )
    )
    # Shape [3] becomes shape [2] for one tensor: parseable, but the sizes disagree.
    at = bytes(body).rindex(b"\x22\x01\x03")
    body[at + 2] = 2
    broken = await api.post("/forward_backward", bytes(body), headers={"content-type": PROTOBUF})
    following = await api.train(model, 2)
    failed = await api.outcome(broken)
    assert failed["category"] == "user"
    assert "data[0]" in failed["error"]
    await api.result(following)
    assert api.clock.now() < 60


async def test_a_malformed_optim_step_fails_in_its_turn_too(api: Api) -> None:
    model = await api.model()
    body = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": "fast"}}
    failed = await api.outcome(await api.post("/optim_step", body))
    assert failed["category"] == "user"
    assert "learning_rate" in failed["error"]
    await api.result(await api.train(model, 2))
    assert api.clock.now() < 60


async def test_bytes_that_are_no_protobuf_are_refused(api: Api) -> None:
    reply = await api.call(
        "POST", "/forward_backward", b"\xff\xff", headers={"content-type": PROTOBUF}
    )
    assert reply.status == 400
    reply = await api.call("POST", "/forward_backward", b"x", headers={"content-type": "text/csv"})
    assert reply.status == 415
    assert b"text/csv" in reply.body


async def test_compressed_bodies_are_read_and_bombs_are_not(start: Start) -> None:
    async with start(max_decoded_bytes=1000) as api:
        model = await api.model()
        body = encode_forward_backward(
            model_id=model, seq_id=1, data=[datum()], loss_fn="cross_entropy"
        )
        headers = {"content-type": PROTOBUF, "content-encoding": "zstd"}
        future = await api.post("/forward_backward", compress(body), headers=headers)
        assert await api.loss(future) > 0
        bomb = compress(b"\0" * 1_000_000)
        reply = await api.call("POST", "/forward_backward", bomb, headers=headers)
        assert reply.status == 400


async def test_nobody_trains_somebody_else_s_model(api: Api) -> None:
    model = await api.model()
    body = {"model_id": model, "seq_id": 1, "adam_params": {}}
    assert (await api.other().call("POST", "/optim_step", body)).status == 404


async def test_an_unknown_base_model_is_refused_with_the_known_ones(api: Api) -> None:
    body = {"session_id": await api.session(), "model_seq_id": 0, "base_model": "gpt-9"}
    reply = await api.call("POST", "/create_model", body)
    assert reply.status == 400
    assert b"tinkex/tiny" in reply.body


@pytest.mark.parametrize(
    "lora",
    [
        {"rank": 0},
        {"rank": 257},
        {"rank": 8, "train_mlp": False, "train_attn": False, "train_unembed": False},
    ],
)
async def test_an_impossible_adapter_is_refused(api: Api, lora: dict[str, object]) -> None:
    body = {
        "session_id": await api.session(),
        "model_seq_id": 0,
        "base_model": "tinkex/tiny",
        "lora_config": lora,
    }
    assert (await api.call("POST", "/create_model", body)).status == 400


async def test_creating_a_model_twice_gives_the_same_future(api: Api) -> None:
    body = {
        "session_id": await api.session(),
        "model_seq_id": 0,
        "base_model": "tinkex/tiny",
        "lora_config": {"rank": 8},
    }
    first = await api.post("/create_model", body)
    assert await api.post("/create_model", body) == first
    await api.result(first)
    assert len(engine_calls(api, "create_adapter")) == 1


async def test_when_creation_fails_everything_submitted_to_the_model_says_so(api: Api) -> None:
    api.server.engine.fail_next("create_adapter", MemoryError("no room"))
    body = {
        "session_id": await api.session(),
        "model_seq_id": 0,
        "base_model": "tinkex/tiny",
        "lora_config": {"rank": 8},
    }
    created = await api.post("/create_model", body)
    model = created["model_id"]
    train, step = await api.train(model, 1), await api.step(model, 2)
    for future in (created, train, step):
        failed = await api.outcome(future)
        assert failed["category"] == "server"
        assert "no room" in failed["error"]


async def test_a_crash_of_the_engine_fails_the_batch_and_not_the_server(api: Api) -> None:
    model = await api.model()
    api.server.engine.fail_next("train", RuntimeError("CUDA error"))
    failed = await api.outcome(await api.train(model, 1))
    assert failed == {"error": "RuntimeError: CUDA error", "category": "server"}
    await api.result(await api.train(model, 2))


@pytest.mark.req("S24")
async def test_a_training_operation_that_has_not_started_is_withdrawn(start: Start) -> None:
    async with start(Delays(train_s=5)) as api:
        model = await api.model()
        running = await api.train(model, 1)
        step = await api.step(model, 2)
        await api.clock.sleep(1)
        queued = await api.train(model, 3)
        behind = await api.step(model, 4)
        assert await api.post("/cancel_future", queued) == {"cancelled": True}
        assert await api.post("/cancel_future", running) == {"cancelled": False}
        assert (await api.outcome(queued))["category"] == "user"
        for future in (running, step, behind):
            await api.result(future)
        assert api.clock.now() < 60


async def test_get_info_describes_the_model(api: Api) -> None:
    model = await api.model()
    info = await api.post("/get_info", {"model_id": model})
    assert info["model_data"]["model_name"] == "tinkex/tiny"
    assert info["optimizer_config"] == {"type": "adamw"}
    assert info["lora_rank"] == 8


async def test_other_optimizer_families_keep_their_names(api: Api) -> None:
    model = await api.model(optimizer_config={"type": "dimuon", "version": 1})
    info = await api.post("/get_info", {"model_id": model})
    assert info["optimizer_config"] == {"type": "dimuon", "version": 1}
    await api.train(model, 1)
    params = {"type": "dimuon", "learning_rate": 0.01}
    body = {"model_id": model, "seq_id": 2, "optimizer_params": params}
    metrics = (await api.result(await api.post("/optim_step", body)))["metrics"]
    assert metrics["learning_rate"] == 0.01


async def test_runs_are_listed_with_their_last_checkpoints(api: Api) -> None:
    session = await api.session()
    models = [await api.model(session, number) for number in range(3)]
    await api.result(await api.post("/save_weights", {"model_id": models[1], "seq_id": 1}))
    page = await api.get("/training_runs", query="limit=2")
    assert [run["training_run_id"] for run in page["training_runs"]] == [models[2], models[1]]
    assert page["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
    run = await api.get(f"/training_runs/{models[1]}")
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/000001"
    assert "last_sampler_checkpoint" not in run
    assert (await api.other().call("GET", f"/training_runs/{models[1]}")).status == 404


async def test_older_clients_train_in_json(api: Api) -> None:
    model = await api.model()
    batch = {
        "data": [
            {
                "model_input": {"chunks": [{"tokens": [1, 2, 3]}]},
                "loss_fn_inputs": {
                    "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}
                },
            }
        ],
        "loss_fn": "cross_entropy",
        "loss_fn_config": None,
    }
    body = {"forward_backward_input": batch, "model_id": model, "seq_id": 1}
    result = await api.result(await api.post("/forward_backward", body))
    assert set(result) == {"loss_fn_output_type", "loss_fn_outputs", "metrics"}
    assert set(result["loss_fn_outputs"][0]["logprobs"]) == {"data", "dtype", "shape"}
    body = {"forward_input": batch, "model_id": model, "seq_id": 2}
    assert await api.result(await api.post("/forward", body)) == result


async def test_clients_without_numbers_are_ordered_by_arrival(api: Api) -> None:
    created = await api.post(
        "/create_model",
        {"base_model": "tinkex/tiny", "lora_config": {"rank": 8}},
        headers={"x-idempotency-key": "u:0:0"},
    )
    model = (await api.result(created))["model_id"]
    step = {"model_id": model, "adam_params": {"learning_rate": 0.1}}
    headers = {"x-idempotency-key": "u:0:1"}
    first = await api.post("/optim_step", step, headers=headers)
    again = await api.post("/optim_step", step, headers=headers)
    other = await api.post("/optim_step", step, headers={"x-idempotency-key": "u:0:2"})
    assert first == again != other
    assert (await api.result(other))["metrics"]["step"] == 2
    unloaded = await api.post("/unload_model", {"model_id": model})
    assert await api.result(unloaded) == {"model_id": model, "type": "unload_model"}
    assert api.server.engine.adapters == ()


async def test_two_polls_of_one_future_get_the_same_result(api: Api) -> None:
    model = await api.model()
    future = await api.train(model, 1)
    replies: list[bytes] = []

    async def poll() -> None:
        replies.append((await api.poll(future, binary=True)).body)

    async with anyio.create_task_group() as group:
        group.start_soon(poll)
        group.start_soon(poll)
    assert replies[0] == replies[1]


async def test_custom_losses_are_kept_once_and_used_by_their_id(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    body = {
        "session_id": session,
        "custom_loss_seq_id": 0,
        "name": "mine",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {
            "format": 1,
            "nodes": [
                {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
                {
                    "op": "output",
                    "name": "output",
                    "target": "output",
                    "args": [{"tuple": [{"ref": "logprobs"}, {"dict": {}}]}],
                },
            ],
        },
    }
    first = await api.post("/create_custom_loss", body)
    assert await api.post("/create_custom_loss", body) == first
    loss_id = (await api.result(first))["loss_id"]
    options = {"loss_fn": "custom", "loss_fn_config": {"loss_id": loss_id}}
    output = await api.output(await api.train(model, 1, **options))
    assert "loss:sum" in output.metrics
    unknown = {"loss_fn": "custom", "loss_fn_config": {"loss_id": "nope"}}
    failed = await api.outcome(await api.train(model, 2, **unknown))
    assert "create_custom_loss" in failed["error"]
    empty = {**body, "custom_loss_seq_id": 1, "graph": {"format": 1, "nodes": []}}
    assert (await api.call("POST", "/create_custom_loss", empty)).status == 400
