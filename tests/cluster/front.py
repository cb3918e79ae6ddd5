"""A cluster that clients know only one node of: two nodes with engines behind one without.

The two serve different base models, and every tenant has keys of its own.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.cluster.nodes import Cluster
from tests.e2e.serving import MODEL
from tests.patience import PATIENCE_S, until
from tests.unit.engine.models.reference import random_model
from tinkex import AdamParams, Datum, ModelInput, ServiceClient
from tinkex.clock import SystemClock
from tinkex.engine.models.tokenizer import byte_tokenizer
from tinkex.server.api.identity import KeyLimits, make_key
from tinkex.server.store.sql import SqlStore

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from tinkex import TrainingClient

OTHER = "test/other"
NODE_OF = {MODEL: "a", OTHER: "b"}
MODELS = list(NODE_OF)
# Of clients that talk to "a" or "b" themselves, and of requests that are not passed on.
OWNERS_RATE = 2.0
PER_ADDRESS = 8


@dataclass(frozen=True)
class Reply:
    """A reply, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Front:
    """The node "front" and its cluster."""

    cluster: Cluster
    operator: str = ""

    @property
    def url(self) -> str:
        return self.cluster.nodes["front"].url

    def key(self, owner: str, **limits: Any) -> str:
        """A new key of a tenant."""

        async def make() -> str:
            async with SqlStore.open(self.cluster.database) as store:
                now = SystemClock().wall()
                return (await make_key(store, now, owner=owner, limits=KeyLimits(**limits)))[0]

        return asyncio.run(make())

    def client(self, key: str) -> ServiceClient:
        return ServiceClient(base_url=self.url, api_key=key)

    def connection(self, node: str = "front", source: str = "127.0.0.1") -> Any:
        port = int(self.cluster.nodes[node].port)
        return http.client.HTTPConnection(
            "127.0.0.1", port, timeout=PATIENCE_S, source_address=(source, 0)
        )

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        key: str = "",
        node: str = "front",
        source: str = "127.0.0.1",
        **headers: str,
    ) -> Reply:
        """One request as it is; names of headers have underscores here."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = None if body is None else json.dumps(body).encode()
        connection = self.connection(node, source)
        connection.request(method, path, sent, {"x-api-key": key, **given})
        reply = connection.getresponse()
        found = {name.lower(): value for name, value in reply.getheaders()}
        content = reply.read()
        connection.close()
        return Reply(reply.status, found, content)

    def post(self, name: str, body: object, key: str, **headers: str) -> Reply:
        return self.ask("POST", f"/api/v1/{name}", body, key=key, **headers)

    def result(self, request_id: str, key: str, **headers: str) -> Reply:
        """A result, waited for."""
        while True:
            reply = self.post("retrieve_future", {"request_id": request_id}, key, **headers)
            if b"try_again" not in reply.body:
                return reply

    def models(self) -> set[str]:
        """The base models that the node knows of."""
        reply = self.ask("GET", "/api/v1/get_server_capabilities", key=self.operator)
        return {model["model_name"] for model in reply.json["supported_models"]}

    def metric(self, node: str, name: str) -> float:
        """The value of a node's metric; 0 when the node refuses to say it now."""
        reply = self.ask("GET", "/metrics", key=self.operator, node=node)
        lines = reply.body.decode().splitlines() if reply.status == 200 else []
        found = (line for line in lines if line.split("{")[0].split()[0] == name)
        return sum(float(line.split()[-1]) for line in found)

    def log(self, node: str) -> str:
        return self.cluster.nodes[node].log.read_text()


@contextmanager
def front(folder: Path, database: str) -> Generator[Front]:
    """The cluster; it ends with the block."""
    (folder / "weights").mkdir(parents=True)
    other = folder / "other"
    random_model("Llama", vocab_size=260, max_position_embeddings=8192).save_pretrained(other)
    (other / "tokenizer.json").write_text(byte_tokenizer().json)
    # Owners do not count what another node has counted, so their limits are low.
    owners = ("--set", f"max_requests_per_s={OWNERS_RATE}")
    owners += ("--set", f"max_connections_per_address={PER_ADDRESS}")
    common = ("--set", "attach_after_s=0")
    cluster = Cluster(folder, database, common, auth=True)
    found = Front(cluster, Front(cluster).key("operator"))
    with cluster.stack:
        cluster.start("a", *owners, wait=False)
        cluster.start("b", *owners, wait=False, model=f"{OTHER}={other}")
        cluster.start("front", "--role", "api", wait=False)
        for served in cluster.nodes.values():
            served.wait_ready()
        until(lambda: found.models() == set(MODELS), "the nodes do not know each other")
        yield found


def datum() -> Datum:
    tokens = list(range(1, 10))
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})


def trained(client: ServiceClient, model: str) -> TrainingClient:
    """A run after one step."""
    training = client.create_lora_training_client(model, rank=4, seed=1)
    training.forward_backward([datum()], "cross_entropy")
    training.optim_step(AdamParams(learning_rate=0.1)).result(PATIENCE_S)
    return training
