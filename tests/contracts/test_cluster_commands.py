"""`tinkex cluster` beside two nodes that hand over what they are asked for, on real databases."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from tests.patience import PATIENCE_S
from tinkex.cli.main import main
from tinkex.server.store.ownership import Node, NodeLoad, NodeModel
from tinkex.server.store.sql import SqlStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from tests.contracts.postgres import PostgresServer

pytestmark = pytest.mark.anyio
_LEASE_S = 600.0


@dataclass
class Member:
    """A node that does only this: it hands over keys when it is asked to."""

    store: Any
    node: Node
    # Mutable state: set when something has changed.
    changed: anyio.Event = field(default_factory=anyio.Event)

    def hint(self, _: str) -> None:
        self.changed.set()

    async def hand_over(self, drained_to: str) -> None:
        """Do what is asked for, until it is cancelled."""
        while True:
            # Before anything is read: a hint that comes meanwhile is not lost.
            self.changed = anyio.Event()
            nodes = {node.node_id: node for node in await self.store.nodes()}
            drains = nodes[self.node.node_id].state == "draining"
            for claim in await self.store.claims([self.node.node_id]):
                target = claim.wanted or (drained_to if drains else None)
                if target not in (None, self.node.node_id):
                    await self.store.reassign(claim, target)
            await self.changed.wait()


def _node(name: str, *bases: str) -> Node:
    served = tuple(NodeModel(name=b, max_context_length=8, vocab_size=8) for b in bases)
    url = f"http://127.0.0.1/{name}"
    return Node(node_id=f"{name}-1f2e3d", name=name, url=url, version=1, base_models=served)


@asynccontextmanager
async def _member(place: str, node: Node) -> AsyncGenerator[Member]:
    async with SqlStore.open(place) as store:
        membership = await store.join("c", node, _LEASE_S)
        member = Member(store, membership.node)
        store.on_hint(member.hint)
        yield member


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def place(postgres: PostgresServer) -> str:
    return postgres.new_place()


@pytest.fixture
def beside(capsys: pytest.CaptureFixture[str], place: str) -> Callable[..., Any]:
    """Run a command in another thread, on the same database."""

    async def run(*words: str) -> Ran:
        capsys.readouterr()
        command = ["cluster", *words, "--database", place]
        with anyio.fail_after(PATIENCE_S):
            status = await anyio.to_thread.run_sync(main, command)
        return Ran(status, *capsys.readouterr())

    return run


async def _own(member: Member, *keys: str) -> None:
    for key in keys:
        await member.store.claim(key, member.node.node_id, owner="t", base_model="m")


async def test_the_commands_of_the_reference_on_postgresql(place: str, beside: Any):
    async with (
        _member(place, _node("a", "m")) as a,
        _member(place, _node("b", "m", "n")) as b,
        anyio.create_task_group() as group,
    ):
        await _own(a, "k1", "k2", "k3", "k4")
        await a.store.renew(_LEASE_S, NodeLoad(queued_ops=7))
        shown = (await beside("status", "--models", "-f", "json")).json
        assert [(n["name"], n["owned"], n["queued_ops"]) for n in shown["nodes"]] == [
            ("a", 4, 7),
            ("b", 0, 0),
        ]
        assert {model["node"] for model in shown["models"]} == {"a"}

        planned = (await beside("rebalance", "--dry-run", "-f", "json")).json
        assert len(planned) == 2
        asked = (await beside("rebalance", "-f", "json")).json
        assert asked == planned
        assert (await beside("status", "-f", "json")).json["sum"]["moving"] == 2
        assert (await beside("rebalance", "-f", "json")).json == []

        group.start_soon(a.hand_over, b.node.node_id)
        moving = asked[0]["key"]
        moved = await beside("move", moving, "b", "--wait-s", str(PATIENCE_S))
        assert (moved.status, moved.out) == (0, f"{moving} is on node b.\n")

        drained = await beside("drain", "a", "--wait-s", str(PATIENCE_S))
        assert (drained.status, drained.out) == (0, "Node a drains and owns nothing.\n")
        assert {claim.node_id for claim in await a.store.claims()} == {b.node.node_id}
        assert {claim.epoch for claim in await a.store.claims()} == {2}
        refused = await beside("move", moving, "a")
        assert refused.status == 1
        assert "it is draining" in refused.err
        group.cancel_scope.cancel()


async def test_a_node_that_hands_nothing_over_is_reported_with_what_it_owns(
    place: str, beside: Any
):
    async with _member(place, _node("a", "m")) as a, _member(place, _node("b", "m")):
        await _own(a, "k1", "k2")
        failed = await beside("drain", "a", "--wait-s", "0.1")
        assert failed.status == 1
        assert "still owns 2 after 0.1 s: k1, k2" in failed.err
        late = await beside("move", "k1", "b", "--wait-s", "0.1", "-f", "json")
        assert late.status == 1
        assert late.json["moved"] is False
        assert (await beside("drain", "a", "--wait-s", "0")).status == 0


async def test_a_node_that_left_and_one_that_never_was_are_told_apart(place: str, beside: Any):
    async with _member(place, _node("a", "m")), _member(place, _node("b", "m")) as b:
        await b.store.leave()
        assert "has left the cluster" in (await beside("drain", "b")).err
        assert "There is no node 'c'" in (await beside("drain", "c")).err
        assert len((await beside("status", "-f", "json")).json["nodes"]) == 1
        assert len((await beside("status", "--all", "-f", "json")).json["nodes"]) == 2


async def test_a_silent_node_is_shown_and_refused_and_then_a_dead_one(place: str, beside: Any):
    async with _member(place, _node("a", "m")) as a, _member(place, _node("b", "m")) as b:
        await _own(a, "k1")
        await _own(b, "k2")
        await b.store.renew(0.0, NodeLoad())
        shown = (await beside("status", "-f", "json")).json
        assert shown["sum"]["states"] == {"alive": 1, "silent": 1}
        assert "it is silent" in (await beside("move", "k1", "b")).err
        assert await a.store.declare_dead(b.node.node_id)
        assert "was declared dead" in (await beside("move", "k1", "b")).err
        assert "was declared dead" in (await beside("drain", "b")).err
        assert "is not in the cluster any more" in (await beside("move", "k2", "a")).err
        # It still owns something, so it is shown.
        shown = (await beside("status", "-f", "json")).json
        assert [node["state"] for node in shown["nodes"]] == ["alive", "dead"]


async def test_a_server_without_a_cluster_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    database = f"sqlite:///{tmp_path}/one.db"
    async with SqlStore.open(tmp_path / "one.db"):
        pass
    for words in (["status"], ["drain", "a"], ["move", "k", "a"], ["rebalance"]):
        command = ["cluster", *words, "--database", database]
        assert await anyio.to_thread.run_sync(main, command) == 1
        assert "There is no cluster in this database" in capsys.readouterr().err
