"""`tinkex cluster`: what its commands ask nodes for, how long they wait, and what they refuse."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from tinkex.cli.cluster import drain_node, find_node, move_key, rebalance_all, undo_drain
from tinkex.cli.cluster_status import show_status
from tinkex.cli.command_errors import CommandError
from tinkex.cli.commands import FAILED, MISUSED
from tinkex.server.store.ownership import Claim, Node, NodeLoad, NodeModel, Ownership
from tinkex.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from conftest import Ran

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def _node(name: str, *bases: str, **changes: Any) -> Node:
    served = [NodeModel(name=base, max_context_length=8, vocab_size=8) for base in bases or ["m"]]
    node = Node(node_id=f"{name}-1234567890", name=name, url=f"http://{name}:8000", version=1)
    return replace(node, base_models=tuple(served), number=ord(name[0]), **changes)


def _claim(key: str, node: Node, **changes: Any) -> Claim:
    claim = Claim(key=key, node_id=node.node_id, epoch=1, owner="t", base_model="m")
    return replace(claim, **changes)


class Records:
    """The part of a store that the commands use. Nodes do what they are asked after some reads."""

    def __init__(self, nodes: Iterable[Node], claims: Iterable[Claim] = ()) -> None:
        # Mutable state: the records, and how many reads are left before an owner does something.
        self.known = {node.node_id: node for node in nodes}
        self.owned = {claim.key: claim for claim in claims}
        self.reads_before = 10**9

    @property
    def ownership(self) -> Ownership:
        return cast("Ownership", self)

    async def nodes(self) -> list[Node]:
        return list(self.known.values())

    async def drain(self, name: str, *, undo: bool = False) -> bool:
        self.known[name] = replace(self.known[name], state="alive" if undo else "draining")
        return True

    async def want(self, key: str, node_id: str | None) -> bool:
        if key not in self.owned:
            return False
        self.owned[key] = replace(self.owned[key], wanted=node_id)
        return True

    async def get_claim(self, key: str) -> Claim | None:
        self._pass_on()
        return self.owned.get(key)

    async def claims(self, node_ids: Iterable[str] | None = None) -> list[Claim]:
        self._pass_on()
        names = None if node_ids is None else set(node_ids)
        return [c for c in self.owned.values() if names is None or c.node_id in names]

    def _pass_on(self) -> None:
        self.reads_before -= 1
        if self.reads_before > 0:
            return
        for claim in self.owned.values():
            leaves = self.known[claim.node_id].state == "draining"
            target = claim.wanted or ("b-1234567890" if leaves else None)
            if target is not None:
                moved = replace(claim, node_id=target, wanted=None, epoch=claim.epoch + 1)
                self.owned[claim.key] = moved
                return


A, B = _node("a"), _node("b")


# -- drain -----------------------------------------------------------------------------------------


async def test_drain_waits_until_the_node_owns_nothing(capsys: pytest.CaptureFixture[str]):
    records = Records([A, B], [_claim("k1", A), _claim("k2", A), _claim("k3", B)])
    records.reads_before = 3
    clock = FakeClock()
    async with clock.running():
        node, left = await drain_node(records.ownership, "a", 60.0, clock)
    assert (node.name, left) == ("a", [])
    assert records.known[A.node_id].state == "draining"
    assert 0 < clock.now() < 60
    assert capsys.readouterr().err.splitlines() == ["Node a owns 1.", "Node a owns 0."]


async def test_drain_says_what_is_left_when_the_time_is_up():
    records = Records([A, B], [_claim("k1", A), _claim("k2", B)])
    clock = FakeClock()
    async with clock.running():
        _, left = await drain_node(records.ownership, "a", 7.0, clock)
    assert [claim.key for claim in left] == ["k1"]
    assert clock.now() == 7.0


async def test_drain_without_a_wait_asks_and_returns():
    records = Records([A, B], [_claim("k1", A)])
    clock = FakeClock()
    _, left = await drain_node(records.ownership, "a", 0.0, clock)
    assert len(left) == 1
    assert records.known[A.node_id].state == "draining"


async def test_drain_says_at_once_when_no_other_node_can_take_something(
    capsys: pytest.CaptureFixture[str],
):
    records = Records([A, _node("b", "other")], [_claim("k1", A)])
    await drain_node(records.ownership, "a", 0.0, FakeClock())
    text = capsys.readouterr().err
    assert "Nothing of m can be handed over: no node can take 'm' now: a is draining" in text
    assert "'other' by b" in text


async def test_a_drain_is_taken_back():
    records = Records([A, B], [_claim("k1", A)])
    await drain_node(records.ownership, "a", 0.0, FakeClock())
    assert (await undo_drain(records.ownership, "a")).name == "a"
    assert records.known[A.node_id].state == "alive"
    with pytest.raises(CommandError, match="no node 'c'"):
        await undo_drain(records.ownership, "c")


# -- move ------------------------------------------------------------------------------------------


async def test_move_waits_until_the_key_is_there():
    records = Records([A, B], [_claim("k", A)])
    records.reads_before = 4
    clock = FakeClock()
    async with clock.running():
        node, done = await move_key(records.ownership, "k", "b", 60.0, clock)
    assert (node.name, done) == ("b", True)
    assert records.owned["k"].epoch == 2
    assert 0 < clock.now() < 60


async def test_move_that_takes_too_long_leaves_the_request_standing():
    records = Records([A, B], [_claim("k", A)])
    clock = FakeClock()
    async with clock.running():
        assert await move_key(records.ownership, "k", "b", 3.0, clock) == (B, False)
    assert records.owned["k"].wanted == B.node_id


async def test_move_to_where_it_is_takes_back_an_earlier_request():
    records = Records([A, B], [_claim("k", A, wanted=B.node_id)])
    assert await move_key(records.ownership, "k", "a", 0.0, FakeClock()) == (A, True)
    assert records.owned["k"].wanted is None


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (_node("b", "other"), "does not serve m, but other"),
        (_node("b", state="draining"), "it is draining"),
        (_node("b", expired=True), "it is silent"),
        (_node("b", role="api"), "its role is api"),
        (_node("b", state="dead"), "was declared dead"),
        (_node("b", state="left"), "has left"),
        (_node("c"), "There is no node 'b'"),
    ],
)
async def test_move_to_a_node_that_cannot_take_it_changes_nothing(target: Node, said: str):
    records = Records([A, target, _node("d")], [_claim("k", A)])
    with pytest.raises(CommandError) as failed:
        await move_key(records.ownership, "k", "b", 0.0, FakeClock())
    assert said in str(failed.value)
    assert failed.value.hint
    assert failed.value.status == FAILED
    assert records.owned["k"].wanted is None


async def test_an_unknown_key_is_not_moved():
    with pytest.raises(CommandError, match="No node owns 'k'") as failed:
        await move_key(Records([A, B]).ownership, "k", "b", 0.0, FakeClock())
    assert "--models" in failed.value.hint


async def test_a_key_of_a_dead_node_is_not_moved_but_taken_over():
    gone = _node("c", state="dead")
    records = Records([A, B, gone], [_claim("k", gone)])
    with pytest.raises(CommandError, match="Node c, which owns k, is not in the cluster any more"):
        await move_key(records.ownership, "k", "b", 0.0, FakeClock())


@pytest.mark.parametrize(
    ("later", "said"),
    [(_claim("k", A, wanted="c"), "was sent to another node"), (None, "No node owns 'k'")],
)
async def test_a_key_that_goes_elsewhere_or_ends_meanwhile_ends_the_wait(
    later: Claim | None, said: str
):
    records = Records([A, B], [_claim("k", A)])
    clock = FakeClock()

    async def change() -> None:
        await clock.sleep(2.0)
        records.owned = {} if later is None else {"k": later}

    async with clock.running(), anyio.create_task_group() as group:
        group.start_soon(change)
        with pytest.raises(CommandError, match=said):
            await move_key(records.ownership, "k", "b", 60.0, clock)
    assert clock.now() < 60


# -- rebalance -------------------------------------------------------------------------------------


async def test_rebalance_asks_once_and_a_dry_run_not_at_all():
    records = Records([A, B], [_claim(f"k{i}", A) for i in range(4)])
    dry = await rebalance_all(records.ownership, 10, dry_run=True)
    assert all(claim.wanted is None for claim in records.owned.values())
    done = await rebalance_all(records.ownership, 10, dry_run=False)
    assert done == dry
    wanted = {key: claim.wanted for key, claim in records.owned.items() if claim.wanted}
    assert wanted == {move.claim.key: B.node_id for move in done}
    assert len(wanted) == 2
    assert await rebalance_all(records.ownership, 10, dry_run=False) == []


# -- naming nodes ----------------------------------------------------------------------------------


def test_a_node_is_named_by_its_name_its_id_or_the_beginning_of_it():
    for text in ("a", A.node_id, "a-12"):
        assert find_node([A, B], text) == A


def test_the_living_node_of_a_name_is_meant():
    earlier = replace(A, node_id="a-0", state="dead")
    assert find_node([earlier, A], "a") == A


def test_a_name_of_several_nodes_is_a_misuse_that_lists_their_ids():
    other = replace(A, node_id="a-2")
    with pytest.raises(CommandError, match="several nodes") as failed:
        find_node([A, other], "a")
    assert failed.value.status == MISUSED
    assert A.node_id in failed.value.hint
    assert "a-2" in failed.value.hint
    assert find_node([A, other], "a-2") == other


async def test_a_database_without_a_cluster_is_an_error():
    for call in (
        drain_node(Records([]).ownership, "a", 0.0, FakeClock()),
        move_key(Records([]).ownership, "k", "a", 0.0, FakeClock()),
        rebalance_all(Records([]).ownership, 1, dry_run=True),
    ):
        with pytest.raises(CommandError, match="no cluster") as failed:
            await call
        assert "--join" in failed.value.hint


def test_without_a_database_there_is_no_cluster_either(run: Callable[..., Ran], tmp_path: Path):
    for words in (("status",), ("drain", "a"), ("move", "k", "a"), ("rebalance",)):
        failed = run("cluster", *words, "--data-dir", tmp_path / "none")
        assert failed.status == MISUSED
        assert "--database" in failed.err


@pytest.mark.parametrize("wait", ["-1", "nan", "soon", "86401"])
def test_a_wait_is_bounded(run: Callable[..., Ran], wait: str):
    failed = run("cluster", "drain", "a", f"--wait-s={wait}")
    assert failed.status == MISUSED
    assert "from 0 to 86400" in failed.err


# -- status ----------------------------------------------------------------------------------------

BUSY = _node(
    "a",
    lease_until=1012.0,
    load=NodeLoad(queued_ops=3, samples_running=5, resident_bytes=2048, capacity_bytes=4096),
)
SILENT = _node("b", "m", "n", state="draining", expired=True, lease_until=990.0)
DEAD = _node("c", state="dead")
CLAIMS = [_claim("k1", BUSY), _claim("k2", SILENT, wanted=BUSY.node_id, epoch=4, owner="u")]


def _status(capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    words = {"format": "table", "models": False, "all": False, **changes}
    show_status(argparse.Namespace(**words), [BUSY, SILENT, DEAD], CLAIMS, 1000.0)
    return capsys.readouterr().out


def test_status_is_a_table_on_a_wide_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "160")
    lines = _status(capsys).splitlines()
    assert lines[0].split()[:3] == ["Name", "State", "Role"]
    first, second = (" ".join(line.split()) for line in lines[2:4])
    assert first == "a alive full m 1 3 5 2.0 KB of 4.0 KB 12 s left http://a:8000 12345678"
    assert second == "b silent full m, n 1 0 0 0 B ran out 10 s ago http://b:8000 12345678"
    assert lines[4:] == [
        "",
        "Nodes: 2 (1 alive, 1 silent). Owned: 2 (1 to move).",
        "Queue: 3. Samples: 5. Resident: 2.0 KB.",
    ]


def test_status_fits_eighty_columns_as_blocks(capsys: pytest.CaptureFixture[str]):
    shown = _status(capsys, models=True)
    assert max(map(len, shown.splitlines())) <= 80
    assert "Name:" in shown


def test_status_lists_keys_with_the_names_of_their_nodes(capsys: pytest.CaptureFixture[str]):
    lines = [" ".join(line.split()) for line in _status(capsys, models=True).splitlines()]
    assert "k1 t m a 1 -" in lines
    assert "k2 u m b 4 a" in lines


def test_nodes_that_ended_are_shown_when_asked_for_or_while_they_own_something(
    capsys: pytest.CaptureFixture[str],
):
    assert "http://c:8000" not in _status(capsys)
    assert "http://c:8000" in _status(capsys, all=True)
    left = argparse.Namespace(format="table", models=False, all=False)
    show_status(left, [BUSY, DEAD], [_claim("k", DEAD)], 1000.0)
    assert "http://c:8000" in capsys.readouterr().out


def test_status_as_json_has_everything(capsys: pytest.CaptureFixture[str]):
    data = json.loads(_status(capsys, format="json", models=True))
    assert [node["state"] for node in data["nodes"]] == ["alive", "silent"]
    assert data["nodes"][0]["owned"] == 1
    assert data["nodes"][1]["capacity_bytes"] is None
    assert data["sum"] == {
        "nodes": 2,
        "states": {"alive": 1, "silent": 1},
        "owned": 2,
        "moving": 1,
        "queued_ops": 3,
        "samples_running": 5,
        "resident_bytes": 2048,
    }
    assert data["models"][1]["wanted"] == BUSY.node_id
    assert "models" not in json.loads(_status(capsys, format="json"))
