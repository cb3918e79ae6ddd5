"""Every interface of a server through a node that owns nothing and has no engine."""

from __future__ import annotations

import io
import json
import tarfile
import threading
import urllib.request
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.cluster.front import (
    MODELS,
    NODE_OF,
    OTHER,
    OWNERS_RATE,
    PER_ADDRESS,
    Front,
    datum,
    front,
    trained,
)
from tests.contracts.conftest import postgres
from tests.e2e.serving import MODEL
from tests.patience import PATIENCE_S, until
from tinkex import (
    AdamParams,
    BadRequestError,
    ModelInput,
    RestClient,
    SamplingParams,
)
from tinkex.clients.admin import AdminClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.contracts.postgres import PostgresServer

__all__ = ["postgres"]

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("front"), postgres.new_place()) as found:
        yield found
        owners = found.cluster.query("SELECT n.name FROM claims c JOIN nodes n USING (node_id)")
        assert ("front",) not in owners


@pytest.fixture
def key(world: Front, request: pytest.FixtureRequest) -> str:
    """A key of a tenant that only this test has."""
    return world.key(f"t{abs(hash(request.node.name)) % 10**12}")


def chat_client(world: Front, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{world.url}/v1", api_key=key, max_retries=0)


# -- the routes of OpenAI --------------------------------------------------------------------------


def test_base_models_of_all_nodes_are_listed_and_answer(world: Front, key: str) -> None:
    with chat_client(world, key) as client:
        assert {model.id for model in client.models.list()} == set(MODELS)
        assert {client.models.retrieve(model).id for model in MODELS} == set(MODELS)
        for model in MODELS:
            asked: Any = {"model": model, "prompt": "once", "max_tokens": 12, "seed": 3}
            whole = client.completions.create(**asked).choices[0].text
            parts = list(client.completions.create(**asked, stream=True))
            assert "".join(part.choices[0].text for part in parts) == whole
            assert len(parts) > 1
        messages: Any = [{"role": "user", "content": "hello"}]
        with pytest.raises(openai.BadRequestError, match="chat template"):
            client.chat.completions.create(model=OTHER, messages=messages)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="test/unknown", prompt="once")


def test_a_saved_checkpoint_is_a_model_of_the_openai_routes(world: Front, key: str) -> None:
    with world.client(key) as service, chat_client(world, key) as client:
        path = trained(service, OTHER).save_weights_for_sampler("served").result(PATIENCE_S).path
        assert path in {model.id for model in client.models.list()}
        asked: Any = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
        served = client.completions.create(model=path, **asked).choices[0].text
        sampler = service.create_sampling_client(model_path=path)
        params = SamplingParams(max_tokens=8, temperature=0.0)
        sampled = sampler.sample(ModelInput.from_ints([1, 2, 3]), 1, params).result(PATIENCE_S)
        assert len(served) > 0
        assert len(sampled.sequences[0].tokens) == 8


def test_a_client_that_stops_reading_a_stream_ends_the_sample(world: Front, key: str) -> None:
    most = 8000
    body = {"model": MODEL, "prompt": "once", "max_tokens": most, "seed": 1, "stream": True}
    connection = world.connection()
    headers = {"authorization": f"Bearer {key}", "x-request-id": "stopped"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    reply = connection.getresponse()
    assert reply.status == 200
    assert reply.readline().startswith(b"data: ")
    reply.close()
    connection.close()
    until(lambda: "request_id=stopped" in world.log("a"), "the owner still samples")
    until(lambda: used(world, key).get("sample", 0) > 0, "nothing was counted")
    assert used(world, key)["sample"] < most


# -- weights ---------------------------------------------------------------------------------------


def test_checkpoints_are_listed_published_copied_and_deleted(world: Front, key: str) -> None:
    with world.client(key) as service, RestClient(base_url=world.url, api_key=key) as rest:
        training = trained(service, OTHER)
        path = training.save_state("kept").result(PATIENCE_S).path
        listed = rest.list_checkpoints(training.model_id).result(PATIENCE_S).checkpoints
        assert [c.tinker_path for c in listed] == [path]
        rest.publish_checkpoint_from_tinker_path(path).result(PATIENCE_S)
        other_key = world.key("someone-else")
        with (
            world.client(other_key) as other,
            RestClient(base_url=world.url, api_key=other_key) as reader,
        ):
            seen = reader.get_weights_info_by_tinker_path(path)
            assert seen.result(PATIENCE_S).base_model == OTHER
            copied = reader.copy_weights(path, "theirs").result(PATIENCE_S)
            losses = [
                maker(place).forward([datum()], "cross_entropy").result(PATIENCE_S).metrics
                for maker, place in (
                    (other.create_training_client_from_state, copied),
                    (service.create_training_client_from_state, path),
                )
            ]
            assert losses[0]["loss:sum"] == losses[1]["loss:sum"]
        rest.unpublish_checkpoint_from_tinker_path(path).result(PATIENCE_S)
        rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result(PATIENCE_S)
        rest.delete_checkpoint_from_tinker_path(path).result(PATIENCE_S)
        assert rest.list_checkpoints(training.model_id).result(PATIENCE_S).checkpoints == []


@pytest.mark.parametrize("model", MODELS)
def test_an_export_is_downloaded_and_comes_back(
    model: str, world: Front, key: str, tmp_path: Path
) -> None:
    with world.client(key) as service, RestClient(base_url=world.url, api_key=key) as rest:
        training = trained(service, model)
        exported = training.save_weights_external("out").result(PATIENCE_S).path
        urls = rest.get_external_weights_urls(exported).result(PATIENCE_S).urls
        for name, url in urls.items():
            assert url.startswith(world.url)
            (tmp_path / name).write_bytes(fetched(url))
        whole = (tmp_path / "adapter_model.safetensors").read_bytes()
        part = fetched(urls["adapter_model.safetensors"], range="bytes=10-29")
        assert part == whole[10:30]
        imported = rest.import_adapter(tmp_path, model, name="back").result(PATIENCE_S)
        again = service.create_training_client_from_state(imported)
        losses = [
            run.forward([datum()], "cross_entropy").result(PATIENCE_S).metrics["loss:sum"]
            for run in (training, again)
        ]
        assert losses[0] == losses[1]
        saved = training.save_state("end").result(PATIENCE_S).path
        link = rest.get_checkpoint_archive_url_from_tinker_path(saved).result(PATIENCE_S).url
        assert link.startswith(world.url)
        with tarfile.open(fileobj=io.BytesIO(fetched(link))) as tar:
            assert sorted(tar.getnames()) == sorted(urls)


def fetched(url: str, **headers: str) -> bytes:
    asked = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as reply:
        return reply.read()


# -- clients before sessions -----------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_client_without_sessions_trains_and_samples(model: str, world: Front, key: str) -> None:
    body = {"base_model": model, "lora_config": {"rank": 4}}
    first, again = (
        world.post("create_model", body, key, x_idempotency_key="one") for _ in range(2)
    )
    assert first.status == 200
    assert first.json == again.json  # sent twice, made once
    run = world.result(first.json["request_id"], key).json["model_id"]
    saving = world.post("save_weights_for_sampler", {"model_id": run, "path": "old"}, key)
    path = world.result(saving.json["request_id"], key).json["path"]
    params = {"max_tokens": 4, "seed": 1}
    for weights in ({"base_model": model}, {"model_path": path}):
        asked = {"prompt": PROMPT, "sampling_params": params, **weights}
        accepted = world.post("asample", asked, key)
        assert accepted.status == 200, accepted.body
        found = world.result(accepted.json["request_id"], key).json
        assert len(found["sequences"][0]["tokens"]) == 4
    assert world.cluster.owner_of(run) == NODE_OF[model]


def test_a_result_is_json_or_protobuf_as_the_client_reads(world: Front, key: str) -> None:
    with world.client(key) as service:
        training = trained(service, OTHER)
        training.forward([datum()], "cross_entropy").result(PATIENCE_S)
        op_id = f"{training.model_id}:1"
        plain = world.result(op_id, key, accept="application/json")
        packed = world.result(op_id, key, accept="application/x-protobuf, application/json")
        assert plain.headers["content-type"] == "application/json"
        assert "loss_fn_outputs" in plain.json
        assert packed.headers["content-type"].startswith("application/x-protobuf")
        assert "x-tinkex-usage" in packed.headers


# -- runs ------------------------------------------------------------------------------------------


def test_custom_losses_run_on_the_owner(world: Front, key: str) -> None:
    torch = pytest.importorskip("torch")

    def squares(logprobs: Any) -> Any:
        return (logprobs**2).sum(), {"custom/mean:mean": logprobs.mean()}

    with world.client(key) as service:
        training = trained(service, OTHER)
        handle = service.create_custom_loss(squares, {"logprobs": 1}).result(PATIENCE_S)
        assert handle.loss_id is not None
        passed = training.forward_backward_custom([datum()], handle).result(PATIENCE_S)
        assert passed.metrics["custom/mean:mean"] < 0
        local = training.forward_backward_custom(
            [datum()], lambda data, logprobs: (torch.cat(logprobs).sum(), {"seen": 1.0})
        )
        assert local.result(PATIENCE_S).metrics["seen"] == 1.0


def test_a_sample_is_cancelled(world: Front, key: str) -> None:
    with world.client(key) as service:
        session = trained(service, MODEL).model_id.partition(":")[0]
        made = {"session_id": session, "sampling_session_seq_id": 7, "base_model": OTHER}
        name = world.post("create_sampling_session", made, key).json["sampling_session_id"]
        params = {"max_tokens": 8000, "seed": 1, "stop": []}
        asked = {"prompt": PROMPT, "sampling_params": params, "sampling_session_id": name}
        accepted = world.post("asample", {**asked, "seq_id": 1}, key).json["request_id"]
        assert world.post("cancel_future", {"request_id": accepted}, key).json == {
            "cancelled": True
        }
        assert "cancel" in world.result(accepted, key).json["error"]


def test_a_second_program_attaches(world: Front, key: str) -> None:
    with world.client(key) as first, world.client(key) as second:
        training = trained(first, OTHER)
        attached = second.attach_training_client(training.model_id)
        assert attached.next_seq_id == training.next_seq_id
        attached.forward_backward([datum()], "cross_entropy").result(PATIENCE_S)
        with pytest.raises(BadRequestError, match="attached"):
            training.forward([datum()], "cross_entropy").result(PATIENCE_S)


def test_a_session_lives_by_heartbeats_and_its_end_reaches_the_owner(
    world: Front, key: str
) -> None:
    with world.client(key) as service:
        training = trained(service, MODEL)
        session = training.model_id.partition(":")[0]
        beat = {"session_id": session}
        assert world.post("session_heartbeat", beat, key).status == 200
        ended = world.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}, key)
        assert ended.status == 200, ended.body
        assert world.post("session_heartbeat", beat, key).status == 410
        query = f"SELECT * FROM claims WHERE key = '{training.model_id}'"
        until(lambda: world.cluster.query(query) == [], "the owner keeps the model")


def test_the_trace_of_a_session_has_what_only_the_owners_know(world: Front, key: str) -> None:
    with world.client(key) as service, RestClient(base_url=world.url, api_key=key) as rest:
        trainings = [trained(service, model) for model in MODELS]
        samplers = [each.save_weights_and_get_sampling_client() for each in trainings]
        params = SamplingParams(max_tokens=2, seed=1)
        for sampler in samplers:
            sampler.sample(ModelInput.from_ints([1, 2, 3]), 1, params).result(PATIENCE_S)
        session = trainings[0].model_id.partition(":")[0]
        link = rest.export_session_trace(session).result(PATIENCE_S)
        events = json.loads(fetched(link))["traceEvents"]
        computed = [e["args"]["request_id"] for e in events if e.get("cat") == "compute"]
        assert len(computed) == len(set(computed))
        names = Counter(e["name"] for e in events if e.get("cat") == "compute")
        assert (names["optim_step"], names["sample"]) == (2, 2)
        assert "poll" in {event["name"] for event in events}


# -- tenants ---------------------------------------------------------------------------------------


def used(world: Front, key: str) -> dict[str, int]:
    """Tokens of a tenant by what they were used for."""
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    with AdminClient(base_url=world.url, api_key=key) as admin:
        found = admin.get_billing_usage(now - timedelta(hours=1), now + timedelta(hours=1))
        events = found.result(PATIENCE_S).data
    sums: dict[str, int] = {}
    for event in events:
        name = type(event.event_info).__name__.removesuffix("BillingEvent").lower()
        name = "sample" if "samplingsample" in name else name
        sums[name] = sums.get(name, 0) + getattr(event.event_info, "token_count", 0)
    return sums


def test_usage_of_all_nodes_is_one_sum(world: Front, key: str) -> None:
    with world.client(key) as service:
        for model in MODELS:
            trained(service, model).save_state("kept").result(PATIENCE_S)
        expected = 8 * len(MODELS)
        until(lambda: used(world, key).get("training") == expected, "tokens are missing")
        with AdminClient(base_url=world.url, api_key=key) as admin:
            stored = admin.get_current_checkpoint_storage_usage().result(PATIENCE_S).data
        assert sum(each.checkpoint_count for each in stored) == len(MODELS)


def test_limits_of_keys_hold_wherever_a_request_is_answered(world: Front, key: str) -> None:
    owner = world.ask("GET", "/api/v1/auth/apikey/me", key=key).json["details"]
    tenant = owner["user_details"]["email"].partition("@")[0]
    reader = world.key(tenant, read_only=True)
    with world.client(key) as service:
        path = trained(service, OTHER).save_state("kept").result(PATIENCE_S).path
    run, _, name = path.removeprefix("tinker://").partition("/")
    place = f"/api/v1/training_runs/{run}/checkpoints/{name}"
    assert world.ask("GET", f"/api/v1/training_runs/{run}/checkpoints", key=reader).status == 200
    assert world.ask("DELETE", place, key=reader).status == 403
    asked = {"model": OTHER, "prompt": "once", "max_tokens": 1}
    assert world.ask("POST", "/v1/completions", asked, key=reader).status == 403
    assert world.ask("POST", "/v1/completions", asked, key="tml-made-up").status == 401
    revoked = world.key(tenant)
    assert world.ask("POST", "/v1/completions", asked, key=revoked).status == 200
    assert world.ask("DELETE", "/api/v1/auth/apikey/me", key=revoked).status == 200
    assert world.ask("POST", "/v1/completions", asked, key=revoked).status == 401
    token = world.post("auth/token", {}, key).json["jwt"]
    assert world.ask("POST", "/v1/completions", asked, key=token).status == 200
    assert world.ask("DELETE", place, key=token).status == 200


def test_a_request_is_counted_where_it_arrives_and_nowhere_else(world: Front, key: str) -> None:
    asked = {"model": OTHER, "prompt": "once", "max_tokens": 1}
    for _ in range(int(OWNERS_RATE * 10)):
        assert world.ask("POST", "/v1/completions", asked, key=key).status == 200
    until(
        lambda: world.ask("POST", "/v1/completions", asked, key=key, node="b").status == 429,
        "the owner does not count what is sent to it",
    )


def test_many_polls_of_clients_are_passed_on_at_once(world: Front, key: str) -> None:
    count = 3 * PER_ADDRESS
    with world.client(key) as service:
        training = trained(service, OTHER)
        # Its turn does not come: the numbers before it are never sent.
        late = {"model_id": training.model_id, "seq_id": 100, "adam_params": {}}
        accepted = world.post("optim_step", late, key)
        assert accepted.status == 200, accepted.body
        asked = {"request_id": accepted.json["request_id"]}
        ended = threading.Event()

        def poll() -> None:
            while not ended.is_set():
                world.post("retrieve_future", asked, key)

        threads = [threading.Thread(target=poll) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            until(
                lambda: world.metric("b", "tinkex_connections_open") > count,
                "polls are refused",
            )
        finally:
            ended.set()
            world.post("cancel_future", asked, key)
            for thread in threads:
                thread.join(PATIENCE_S)


# -- operators -------------------------------------------------------------------------------------


def test_the_audit_log_names_the_client_and_both_logs_the_request(world: Front, key: str) -> None:
    with world.client(key) as service:
        path = trained(service, OTHER).save_state("kept").result(PATIENCE_S).path
    run, _, name = path.removeprefix("tinker://").partition("/")
    place = f"/api/v1/training_runs/{run}/checkpoints/{name}"
    seen = world.ask(
        "DELETE", place, key=key, source="127.0.0.9", x_request_id="gone-1",
        x_forwarded_for="203.0.113.1",
    )  # fmt: skip
    assert seen.status == 200
    assert seen.headers["x-request-id"] == "gone-1"
    query = "SELECT event, address FROM audit WHERE request_id = 'gone-1'"
    assert world.cluster.query(query) == [("checkpoint_deleted", "127.0.0.9")]
    until(lambda: "request_id=gone-1" in world.log("front"), "not in the log of the node")
    (line,) = [text for text in world.log("front").splitlines() if "request_id=gone-1" in text]
    target = line.rpartition("passed_to=")[2].split()[0]
    until(lambda: "request_id=gone-1" in world.log(target), "not in the log of the owner")
    (line,) = [text for text in world.log(target).splitlines() if "request_id=gone-1" in text]
    assert "passed_by=front#" in line


def test_a_base_model_that_no_node_has_is_refused_with_what_there_is(
    world: Front, key: str
) -> None:
    with world.client(key) as service, pytest.raises(BadRequestError) as caught:
        service.create_lora_training_client("test/unknown", rank=4)
    for model, node in NODE_OF.items():
        assert f"{model} (on {node})" in str(caught.value)
    asked = {"prompt": PROMPT, "sampling_params": {}, "base_model": "test/unknown"}
    assert world.post("asample", asked, key).status == 400
    old = {"base_model": "test/unknown"}
    assert world.post("create_model", old, key).status == 400
    tokenizer = world.ask("GET", "/api/v1/tokenizer?base_model=test/unknown", key=key)
    assert tokenizer.status == 400


@pytest.mark.parametrize("model", MODELS)
def test_the_tokenizer_comes_from_a_node_that_has_it(model: str, world: Front, key: str) -> None:
    reply = world.ask("GET", f"/api/v1/tokenizer?base_model={model}", key=key)
    assert reply.status == 200
    assert "model" in json.loads(reply.json["tokenizer"])


def test_the_metrics_of_the_node_say_what_it_passed_on(world: Front, key: str) -> None:
    before = world.metric("front", "tinkex_cluster_passed_on_total")
    with world.client(key) as service:
        training = trained(service, MODEL)
        training.optim_step(AdamParams(learning_rate=0.1)).result(PATIENCE_S)
    assert world.metric("front", "tinkex_cluster_passed_on_total") > before
    assert world.metric("front", "tinkex_cluster_keys") == 0
