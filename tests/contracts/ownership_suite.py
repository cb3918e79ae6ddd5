"""What every store must do about nodes and claims; a subclass says how stores are made.

`ClusterSuite` needs two stores on the same records, which SQLite refuses.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tests.contracts.store_suite import (
    DONE,
    checkpoint,
    key,
    model,
    sample,
    sampler,
    session,
    step,
)
from tests.patience import PATIENCE_S
from tinkex.errors import StorageError
from tinkex.server.store.ownership import (
    ClaimLostError,
    LeaseLostError,
    Node,
    NodeLoad,
    NodeModel,
)
from tinkex.server.store.records import OperationOutcome, Reserved
from tinkex.server.store.sql.overflow import ROOM_BYTES
from tinkex.types import SessionCancelled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from tinkex.server import Store
    from tinkex.server.store.records import Occupied

LEASE_S = 3600.0
KEY = "s:train:0"
TINY = NodeModel(name="tiny", max_context_length=64, vocab_size=256)


def node(name: str = "a", **more: Any) -> Node:
    more = {"version": 1, "url": f"http://{name}", **more}
    return Node(node_id=f"{name}-1", name=name, **more)


class Cluster:
    """Opens stores on one place, and joins them."""

    def __init__(self, suite: OwnershipSuite, place: Any, stack: AsyncExitStack) -> None:
        self._suite = suite
        self._place = place
        self._stack = stack

    async def store(self) -> Store:
        """One more store, which has not joined."""
        return await self._stack.enter_async_context(self._suite.open_store(self._place))

    async def joined(self, name: str, lease_s: float = LEASE_S, **more: Any) -> Store:
        store = await self.store()
        await store.join("c", node(name, **more), lease_s)
        return store


class OwnershipSuite:
    """One node."""

    pytestmark = pytest.mark.anyio

    def open_store(self, place: Any) -> AbstractAsyncContextManager[Store]:
        raise NotImplementedError

    @pytest.fixture
    async def cluster(self, place: Any) -> AsyncIterator[Cluster]:
        async with AsyncExitStack() as stack:
            yield Cluster(self, place, stack)

    async def test_a_node_that_joins_is_known_with_all_it_says(self, cluster: Cluster) -> None:
        store = await cluster.store()
        assert await store.nodes() == []
        told = node(role="full", release="9", base_models=(TINY,))
        membership = await store.join("c", told, LEASE_S)
        assert membership.alone
        assert len(membership.secret) == 32
        joined = membership.node
        assert (joined.state, joined.expired, joined.serving) == ("alive", False, True)
        assert joined.lease_until == pytest.approx(membership.now + LEASE_S)
        assert await store.nodes() == [joined]
        assert replace(joined, number=0, joined_at=0.0, lease_until=0.0) == told

    async def test_a_renewal_extends_the_lease_and_reports_the_load(self, cluster: Cluster) -> None:
        store = await cluster.joined("a", lease_s=0.0)
        load = NodeLoad(models=2, tenants={"o": 2}, resident_bytes=7, capacity_bytes=9)
        now = await store.renew(LEASE_S, load)
        (found,) = await store.nodes()
        assert found.load == load
        assert found.lease_until == pytest.approx(now + LEASE_S)
        assert not found.expired

    async def test_another_clusters_name_is_refused_with_both_names(self, place: Any) -> None:
        async with self.open_store(place) as store:
            await store.join("c", node("a"), LEASE_S)
        async with self.open_store(place) as store:
            with pytest.raises(StorageError, match=r"'c'.*'other'"):
                await store.join("other", node("b"), LEASE_S)
            assert [n.name for n in await store.nodes()] == ["a"]

    async def test_a_node_that_left_writes_nothing(self, cluster: Cluster) -> None:
        store = await cluster.joined("a")
        await store.leave()
        with pytest.raises(LeaseLostError) as caught:
            await store.put_session(session())
        assert not caught.value.retryable
        with pytest.raises(LeaseLostError):
            await store.renew(LEASE_S, NodeLoad())
        assert [n.state for n in await store.nodes()] == ["left"]
        assert await store.get_session("s") is None

    async def test_a_node_that_is_draining_still_works(self, cluster: Cluster) -> None:
        store = await cluster.joined("a")
        assert not await store.drain("b")
        assert await store.drain("a")
        assert await store.drain("a-1")
        (found,) = await store.nodes()
        assert (found.state, found.serving) == ("draining", False)
        await store.renew(LEASE_S, NodeLoad())
        await store.put_session(session())
        assert not await store.drain("b", undo=True)
        assert await store.drain("a", undo=True)
        (found,) = await store.nodes()
        assert (found.state, found.serving) == ("alive", True)

    async def test_a_node_that_has_ended_stays_so(self, cluster: Cluster) -> None:
        store, command = await cluster.joined("a"), await cluster.store()
        await store.leave()
        assert not await command.drain("a")
        assert not await command.drain("a", undo=True)
        assert [node.state for node in await command.nodes()] == ["left"]

    async def test_a_key_is_claimed_once(self, cluster: Cluster) -> None:
        store = await cluster.joined("a")
        assert await store.get_claim(KEY) is None
        claim = await store.claim(KEY, "a-1", owner="o", base_model="b")
        assert (claim.node_id, claim.epoch, claim.owner, claim.base_model) == ("a-1", 1, "o", "b")
        assert claim.since > 0
        assert await store.claim(KEY, "b-1", owner="p", base_model="x") == claim
        assert await store.get_claim(KEY) == claim
        assert await store.claims() == await store.claims(["a-1"]) == [claim]
        assert await store.claims(["b-1"]) == []

    async def test_a_key_may_be_wanted_elsewhere(self, cluster: Cluster) -> None:
        store = await cluster.joined("a")
        assert not await store.want(KEY, "b-1")
        claim = await store.claim(KEY, "a-1", owner="o", base_model="b")
        assert await store.want(KEY, "b-1")
        assert await store.get_claim(KEY) == replace(claim, wanted="b-1")
        assert await store.want(KEY, None)
        assert await store.get_claim(KEY) == claim

    async def test_a_claim_is_released_only_as_it_is(self, cluster: Cluster) -> None:
        store = await cluster.joined("a")
        claim = await store.claim(KEY, "a-1", owner="o", base_model="b")
        assert not await store.release(replace(claim, epoch=2))
        assert await store.release(claim)
        assert not await store.release(claim)
        assert await store.get_claim(KEY) is None

    async def test_a_node_writes_only_for_keys_it_has_adopted(self, cluster: Cluster) -> None:
        store = await cluster.joined("a")
        await store.add_model(model())
        claim = await store.claim(KEY, "a-1", owner="o", base_model="b")
        with pytest.raises(ClaimLostError):
            await store.submit(step(1))
        with pytest.raises(ClaimLostError):
            await store.change_model(KEY, snapshot_location="x", snapshot_seq=1)
        with pytest.raises(ClaimLostError):
            await store.trim_journal(KEY, 1)
        # What is not the owner's may be changed by every node.
        await store.change_model(KEY, project_id="p")
        await store.adopt(claim)
        assert (await store.submit(step(1)))[1]
        assert await store.finish(step(1).op_id, DONE, 1.0)
        assert not await store.finish(step(1).op_id, DONE, 1.0)
        await store.change_model(KEY, snapshot_location="x", snapshot_seq=1)
        await store.trim_journal(KEY, 1)
        found = await store.get_model(KEY)
        assert found is not None
        assert (found.project_id, found.snapshot_location) == ("p", "x")

    async def test_unfinished_operations_are_known_by_key(self, cluster: Cluster) -> None:
        store = await cluster.joined("a")
        for number in range(2):
            key = f"s:train:{number}"
            claim = await store.claim(key, "a-1", owner="o", base_model="b")
            await store.adopt(claim)
            await store.submit(step(1, run=key))
        published = sampler("s:sample:0", model_id="s:train:1")
        await store.add_sampler(published)
        await store.submit(sample(1))
        await store.submit(sample(1, "s:sample:1"))
        assert {op.op_id for op in await store.pending("s:train:0")} == {"s:train:0:1"}
        assert {op.op_id for op in await store.pending("s:train:1")} == {
            "s:train:1:1",
            "s:sample:0:1",
        }
        assert [op.op_id for op in await store.pending("s:sample:1")] == ["s:sample:1:1"]
        assert len(await store.pending()) == 4

    async def test_what_is_given_up_is_forgotten_and_adopted_again(self, cluster: Cluster) -> None:
        store = await cluster.joined("a")
        claim = await store.claim(KEY, "a-1", owner="o", base_model="b")
        await store.adopt(claim)
        await store.submit(step(1, body=b"one"))
        await store.finish(step(1).op_id, DONE, 1.0)
        await store.submit(step(2, body=b"two"))
        await store.add_sampler(sampler(model_id=KEY))
        await store.submit(sample(1))
        await store.submit(sample(2))
        await store.finish(sample(2).op_id, DONE, 1.0)
        await store.submit(sample(3, "s:sample:9"))
        assert sorted(store.give_up(claim)) == ["s:sample:0:1", "s:sample:0:2"]
        assert [op.op_id for op in await store.pending()] == ["s:sample:9:3"]
        with pytest.raises(ClaimLostError):
            await store.submit(step(3))
        await store.adopt(claim)
        (again,) = await store.pending(KEY)
        assert (again.op_id, again.body) == (step(2).op_id, b"two")
        assert not (await store.submit(step(1)))[1]
        assert not (await store.submit(step(2)))[1]
        assert (await store.submit(step(3)))[1]

    async def test_only_a_present_claim_is_adopted(self, cluster: Cluster) -> None:
        store = await cluster.joined("a")
        claim = await store.claim(KEY, "a-1", owner="o", base_model="b")
        with pytest.raises(ClaimLostError):
            await store.adopt(replace(claim, epoch=2))
        elsewhere = await store.claim("other", "b-1", owner="o", base_model="b")
        with pytest.raises(ClaimLostError):
            await store.adopt(elsewhere)

    async def test_before_joining_there_is_nothing_to_renew(self, cluster: Cluster) -> None:
        store = await cluster.store()
        with pytest.raises(StorageError, match="has not joined"):
            await store.renew(LEASE_S, NodeLoad())
        # And nothing is checked.
        assert (await store.submit(step(1)))[1]
        assert await store.finish(step(1).op_id, DONE, 1.0)

    # -- changes of records that others change, too -----------------------------------------------

    async def test_a_session_ends_once(self, cluster: Cluster) -> None:
        store = await cluster.store()
        await store.put_session(session())
        await store.touch_session("s", 7.0)
        await store.change_session("s", project_id="p")
        first, second = SessionCancelled(detail="first"), SessionCancelled(detail="second")
        assert await store.end_session(session(), first)
        assert not await store.end_session(session(), second)
        assert not await store.end_session(session("unknown"), second)
        found = await store.get_session("s")
        assert found == session(last_seen_at=7.0, project_id="p", status=first)
        assert await store.sessions(active=True) == []

    async def test_a_model_is_moved_from_an_active_session_only(self, cluster: Cluster) -> None:
        store = await cluster.store()
        for name in ("s", "t", "u"):
            await store.put_session(session(name))
        await store.add_model(model())
        assert await store.move_model(model(), "t")
        assert not await store.move_model(model(), "u")
        moved = replace(model(), session_id="t")
        assert await store.get_model(KEY) == moved
        await store.end_session(session("t"), SessionCancelled(detail="over"))
        assert not await store.move_model(moved, "u")
        assert not await store.move_model(model("unknown"), "u")

    async def test_a_checkpoint_that_was_overwritten_is_not_changed(self, cluster: Cluster) -> None:
        store = await cluster.store()
        old, new = checkpoint(), replace(checkpoint(), location="new")
        await store.put_checkpoint(old)
        assert await store.change_checkpoint(old, public=True)
        assert await store.get_checkpoint(old.path) == replace(old, public=True)
        await store.put_checkpoint(new)
        assert not await store.change_checkpoint(old, public=True)
        assert not await store.delete_checkpoint(old)
        assert await store.get_checkpoint(old.path) == new
        assert await store.delete_checkpoint(new)
        assert not await store.change_checkpoint(new, public=True)

    async def test_room_is_reserved_while_there_is_some(self, cluster: Cluster) -> None:
        store = await cluster.joined("a")
        before = await reserve(store, "r0", 1)
        await store.unreserve("r0")
        most = before.size_bytes + 100
        assert (before.reserved_bytes, before.reserved_checkpoints) == (0, 0)
        for name, size_bytes, held in (("r1", 60, 0), ("r2", 41, 60), ("r1", 100, 0)):
            found = await reserve(store, name, size_bytes, max_bytes=most)
            assert found.reserved_bytes == held
        # The second did not fit; the first has grown.
        assert (await reserve(store, "r3", 1, max_bytes=most)).reserved_bytes == 100
        await store.unreserve("r1")
        await store.unreserve("unknown")
        assert (await reserve(store, "r3", 100, max_bytes=most)).reserved_bytes == 0

    async def test_checkpoints_are_reserved_by_number(self, cluster: Cluster) -> None:
        store = await cluster.joined("a")
        await store.put_checkpoint(checkpoint())
        for name, count, held in (("r1", 1, 0), ("r2", 1, 1), ("r3", 0, 1)):
            found = await reserve(store, name, 1, checkpoints=count, max_checkpoints=2)
            assert (found.kept_checkpoints, found.reserved_checkpoints) == (1, held)
        other = await reserve(store, "r4", 1, owner="p", checkpoints=1, max_checkpoints=1)
        assert other.checkpoints == 0

    async def test_a_process_that_is_no_node_reserves_nothing(self, cluster: Cluster) -> None:
        store = await cluster.store()
        with pytest.raises(LeaseLostError):
            await reserve(store, "r1", 1)


async def reserve(store: Store, name: str, size_bytes: int, **more: Any) -> Occupied:
    most = {k: more.pop(k, 1 << 40) for k in ("max_bytes", "max_checkpoints")}
    wanted = {"owner": "o", "size_bytes": size_bytes, **more}
    return await store.reserve(Reserved(reservation_id=name, **wanted), **most)


class ClusterSuite(OwnershipSuite):
    """Several nodes."""

    async def test_nodes_share_the_room_of_an_owner(self, cluster: Cluster) -> None:
        first, second = await cluster.joined("a"), await cluster.joined("b")
        most = (await reserve(first, "r", 10)).size_bytes + 10
        assert (await reserve(second, "s", 1, max_bytes=most)).reserved_bytes == 10
        # Its node ends, and what it was for with it.
        await first.renew(-1.0, NodeLoad())
        assert await second.declare_dead("a-1")
        assert (await reserve(second, "s", 10, max_bytes=most)).reserved_bytes == 0
        await second.leave()
        third = await cluster.joined("c")
        assert (await reserve(third, "t", 1)).reserved_bytes == 0

    async def test_of_parallel_reservations_no_more_is_held_than_fits(
        self, cluster: Cluster
    ) -> None:
        stores = [await cluster.joined(name) for name in ("a", "b", "c")]
        most = (await reserve(stores[0], "r", 1)).size_bytes + 7
        await stores[0].unreserve("r")
        found: list[Occupied] = []

        async def one(number: int) -> None:
            found.append(await reserve(stores[number % 3], f"r{number}", 1, max_bytes=most))

        async with anyio.create_task_group() as group:
            for number in range(30):
                group.start_soon(one, number)
        assert sorted(each.reserved_bytes for each in found) == [*range(7), *[7] * 23]

    async def test_nodes_share_a_secret_and_are_numbered(self, cluster: Cluster) -> None:
        first, second = await cluster.store(), await cluster.store()
        a = await first.join("c", node("a"), LEASE_S)
        b = await second.join("c", node("b"), LEASE_S)
        assert (a.alone, b.alone) == (True, False)
        assert a.secret == b.secret
        assert a.node.number < b.node.number
        assert [n.name for n in await first.nodes()] == ["a", "b"]

    async def test_another_version_is_refused_while_nodes_are_alive(self, cluster: Cluster) -> None:
        first = await cluster.joined("a", version=1)
        with pytest.raises(StorageError, match="same release everywhere"):
            await cluster.joined("b", version=2)
        await first.renew(-1.0, NodeLoad())
        await cluster.joined("b", version=2)
        # The old one cannot come back beside it.
        with pytest.raises(LeaseLostError):
            await first.renew(LEASE_S, NodeLoad())

    async def test_only_a_node_whose_lease_ran_out_is_declared_dead(self, cluster: Cluster) -> None:
        first, second = await cluster.joined("a"), await cluster.joined("b")
        await first.adopt(await first.claim(KEY, "a-1", owner="o", base_model="b"))
        assert not await second.declare_dead("a-1")
        await first.renew(-1.0, NodeLoad())
        (found, _) = await second.nodes()
        assert (found.expired, found.serving, found.state) == (True, False, "alive")
        # Late, but in time.
        await first.renew(LEASE_S, NodeLoad())
        assert not await second.declare_dead("a-1")
        await first.renew(-1.0, NodeLoad())
        assert await second.declare_dead("a-1")
        assert await second.declare_dead("a-1")
        for write in (
            first.renew(LEASE_S, NodeLoad()),
            first.put_session(session()),
            first.submit(step(1)),
            first.claim("x", "a-1", owner="o", base_model="b"),
        ):
            with pytest.raises(LeaseLostError):
                await write
        assert await second.get_session("s") is None

    async def test_a_key_moves_from_its_owner_to_another_node(self, cluster: Cluster) -> None:
        first, second = await cluster.joined("a"), await cluster.joined("b")
        claim = await first.claim(KEY, "a-1", owner="o", base_model="b")
        await first.adopt(claim)
        await first.submit(step(1, body=b"one"))
        await first.finish(step(1).op_id, DONE, 1.0)
        await first.submit(step(2, body=b"two"))
        assert await second.pending() == []
        # Only the owner gives it away, to a node that is there.
        assert await second.reassign(claim, "b-1") is None
        assert await first.reassign(claim, "unknown") is None
        moved = await first.reassign(claim, "b-1")
        assert moved is not None
        assert (moved.node_id, moved.epoch, moved.wanted) == ("b-1", 2, None)
        assert await first.reassign(claim, "b-1") is None
        for late in (
            first.submit(step(3)),
            first.finish(step(2).op_id, DONE, 1.0),
            first.change_model(KEY, snapshot_seq=1),
        ):
            with pytest.raises(ClaimLostError):
                await late
        first.give_up(claim)
        assert await first.pending() == []
        await second.adopt(moved)
        assert [op.body for op in await second.pending(KEY)] == [b"two"]
        assert not (await second.submit(step(1)))[1]
        assert await second.finish(step(2).op_id, DONE, 1.0)
        assert not await first.finish(step(2).op_id, DONE, 1.0)

    async def test_keys_of_a_dead_node_go_to_others_once(self, cluster: Cluster) -> None:
        dead, first, second = [await cluster.joined(name) for name in "abc"]
        claim = await dead.claim(KEY, "a-1", owner="o", base_model="b")
        await dead.adopt(claim)
        await dead.submit(step(1, body=b"one"))
        await dead.renew(-1.0, NodeLoad())
        assert await first.reassign(claim, "b-1") is None
        assert await first.declare_dead("a-1")
        taken = await first.reassign(claim, "b-1")
        assert taken is not None
        assert await second.reassign(claim, "c-1") is None
        await first.adopt(taken)
        assert [op.op_id for op in await first.pending(KEY)] == [step(1).op_id]
        with pytest.raises(LeaseLostError):
            await dead.finish(step(1).op_id, DONE, 1.0)
        assert await first.finish(step(1).op_id, DONE, 1.0)

    async def test_ended_nodes_are_forgotten_when_they_own_nothing(self, cluster: Cluster) -> None:
        first, second = await cluster.joined("a"), await cluster.joined("b")
        claim = await first.claim(KEY, "a-1", owner="o", base_model="b")
        await first.leave()
        far = 1e12
        assert await second.forget_nodes(far) == 0
        moved = await second.reassign(claim, "b-1")
        assert moved is not None
        assert await second.forget_nodes(0.0) == 0
        assert await second.forget_nodes(far) == 1
        assert [n.name for n in await second.nodes()] == ["b"]

    async def test_samplers_of_another_nodes_key_are_not_changed(self, cluster: Cluster) -> None:
        first, second = await cluster.joined("a"), await cluster.joined("b")
        claim = await first.claim(KEY, "a-1", owner="o", base_model="b")
        await first.adopt(claim)
        published = sampler("s:sample:0", model_id=KEY, snapshot="x")
        free = sampler("s:sample:1")
        for each in (published, free):
            await first.add_sampler(each)
        with pytest.raises(ClaimLostError):
            await second.put_sampler(replace(published, location="y"))
        with pytest.raises(ClaimLostError):
            await second.close_samplers([free.sampler_id, published.sampler_id])
        assert await second.get_sampler(free.sampler_id) == free
        await first.put_sampler(replace(published, location="y"))
        await second.close_samplers([free.sampler_id])
        await first.close_samplers([published.sampler_id])
        assert all(s.dropped for s in await second.samplers("s"))

    async def test_limits_hold_for_all_nodes_together(self, cluster: Cluster) -> None:
        stores = [await cluster.joined(name) for name in "abc"]

        async def open_sessions(store: Store, which: str) -> int:
            found = [
                await store.add_session(
                    session(f"{which}{n}"), max_sessions=10, max_kept_sessions=100
                )
                for n in range(10)
            ]
            return found.count(None)

        opened = await asyncio.gather(
            *(open_sessions(store, which) for store, which in zip(stores, "xyz", strict=True))
        )
        assert sum(opened) == 10
        assert await stores[0].count_sessions("o") == 10

    async def test_the_end_of_a_session_is_seen_by_all_nodes(self, cluster: Cluster) -> None:
        first, second = await cluster.joined("a"), await cluster.joined("b")
        heard = Heard(second)
        await first.put_session(session())
        await heard.until("session s")
        assert await second.get_session("s") == session()
        over = SessionCancelled(detail="over")
        heard.clear()
        assert await first.end_session(session(), over)
        await heard.until("session s")
        assert await second.get_session("s") == session(status=over)
        assert await second.touch_session("s", 9.0) == session(status=over)

    async def test_other_nodes_hear_of_claims_and_nodes(self, cluster: Cluster) -> None:
        first, second = await cluster.joined("a"), await cluster.joined("b")
        heard, own = Heard(second), Heard(first)
        claim = await first.claim(KEY, "a-1", owner="o", base_model="b")
        await heard.until(f"claim {KEY} a-1")
        heard.clear()
        assert await first.want(KEY, "b-1")
        await heard.until(f"claim {KEY} a-1")
        heard.clear()
        assert await first.reassign(replace(claim), "b-1") is not None
        await heard.until(f"claim {KEY} b-1")
        await first.drain("a")
        await heard.until("node a-1")
        await second.drain("b")
        await own.until("node b-1")
        assert not any(hint.startswith("claim") for hint in own.hints)

    async def test_a_command_beside_the_nodes_is_heard(self, cluster: Cluster) -> None:
        first, command = await cluster.joined("a"), await cluster.store()
        await first.claim(KEY, "a-1", owner="o", base_model="b")
        heard = Heard(first)
        assert await command.want(KEY, "a-1")
        await heard.until(f"claim {KEY} a-1")
        assert await command.drain("a")
        await heard.until("node a-1")

    async def test_revoked_keys_are_heard_of(self, cluster: Cluster) -> None:
        first, command = await cluster.joined("a"), await cluster.store()
        heard = Heard(first)
        added = await command.add_key(key())
        assert await command.revoke_key(added.key_id, 9.0)
        await heard.until(f"key {added.key_id}")

    async def test_records_that_another_node_changed_are_read_again(self, cluster: Cluster) -> None:
        first, second = await cluster.joined("a"), await cluster.joined("b")
        heard = Heard(second)
        await first.add_model(model())
        await first.add_sampler(sampler())
        await first.put_session(session())
        assert await second.get_model(KEY) == model()
        assert await second.get_sampler("s:sample:0") == sampler()
        await first.change_model(KEY, project_id="p")
        await first.put_sampler(sampler(location="x"))
        # In order: when this has come, so has the rest.
        await first.put_session(session("last"))
        await heard.until("session last")
        assert await second.get_model(KEY) == model(project_id="p")
        assert await second.get_sampler("s:sample:0") == sampler(location="x")

    async def test_results_of_samples_of_two_nodes_do_not_meet(self, cluster: Cluster) -> None:
        large = OperationOutcome(body=b"x" * (ROOM_BYTES + 1), size_bytes=ROOM_BYTES + 1)
        stores = [await cluster.joined(name) for name in "ab"]
        for number, store in enumerate(stores):
            await store.submit(sample(number))
            assert await store.finish(sample(number).op_id, large, 1.0)
        for number, store in enumerate(stores):
            found = await store.get_operation(sample(number).op_id)
            assert found is not None
            assert found.outcome == large
            await store.probe(10)


class Heard:
    """The hints that a store has got."""

    def __init__(self, store: Store) -> None:
        self.hints: list[str] = []
        self._bell = anyio.Event()
        store.on_hint(self._hint)

    def _hint(self, hint: str) -> None:
        self.hints.append(hint)
        self._bell.set()

    def clear(self) -> None:
        self.hints.clear()

    async def until(self, hint: str) -> None:
        with anyio.fail_after(PATIENCE_S):
            while hint not in self.hints:
                await self._bell.wait()
                self._bell = anyio.Event()
