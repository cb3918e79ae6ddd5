"""The clients of `test_matrix` and the recipes, through a node of a cluster that owns nothing.

Its one other node has the engine, so every request about a model is passed on. Clients must not
see the difference: they get the same numbers as from a server alone.
"""

from __future__ import annotations

import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from interpreters import finish
from test_matrix import ABSENT, NEWEST, VERSIONS, absent, failures, tell
from test_recipes import SHORTENED, for_the_official_client

from tests.cluster.nodes import Cluster, cluster
from tests.contracts.conftest import postgres
from tests.e2e.serving import KEY, MODEL, served
from tests.patience import PATIENCE_S, until
from tinkex import ServiceClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from interpreters import Interpreters

    from tests.contracts.postgres import PostgresServer

__all__ = ["postgres"]

pytestmark = [pytest.mark.official]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("nodes")
    with cluster(folder, postgres.new_place(), "engine") as found:
        front = found.start("front", "--role", "api")
        until(lambda: lists_the_model(front.url), "the node does not know of the other one")
        yield found


def lists_the_model(url: str) -> bool:
    where = f"{url}/api/v1/get_server_capabilities"
    asked = urllib.request.Request(where, headers={"x-api-key": KEY})
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as reply:
        return MODEL.encode() in reply.read()


@pytest.fixture(scope="module")
def url(nodes: Cluster) -> str:
    return nodes.nodes["front"].url


@pytest.fixture(scope="module")
def alone(interpreters: Interpreters, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What our own client sees of a server alone."""
    folder = tmp_path_factory.mktemp("alone")
    with served(folder / "data") as server:
        return tell(interpreters, interpreters.cookbook, "tinkex", server.url, folder)


def test_our_own_client_sees_what_a_server_alone_shows(
    url: str, alone: dict[str, Any], interpreters: Interpreters, tmp_path: Path
) -> None:
    seen = tell(interpreters, interpreters.cookbook, "tinkex", url, tmp_path)
    assert failures(seen) == {}
    assert seen == alone


@pytest.mark.parametrize("version", VERSIONS)
def test_an_official_client_sees_what_a_server_alone_shows(
    version: str, url: str, alone: dict[str, Any], interpreters: Interpreters, tmp_path: Path
) -> None:
    python = interpreters.version("official" if version == NEWEST else f"official-{version}")
    seen = tell(interpreters, python, "tinker", url, tmp_path)
    assert failures(seen) == {}
    assert absent(seen) == ABSENT[version]
    present = {name: what for name, what in seen.items() if name not in ABSENT[version]}
    assert present == {name: alone[name] for name in present}


@pytest.mark.parametrize(
    "recipe",
    [
        "pipeline.py",
        pytest.param("sweep.py", marks=pytest.mark.exhaustive),
        pytest.param("rollout_processes.py", marks=pytest.mark.exhaustive),
    ],
)
def test_a_recipe_runs_with_the_official_client(
    recipe: str, url: str, interpreters: Interpreters, tmp_path: Path
) -> None:
    script = tmp_path / recipe
    script.write_text(for_the_official_client(recipe))
    arguments = [str(script), *SHORTENED[recipe]]
    program = interpreters.start(interpreters.official, arguments, home=tmp_path, base_url=url)
    assert finish(program).splitlines()[-1].startswith("ok: ")


def test_the_node_that_clients_talked_to_owned_nothing(nodes: Cluster, url: str) -> None:
    # Its own client: those of the other tests may have talked to the node of another process.
    with ServiceClient(base_url=url, api_key=KEY) as service:
        service.create_lora_training_client(MODEL, rank=4)
        owners = nodes.query("SELECT DISTINCT n.name FROM claims c JOIN nodes n USING (node_id)")
    assert owners == [("engine",)]
    assert nodes.metric("front", "tinkex_cluster_passed_on_total") > 0
