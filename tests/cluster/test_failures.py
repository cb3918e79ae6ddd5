"""One failure or change at a time, on real nodes; each test says what clients see of it."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tests.cluster.disturbances import LEASE_LOST, run, want
from tests.cluster.nodes import LEASE_S, Cluster, cluster, owned_by
from tests.contracts.postgres import postgres_server
from tests.e2e.serving import KEY, MODEL, refused, served
from tests.e2e.workers import PROMPT, losses
from tests.patience import PATIENCE_S, until
from tests.s3 import s3_environment, s3_url
from tinkex import SamplingParams, ServiceClient
from tinkex.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from tests.contracts.postgres import PostgresServer
    from tinkex import SamplingClient, TrainingClient

__all__ = ["s3_environment", "s3_url"]
STEPS = 12
SAMPLES = 24
GATE = "gate"


@pytest.fixture(scope="module")
def own_postgres() -> Generator[PostgresServer]:
    """A server that these tests may stop."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="module")
def nodes(
    tmp_path_factory: pytest.TempPathFactory, own_postgres: PostgresServer
) -> Generator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    flags = ("--set", "session_timeout_s=30", "--set", "upkeep_interval_s=2")
    place = own_postgres.new_place()
    with cluster(folder, place, "a", "b", gateway=GATE, flags=flags) as found:
        yield found


@pytest.fixture
def client(nodes: Cluster) -> Generator[ServiceClient]:
    """A client of the node that owns nothing; both other nodes serve when it starts."""
    for name in ("a", "b"):
        if name not in nodes.nodes or nodes.nodes[name].popen.poll() is not None:
            nodes.start(name)
        until(lambda: serves(nodes, name), f"{name} does not serve")  # noqa: B023 - called at once
    client = ServiceClient(base_url=nodes.nodes[GATE].url, api_key=KEY)
    yield client
    client.close().result(PATIENCE_S)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[Any]]:
    """The losses of a run, and samples, of an undisturbed server."""
    with served(tmp_path_factory.mktemp("alone") / "data") as server:
        client = ServiceClient(base_url=server.url, api_key=KEY)
        training = new_model(client)
        told = losses(training, STEPS)
        tokens = samples(training.save_weights_and_get_sampling_client(), SAMPLES)
        client.close()
    return told, tokens


def serves(nodes: Cluster, name: str) -> bool:
    return bool(
        nodes.query(
            f"SELECT 1 FROM nodes WHERE name = '{name}' AND state = 'alive' "
            "AND base_models::text LIKE '%tiny%'"
        )
    )


def new_model(client: ServiceClient) -> TrainingClient:
    return client.create_lora_training_client(MODEL, rank=4, seed=1)


def session_of(training: TrainingClient) -> str:
    return training.model_id.partition(":train:")[0]


def samples(sampler: SamplingClient, count: int) -> list[Any]:
    futures = [
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=8, seed=seed)) for seed in range(count)
    ]
    return [future.result(PATIENCE_S).sequences[0].tokens for future in futures]


def post(nodes: Cluster, name: str, route: str, body: dict[str, Any]) -> tuple[int, Any, Any]:
    """Status, headers and body of a plain request to a node."""
    request = urllib.request.Request(
        f"{nodes.nodes[name].url}/api/v1/{route}",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-api-key": KEY},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            return reply.status, reply.headers, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, json.load(error)


def other(nodes: Cluster, name: str) -> str:
    """The id of the node that is not this one."""
    ((node_id,),) = nodes.query(
        "SELECT node_id FROM nodes WHERE role = 'full' AND state = 'alive' "
        f"AND name <> '{name}' ORDER BY number DESC LIMIT 1"
    )
    return node_id


def move(nodes: Cluster, key: str) -> None:
    """Have the other node own a key, and wait for that."""
    target = other(nodes, nodes.owner_of(key))
    anyio.run(want, nodes.database, key, target)
    owner = f"SELECT 1 FROM claims WHERE key = '{key}' AND node_id = '{target}'"
    until(lambda: nodes.query(owner), f"{key} does not move")


def spread_models(nodes: Cluster, client: ServiceClient, count: int) -> list[TrainingClient]:
    """New models, of which each node owns one at least."""
    runs = [new_model(client) for _ in range(count)]
    if len({nodes.owner_of(training.model_id) for training in runs}) == 1:
        move(nodes, runs[0].model_id)
    return runs


def epoch(nodes: Cluster, key: str) -> int:
    ((found,),) = nodes.query(f"SELECT epoch FROM claims WHERE key = '{key}'")
    return found


def step(model_id: str, seq_id: int) -> dict[str, Any]:
    return {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 1e-3}}


def test_a_request_for_a_frozen_owner_is_refused_until_another_node_answers(
    nodes: Cluster, client: ServiceClient
) -> None:
    training = new_model(client)
    losses(training, 1)
    owner = nodes.owner_of(training.model_id)
    frozen = nodes.nodes[owner]
    nodes.freeze(owner)
    told: list[tuple[int, str | None]] = []
    try:
        # Nothing that the frozen node does helps: it stays frozen.
        while not told or told[-1][0] != 200:
            status, headers, _ = post(nodes, GATE, "optim_step", step(training.model_id, 3))
            told.append((status, headers["retry-after"]))
            assert status in (200, 503), told
        assert all(status == 200 or retry == "1" for status, retry in told)
        assert nodes.owner_of(training.model_id) != owner
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    assert frozen.popen.wait(PATIENCE_S) == LEASE_LOST


def test_a_model_that_is_created_at_two_nodes_at_once_is_one_model(
    nodes: Cluster, client: ServiceClient
) -> None:
    session_id = session_of(new_model(client))
    with ThreadPoolExecutor(2) as pool:
        for number in range(8):
            body = {
                "session_id": session_id,
                "model_seq_id": 100 + number,
                "base_model": MODEL,
                "lora_config": {"rank": 4},
            }
            both = [pool.submit(post, nodes, name, "create_model", body) for name in ("a", "b")]
            (status, _, first), (again, _, second) = (one.result() for one in both)
            assert (status, again) == (200, 200), (first, second)
            assert first["request_id"] == second["request_id"]
    made = f"LIKE '{session_id}:train:10_%'"
    assert nodes.query(f"SELECT count(*) FROM operations WHERE op_id {made}") == [(8,)]
    assert nodes.query(f"SELECT count(*) FROM claims WHERE key {made}") == [(8,)]


def test_a_poll_that_waits_during_a_move_is_answered_by_the_new_owner(
    nodes: Cluster, client: ServiceClient
) -> None:
    training = new_model(client)
    losses(training, 1)
    key = training.model_id
    # Request 4 waits for request 3, which comes when the model has moved.
    status, _, future = post(nodes, GATE, "optim_step", step(key, 4))
    assert status == 200
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(post, nodes, GATE, "retrieve_future", future)
        before = epoch(nodes, key)
        move(nodes, key)
        assert not poll.done(), poll.result()
        assert post(nodes, GATE, "optim_step", step(key, 3))[0] == 200
        status, _, result = poll.result(PATIENCE_S)
    assert (status, epoch(nodes, key)) == (200, before + 1)
    assert result.get("type") != "try_again"


def test_samples_survive_moves_with_the_same_tokens(
    nodes: Cluster, client: ServiceClient, alone: tuple[list[float], list[Any]]
) -> None:
    training = new_model(client)
    assert losses(training, STEPS) == alone[0]
    sampler = training.save_weights_and_get_sampling_client()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            told = pool.submit(samples, sampler, SAMPLES)
            move(nodes, training.model_id)
            assert told.result(PATIENCE_S) == alone[1]


def test_draining_a_node_moves_its_models_while_they_train_with_the_same_bits(
    nodes: Cluster, client: ServiceClient, alone: tuple[list[float], list[Any]]
) -> None:
    runs = spread_models(nodes, client, 3)
    with ThreadPoolExecutor(3) as pool:
        told = [pool.submit(losses, training, STEPS) for training in runs]
        assert "owns nothing" in run(nodes, "cluster", "drain", "b")
        assert [each.result() for each in told] == [alone[0]] * 3
    assert {nodes.owner_of(training.model_id) for training in runs} == {"a"}
    assert nodes.nodes["b"].end() == 0


def test_the_first_node_is_lost_and_one_that_joins_gets_new_models(
    nodes: Cluster, client: ServiceClient, alone: tuple[list[float], list[Any]]
) -> None:
    ((leader,),) = nodes.query(
        "SELECT name FROM nodes WHERE role = 'full' AND state = 'alive' ORDER BY number LIMIT 1"
    )
    runs = spread_models(nodes, client, 2)
    told = [losses(training, STEPS // 2) for training in runs]
    nodes.kill(leader)
    for each, training in zip(told, runs, strict=True):
        each += losses(training, STEPS - STEPS // 2)
        assert each == alone[0]
        assert nodes.owner_of(training.model_id) != leader
    nodes.start(leader)
    owned_by(leader, nodes, lambda: new_model(client))
    # Somebody else ends the sessions of silent clients now.
    status, _, session = post(nodes, GATE, "create_session", {"tags": [], "sdk_version": "0"})
    assert status == 200
    beat = {"session_id": session["session_id"]}
    assert post(nodes, GATE, "session_heartbeat", beat)[0] == 200
    active = f"SELECT active FROM sessions WHERE session_id = '{beat['session_id']}'"
    until(lambda: nodes.query(active) == [(False,)], "a silent session stays")


def test_requests_are_held_while_there_is_no_engine_at_all(
    nodes: Cluster, client: ServiceClient
) -> None:
    training = new_model(client)
    losses(training, 1)
    session_id = session_of(training)
    for name in ("a", "b"):
        nodes.kill(name)
    new = {"session_id": session_id, "model_seq_id": 9, "lora_config": {"rank": 4}}
    asked = {
        "create_model": {**new, "base_model": MODEL},
        "optim_step": step(training.model_id, 3),
    }

    def ask(route: str) -> list[int]:
        """The answers, until one is no refusal; official clients send a request again ten times."""
        told: list[int] = []
        while 503 in told[-1:] or not told:
            told.append(post(nodes, GATE, route, asked[route])[0])
        return told

    with ThreadPoolExecutor(3) as pool:
        answers = {route: pool.submit(ask, route) for route in asked}
        # Not held: no node has ever served it.
        assert post(nodes, GATE, "create_model", {**new, "base_model": "other"})[0] == 400
        nodes.start("a")
        for route, answer in answers.items():
            told = answer.result()
            assert told[-1] == 200, (route, told)
            assert len(told) <= 10, (route, told)


def test_what_a_session_held_on_other_nodes_is_freed_when_it_ends(
    nodes: Cluster, client: ServiceClient
) -> None:
    service = ServiceClient(base_url=nodes.nodes[GATE].url, api_key=KEY)
    runs = spread_models(nodes, service, 2)
    for training in runs:
        losses(training, 2)
        samples(training.save_weights_and_get_sampling_client(), 2)
    samples(service.create_sampling_client(base_model=MODEL), 2)
    session_id = session_of(runs[0])
    like = f"LIKE '{session_id}%'"
    assert nodes.query(f"SELECT count(*) FROM claims WHERE key {like}") == [(3,)]
    service.close().result(PATIENCE_S)
    for left in (
        f"SELECT key FROM claims WHERE key {like}",
        f"SELECT sampler_id FROM samplers WHERE location IS NOT NULL AND session_id {like}",
        f"SELECT model_id FROM models WHERE snapshot_location IS NOT NULL AND session_id {like}",
        f"SELECT model_id FROM models WHERE snapshot_seq < 0 AND session_id {like}",
    ):
        until(lambda: not nodes.query(left), left)  # noqa: B023 - called at once
    files = [path.name for path in (nodes.folder / "weights").glob(f"*{session_id}*")]
    assert files == []


def test_without_the_database_for_longer_than_a_lease_every_node_keeps_what_it_has(
    nodes: Cluster,
    client: ServiceClient,
    own_postgres: PostgresServer,
    alone: tuple[list[float], list[Any]],
) -> None:
    runs = spread_models(nodes, client, 2)
    told = [losses(training, STEPS // 2) for training in runs]
    alive = "SELECT node_id FROM nodes WHERE state = 'alive' ORDER BY number"
    owned = f"SELECT key, node_id, epoch FROM claims WHERE key LIKE '{session_of(runs[0])}%'"
    before = nodes.query(alive), sorted(nodes.query(owned))
    clock = SystemClock()
    with ThreadPoolExecutor(2) as pool:
        own_postgres.stop()
        until_then = clock.now() + 2 * LEASE_S
        rest = [pool.submit(losses, training, STEPS - STEPS // 2) for training in runs]
        until(lambda: clock.now() > until_then, "time stands still")
        own_postgres.start()
        for each, more in zip(told, rest, strict=True):
            assert each + more.result() == alone[0]
    assert (nodes.query(alive), sorted(nodes.query(owned))) == before


def test_another_cluster_or_another_version_is_refused(nodes: Cluster, tmp_path: Path) -> None:
    def start(name: str) -> tuple[int, str]:
        return refused(
            tmp_path / name,
            *("--join", name, "--node-name", "x", "--database", nodes.database),
            *("--artifacts", f"file://{nodes.folder / 'weights'}"),
            *("--base-model", MODEL, "--port", "0", "--no-auth", "--set", f"lease_s={LEASE_S}"),
        )

    status, said = start("elsewhere")
    assert status == 1
    assert "belongs to the cluster 'test', and this node was to join 'elsewhere'" in said
    # As a node of a later release would have it.
    nodes.query(
        "INSERT INTO nodes (node_id, name, url, version, release, role, base_models, state, "
        "joined_at, lease_until, load) SELECT 'later#1', 'later', url, 2, '9.0', role, base_models,"
        # Not of a node that ended long ago, whose lease would have run out all the same.
        f" 'alive', joined_at, lease_until + 1000, load FROM nodes WHERE name = '{GATE}' "
        "RETURNING 1"
    )
    try:
        status, said = start("test")
    finally:
        nodes.query("DELETE FROM nodes WHERE name = 'later' RETURNING 1")
    assert status == 1
    assert "has version 2" in said
    assert "Install the same release everywhere" in said


@pytest.mark.parametrize("place", ["another folder", "a file", "no bucket"])
def test_a_node_that_does_not_share_the_weights_is_refused(
    nodes: Cluster, tmp_path: Path, s3_environment: None, place: str
) -> None:
    (tmp_path / "a file").write_text("in the place of the folder")
    url = "s3://no-such-bucket/weights" if place == "no bucket" else f"file://{tmp_path / place}"
    status, said = refused(
        tmp_path / "x",
        *("--join", "test", "--node-name", "x", "--database", nodes.database),
        *("--artifacts", url.replace(" ", "%20")),
        *("--base-model", MODEL, "--port", "0", "--no-auth", "--set", f"lease_s={LEASE_S}"),
    )
    assert status == 1
    assert ("keeps its weights elsewhere" if place == "another folder" else "cannot write") in said
    assert "Traceback" not in said
    newest = "SELECT state FROM nodes WHERE name = 'x' ORDER BY number DESC LIMIT 1"
    assert nodes.query(newest) == [("left",)]
