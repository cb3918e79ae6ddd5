"""What every `Store` must do; a subclass says how one is made."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from tinkex.clock import SystemClock
from tinkex.server.store.records import (
    ROW_BYTES,
    ApiKey,
    AuditEntry,
    HourOfUsage,
    KeptPart,
    LimitReached,
    Model,
    Operation,
    OperationOutcome,
    Refusal,
    StoredCheckpoint,
    StoredLoss,
    StoredSampler,
    StoredSession,
    UsageEntry,
    changed,
)
from tinkex.types import (
    AdamOptimizerConfig,
    CustomLossGraph,
    CustomLossInput,
    CustomLossNode,
    LoraConfig,
    OptimizerConfigBase,
    OptimStepRequest,
    SessionCancelled,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from tinkex.server import Store
    from tinkex.server.store.records import CheckpointKind, OpKind

LORA, ADAM = LoraConfig(rank=8, train_mlp=False), AdamOptimizerConfig()


def session(name: str = "s", owner: str = "o", at: float = 1.0, **more: Any) -> StoredSession:
    more = {"last_seen_at": at, **more}
    return StoredSession(session_id=name, owner=owner, created_at=at, **more)


def model(name: str = "s:train:0", owner: str = "o", **more: Any) -> Model:
    return Model(
        model_id=name,
        owner=owner,
        session_id=name.split(":")[0],
        base_model="b",
        lora=LORA,
        optimizer=ADAM,
        created_at=1.0,
        last_request_at=1.0,
        **more,
    )


def sampler(name: str = "s:sample:0", **more: Any) -> StoredSampler:
    return StoredSampler(
        sampler_id=name,
        owner="o",
        session_id=name.split(":")[0],
        base_model="b",
        created_at=1.0,
        **more,
    )


def checkpoint(name: str = "one", run: str = "s:train:0", at: float = 1.0) -> StoredCheckpoint:
    return StoredCheckpoint(
        path=f"tinker://{run}/weights/{name}",
        owner="o",
        model_id=run,
        kind="weights",
        name=name,
        location=f"{run}/{name}@1",
        base_model="b",
        lora=LORA,
        optimizer=ADAM,
        has_optimizer=True,
        created_at=at,
        size_bytes=7,
        user_metadata={"k": "v"},
    )


def step(seq: int, run: str = "s:train:0", **more: Any) -> Operation:
    request = OptimStepRequest(model_id=run, seq_id=seq, adam_params={"learning_rate": 0.5})  # type: ignore[call-arg]
    return Operation(
        op_id=f"{run}:{seq}",
        kind="optim_step",
        owner="o",
        session_id="s",
        created_at=float(seq),
        request=request,
        seq_id=seq,
        model_id=run,
        **more,
    )


def sample(seq: int, name: str = "s:sample:0", clone: int = 0) -> Operation:
    return Operation(
        op_id=f"{name}:{seq}",
        kind="sample",
        owner="o",
        session_id="s",
        created_at=float(seq),
        request=None,
        seq_id=seq,
        sampler_id=name,
        clone=clone,
        sequence_ids=(f"{name}:{seq}:0",),
    )


def loss() -> StoredLoss:
    node = CustomLossNode(op="call_function", name="n", target="sum", args=[{"ref": "logprobs"}])
    return StoredLoss(
        loss_id="s:loss:0",
        owner="o",
        session_id="s",
        inputs=(CustomLossInput(name="logprobs", rank=1),),
        graph=CustomLossGraph(nodes=[node]),
    )


def key(name: str = "one", owner: str = "o") -> ApiKey:
    return ApiKey(key_id=0, key_hash=f"hash of {name}", owner=owner, name=name, created_at=1.0)


def used(at: float, kind: OpKind = "optim_step", owner: str = "o", **amounts: Any) -> UsageEntry:
    return UsageEntry(
        at=at,
        owner=owner,
        session_id="s",
        base_model="b",
        project_id=None,
        kind=kind,
        usage=Usage(**amounts),
    )


def hour_of(hour: int, kind: OpKind = "optim_step", count: int = 1, **amounts: Any) -> HourOfUsage:
    return HourOfUsage(
        hour=hour,
        session_id="s",
        base_model="b",
        project_id=None,
        kind=kind,
        count=count,
        usage=Usage(**amounts),
    )


DONE = OperationOutcome(body=b"result", size_bytes=6, usage=Usage(trained_tokens=3))


class StoreSuite:
    """Inherit this and define `open_store` and the fixture `place`."""

    pytestmark = pytest.mark.anyio

    def open_store(self, place: str) -> AbstractAsyncContextManager[Store]:
        """The store at a place; a fresh, empty one where there was none."""
        raise NotImplementedError

    @pytest.fixture
    async def store(self, place: str) -> AsyncIterator[Store]:
        async with self.open_store(place) as store:
            yield store

    async def test_sessions_are_kept_replaced_and_listed_newest_first(self, store: Store) -> None:
        first, second = session("a", at=1.0, user_metadata={"k": "v"}), session("b", at=2.0)
        other = session("c", owner="p", at=3.0)
        for each in (first, second, other):
            await store.put_session(each)
        assert await store.get_session("a") == first
        assert [s.session_id for s in await store.sessions("o")] == ["b", "a"]
        assert [s.session_id for s in await store.sessions()] == ["c", "b", "a"]
        ended = replace(first, status=SessionCancelled(detail="silence"))
        await store.put_session(ended)
        assert await store.get_session("a") == ended
        assert not ended.active
        assert [s.session_id for s in await store.sessions("o", active=True)] == ["b"]
        assert await store.get_session("z") is None

    async def test_sessions_come_in_pages(self, store: Store) -> None:
        for number in range(5):
            await store.put_session(session(f"s{number}", at=float(number // 2)))
        await store.put_session(session("other", owner="p", at=9.0))
        names = ["s4", "s3", "s2", "s1", "s0"]
        pages = [list(await store.session_ids("o", at, 2)) for at in (0, 2, 4, 6)]
        assert pages == [names[:2], names[2:4], names[4:], []]
        older = await store.sessions("o", before=1.0, limit=3)
        assert [s.session_id for s in older] == ["s3", "s2", "s1"]

    async def test_sessions_are_counted_by_what_they_are(self, store: Store) -> None:
        over = SessionCancelled(detail="silence")
        for each in (
            session("a"),
            session("b", heartbeats=False),
            session("c", status=over),
            session("d", owner="p"),
        ):
            await store.put_session(each)
        assert await store.count_sessions() == 4
        assert await store.count_sessions(active=True) == 3
        assert await store.count_sessions("o", active=True) == 2
        assert await store.count_sessions("o", active=True, heartbeats=True) == 1
        assert await store.count_sessions("nobody") == 0

    async def test_old_sessions_without_heartbeats_are_found_unless_a_model_is_open(
        self, store: Store
    ) -> None:
        over = SessionCancelled(detail="silence")
        await store.put_session(session("a"))
        for name, more in (("b", {}), ("c", {"status": over}), ("d", {}), ("e", {})):
            await store.put_session(session(name, heartbeats=False, **more))
        await store.put_session(session("new", at=5.0, heartbeats=False))
        await store.add_model(model("d:train:0"))
        await store.add_model(model("e:train:0", snapshot_seq=0))
        found = await store.unattended_sessions(5.0, 10)
        assert {s.session_id for s in found} == {"b", "e"}
        assert len(await store.unattended_sessions(5.0, 1)) == 1

    async def test_signs_of_life_keep_active_sessions_only(self, store: Store) -> None:
        over = session("over", status=SessionCancelled(detail="silence"))
        for each in (session("a"), session("b"), over, session("c", heartbeats=False)):
            await store.put_session(each)
        assert await store.touch_session("a", 5.0) == session("a", last_seen_at=5.0)
        assert await store.touch_session("over", 5.0) == over
        assert await store.touch_session("z", 5.0) is None
        assert await store.get_session("a") == session("a", last_seen_at=5.0)
        assert {s.session_id: s.last_seen_at for s in await store.sessions()} == {
            "a": 5.0,
            "b": 1.0,
            "c": 1.0,
            "over": 1.0,
        }
        await store.touch_sessions(7.0)
        assert {s.session_id: s.last_seen_at for s in await store.sessions()} == {
            "a": 7.0,
            "b": 7.0,
            "c": 1.0,
            "over": 1.0,
        }
        assert await store.get_session("a") == session("a", last_seen_at=7.0)

    async def test_the_first_model_of_an_id_stays(self, store: Store) -> None:
        first = model(user_metadata={"k": "v"})
        assert await store.add_model(first) == first
        assert await store.add_model(model(owner="thief")) == first
        touched = replace(first, last_request_at=9.0)
        await store.put_model(touched)
        assert await store.get_model(first.model_id) == touched
        await store.add_model(model("s:train:1"))
        await store.add_model(model("t:train:0", owner="p"))
        mine = await store.models(owner="o")
        assert [m.model_id for m in mine] == ["s:train:1", "s:train:0"]
        assert len(await store.models(session_id="t")) == 1

    async def test_models_come_in_pages_and_are_counted(self, store: Store) -> None:
        for number in range(4):
            await store.add_model(model(f"s:train:{number}", project_id=f"p{number % 2}"))
        await store.add_model(model("t:train:0", owner="p"))
        page = await store.models(owner="o", offset=1, limit=2)
        assert [m.model_id for m in page] == ["s:train:2", "s:train:1"]
        some = await store.models(owner="o", project_id="p1", limit=1)
        assert [m.model_id for m in some] == ["s:train:3"]
        counts = [await store.count_models("o"), await store.count_models("o", project_id="p1")]
        assert counts == [4, 2]

    async def test_published_models_of_others_come_in_the_same_pages(self, store: Store) -> None:
        async def publish(name: str, owner: str, **more: Any) -> None:
            each = replace(checkpoint(name, f"{owner}:train:0"), owner=owner)
            await store.put_checkpoint(replace(each, **{"public": True, **more}))

        for owner in ("a", "o", "b", "c", "d", "e"):
            await store.add_model(model(f"{owner}:train:0", owner=owner, project_id=f"p {owner}"))
        await store.add_model(model("o:train:1"))
        await publish("first", "a")
        await publish("second", "a")
        await publish("mine", "o")
        await publish("hidden", "b", public=False)
        await publish("past", "c", expires_at=5.0)
        await publish("future", "d", expires_at=6.0)

        async def page(offset: int = 0, limit: int = 10, **more: Any) -> list[str]:
            found = await store.models(
                owner="o", published_at=5.0, offset=offset, limit=limit, **more
            )
            return [m.model_id for m in found]

        everything = ["o:train:1", "d:train:0", "o:train:0", "a:train:0"]
        assert await page() == everything
        assert [name for at in range(5) for name in await page(at, 1)] == everything
        assert await page(1, 2) == everything[1:3]
        assert await page(project_id="p a") == ["a:train:0"]
        assert await store.count_models("o", published_at=5.0) == 4
        assert await store.count_models("o", published_at=5.0, project_id="p o") == 1
        assert await store.count_models("o") == 2

    async def test_open_models_are_those_that_may_run_again(self, store: Store) -> None:
        started, saved, closed, made_closed = (f"s:train:{number}" for number in range(4))
        for each in (started, saved, closed):
            await store.add_model(model(each))
        await store.add_model(model("t:train:0", owner="p"))
        assert (await store.add_model(model(made_closed, snapshot_seq=0))).closed
        await store.put_model(model(saved, snapshot_location="x", snapshot_seq=4))
        await store.put_model(model(closed, snapshot_seq=0))
        assert [m.model_id for m in await store.open_models()] == [started, saved, "t:train:0"]
        assert [m.model_id for m in await store.open_models("p")] == ["t:train:0"]
        assert not any(m.closed for m in await store.open_models())

    async def test_samplers_are_found_by_what_they_sample_from(self, store: Store) -> None:
        base = await store.add_sampler(sampler("s:sample:0"))
        pinned = await store.add_sampler(sampler("s:sample:1", model_path="p", location="x"))
        more: dict[str, Any] = {"model_id": "s:train:0"}
        fresh = await store.add_sampler(sampler("s:sample:2", snapshot="a", **more))
        saved = sampler("s:sample:3", snapshot="b", location="y", size_bytes=5, **more)
        await store.put_sampler(saved)
        other = await store.add_sampler(sampler("t:sample:0", snapshot="c", model_id="t:train:0"))
        assert await store.samplers("s") == [base, pinned, fresh, saved]
        assert await store.samplers(location="x") == [pinned]
        assert await store.samplers(location="nowhere") == []
        assert await store.samplers(model_id="s:train:0") == [fresh, saved]
        assert await store.samplers(unsaved=True) == [fresh, other]
        assert await store.samplers(located=True) == [pinned, saved]
        assert await store.samplers(model_id="s:train:0", unsaved=True) == [fresh]

    async def test_closed_samplers_have_no_weights_and_say_why(self, store: Store) -> None:
        first = sampler("s:sample:0", snapshot="a", location="x", size_bytes=5)
        second = sampler("s:sample:1", snapshot="b")
        for each in (first, second, sampler("s:sample:2", location="z")):
            await store.put_sampler(each)
        await store.put_sampler(replace(sampler("q:sample:0", size_bytes=9), owner="p"))
        await store.close_samplers([first.sampler_id], "superseded")
        await store.close_samplers([first.sampler_id, second.sampler_id, "unknown"], "over")
        gone = [
            replace(first, location=None, size_bytes=0, dropped="superseded"),
            replace(second, dropped="over"),
        ]
        assert [await store.get_sampler(s.sampler_id) for s in gone] == gone
        assert (await store.samplers("s"))[:2] == gone
        assert await store.samplers(unsaved=True) == []
        assert await store.samplers(location="x") == []
        assert len(await store.samplers(location="z")) == 1
        await store.close_samplers([])

    async def test_samplers_are_kept_and_their_copies_counted(self, store: Store) -> None:
        first = await store.add_sampler(sampler())
        assert await store.add_sampler(replace(first, base_model="other")) == first
        await store.add_sampler(sampler("t:sample:0"))
        assert [s.sampler_id for s in await store.samplers("s")] == ["s:sample:0"]
        assert len(await store.samplers()) == 2
        counts = [await store.join_sampler(first.sampler_id) for _ in range(2)]
        assert counts == [1, 2]
        saved = replace(first, location="somewhere", model_id="s:train:0", seq_id=2**62)
        await store.put_sampler(saved)
        assert await store.get_sampler(first.sampler_id) == saved
        assert await store.join_sampler(first.sampler_id) == 3
        assert await store.get_sampler("no") is None

    async def test_checkpoints_are_kept_by_path_and_listed_newest_first(self, store: Store) -> None:
        old, new = checkpoint("old", at=1.0), checkpoint("new", at=2.0)
        elsewhere = checkpoint("x", run="t:train:0", at=3.0)
        for each in (new, old, elsewhere):
            await store.put_checkpoint(each)
        assert await store.get_checkpoint(old.path) == old
        encrypted = replace(elsewhere, age_recipients=("age1x", "ssh-rsa y"))
        await store.put_checkpoint(encrypted)
        assert await store.get_checkpoint(elsewhere.path) == encrypted
        assert [c.name for c in await store.checkpoints(owner="o")] == ["x", "new", "old"]
        assert [c.name for c in await store.checkpoints(model_id="s:train:0")] == ["new", "old"]
        await store.put_checkpoint(replace(old, public=True, expires_at=5.0))
        found = await store.get_checkpoint(old.path)
        assert found is not None
        assert (found.public, found.expires_at) == (True, 5.0)
        assert await store.checkpoints(expired_at=4.9) == []
        assert await store.checkpoints(expired_at=5.0) == [found]
        assert await store.delete_checkpoint(old)
        assert not await store.delete_checkpoint(old)
        assert await store.get_checkpoint(old.path) is None

    async def test_checkpoints_come_in_pages_and_are_counted_and_added_up(
        self, store: Store
    ) -> None:
        await store.add_model(model())
        for number in range(4):
            await store.put_checkpoint(checkpoint(f"c{number}", at=float(number)))
        elsewhere = checkpoint("x", run="t:train:0", at=9.0)
        await store.put_checkpoint(replace(elsewhere, kind="sampler_weights", expires_at=5.0))
        await store.put_checkpoint(
            replace(checkpoint("y", run="u:train:0"), public=True, owner="p")
        )
        page = await store.checkpoints(owner="o", live_at=6.0, offset=1, limit=2)
        assert [c.name for c in page] == ["c2", "c1"]
        newest = await store.checkpoints(owner="o", kinds=["sampler_weights"], limit=1)
        assert [c.name for c in newest] == ["x"]
        assert [c.name for c in await store.checkpoints(public=True)] == ["y"]
        assert await store.checkpoints(public=True, model_id="s:train:0") == []
        counts = [await store.count_checkpoints("o", live_at=at) for at in (4.9, 5.0)]
        assert counts == [5, 4]
        assert await store.count_checkpoints("o", live_at=4.9, kinds=["weights"]) == 4
        sizes = [
            sum(p.size_bytes for p in (await store.stored_by_project("o", live_at=at)).values())
            for at in (4.9, 5.0)
        ]
        assert sizes == [35, 28]
        assert await store.stored_by_project("nobody", live_at=1.0) == {}
        assert await store.saved_by_session("s") == (4, 28)
        assert await store.saved_by_session("t") == (0, 0)

    async def test_the_newest_checkpoint_of_each_model_and_kind_is_found(
        self, store: Store
    ) -> None:
        runs = ["s:train:0", "t:train:0"]
        for run in (*runs, "u:train:0"):
            for number in range(3):
                await store.put_checkpoint(checkpoint(f"c{number}", run=run, at=float(number)))
        sampler_weights = replace(checkpoint("x"), kind="sampler_weights", path="x", public=True)
        await store.put_checkpoint(sampler_weights)
        expired = replace(checkpoint("c2", run=runs[1], at=2.0), expires_at=5.0)
        await store.put_checkpoint(expired)
        kinds: list[CheckpointKind] = ["weights", "sampler_weights"]
        found = await store.newest_checkpoints(runs, kinds=kinds, live_at=5.0)
        names = {(c.model_id, c.kind): c.name for c in found}
        assert names == {
            ("s:train:0", "weights"): "c2",
            ("s:train:0", "sampler_weights"): "x",
            ("t:train:0", "weights"): "c1",
        }
        public = await store.newest_checkpoints(runs, kinds=kinds, live_at=5.0, public=True)
        assert public == [sampler_weights]

    async def test_the_first_loss_of_an_id_stays(self, store: Store) -> None:
        first = loss()
        assert await store.add_loss(first) == first
        assert await store.add_loss(replace(first, owner="thief")) == first
        assert await store.get_loss("s:loss:0") == first
        assert await store.get_loss("no") is None

    async def test_an_operation_is_accepted_once(self, store: Store) -> None:
        accepted, new = await store.submit(step(1))
        assert new
        again, new = await store.submit(changed(step(1), kind="forward"))
        assert not new
        assert again == accepted
        found = await store.get_operation("s:train:0:1")
        assert found is not None
        assert found.request == step(1).request

    async def test_pending_operations_come_in_order_of_arrival(self, store: Store) -> None:
        for seq in (3, 1, 2):
            await store.submit(step(seq))
        await store.start(["s:train:0:1"], 5.0)
        await store.finish("s:train:0:3", DONE, 6.0)
        assert [op.seq_id for op in await store.pending()] == [1, 2]
        assert [op.seq_id for op in await store.operations("s")] == [3, 1, 2]
        running = await store.get_operation("s:train:0:1")
        assert running is not None
        assert (running.state, running.started_at) == ("running", 5.0)

    async def test_an_operation_ends_once_and_keeps_its_first_outcome(self, store: Store) -> None:
        await store.submit(step(1))
        assert await store.finish("s:train:0:1", DONE, 4.0)
        assert not await store.finish("s:train:0:1", OperationOutcome(error="late"), 5.0)
        assert not await store.finish("unknown", DONE, 5.0)
        ended = await store.get_operation("s:train:0:1")
        assert ended is not None
        assert (ended.state, ended.outcome, ended.finished_at) == ("done", DONE, 4.0)

    async def test_completions_follow_a_cursor_per_copy(self, store: Store) -> None:
        for seq in range(3):
            await store.submit(sample(seq))
        await store.submit(sample(7, clone=1))
        for op_id in ("s:sample:0:1", "s:sample:0:0", "s:sample:0:7"):
            await store.finish(op_id, DONE, 1.0)
        found, cursor = await store.completions("s:sample:0", 0, 0)
        assert [op.seq_id for op in found] == [1, 0]
        assert (await store.completions("s:sample:0", 0, cursor))[0] == []
        await store.finish("s:sample:0:2", OperationOutcome(error="no"), 2.0)
        found, later = await store.completions("s:sample:0", 0, cursor)
        assert [op.seq_id for op in found] == [2]
        assert later > cursor
        assert len((await store.completions("s:sample:0", 1, 0))[0]) == 1
        assert (await store.completions("nobody", 0, 4)) == ([], 4)

    async def test_dropping_a_result_keeps_the_operation_and_its_size(self, store: Store) -> None:
        for seq in (1, 2):
            await store.submit(step(seq))
            await store.finish(f"s:train:0:{seq}", DONE, float(seq))
        await store.drop_results(["s:train:0:1", "unknown"])
        dropped = await store.get_operation("s:train:0:1")
        assert dropped is not None
        assert dropped.outcome == changed(DONE, body=None)
        assert await store.drop_results_before(2.5) == 1
        assert await store.drop_results_before(2.5) == 0
        assert not (await store.submit(step(2)))[1]

    async def test_the_first_answer_to_a_key_is_remembered_per_owner(self, store: Store) -> None:
        assert await store.recall("o", "k") is None
        assert await store.remember("o", "k", "first") == "first"
        assert await store.remember("o", "k", "second") == "first"
        assert await store.recall("o", "k") == "first"
        assert await store.recall("p", "k") is None

    async def test_audit_and_usage_are_kept_per_owner_in_order(self, store: Store) -> None:
        details = {"tinker_path": "tinker://p", "count": 2}
        for at, owner in ((1.0, "o"), (2.0, "p"), (3.0, "o")):
            entry = AuditEntry(
                at=at, owner=owner, topic="checkpoints", event=f"e{at:g}", details=details
            )
            await store.audit(entry)
            await store.add_usage(used(at, owner=owner, trained_tokens=int(at), device_s=0.5))
        log = await store.audit_log("o")
        assert [e.event for e in log] == ["e1", "e3"]
        assert log[0].details == details
        assert [e.event for e in await store.audit_log("o", start=1.5)] == ["e3"]
        assert [e.event for e in await store.audit_log("o", end=3.0)] == ["e1"]
        assert [e.event for e in await store.audit_log("o", limit=1)] == ["e3"]
        assert await store.audit_log("o", topic="projects") == []
        entries = await store.usage("o", 0.0, 3600.0)
        assert entries == [hour_of(0, count=2, trained_tokens=4, device_s=1.0)]
        assert await store.usage("o", 3600.0, 7200.0) == []

    async def test_usage_is_summed_up_by_hour_session_project_and_kind(self, store: Store) -> None:
        big = 1 << 40
        for at in (0.0, 1799.9, 1800.0, 3599.9, 3600.0, 7199.5):
            await store.add_usage(used(at, "forward_backward", trained_tokens=big, queue_s=0.25))
        await store.add_usage(used(10.0, trained_tokens=2))
        await store.add_usage(used(20.0, "save_weights"))
        await store.add_usage(replace(used(20.0, trained_tokens=4), project_id="p"))
        await store.add_usage(replace(used(20.0, trained_tokens=8), session_id="a"))
        await store.add_usage(used(20.0, owner="other", trained_tokens=16))
        found = await store.usage("o", 0.0, 7200.0)
        assert [(h.hour, h.session_id, h.kind) for h in found] == [
            (0, "a", "optim_step"),
            (0, "s", "forward_backward"),
            (0, "s", "optim_step"),
            (0, "s", "optim_step"),
            (0, "s", "save_weights"),
            (3600, "s", "forward_backward"),
        ]
        trained = 4 * big
        assert found[1] == hour_of(0, "forward_backward", 4, trained_tokens=trained, queue_s=1.0)
        assert {h.project_id: h.usage.trained_tokens for h in found[2:4]} == {None: 2, "p": 4}
        assert found[4] == hour_of(0, "save_weights")
        trained = 2 * big
        assert found[5] == hour_of(3600, "forward_backward", 2, trained_tokens=trained, queue_s=0.5)
        assert await store.usage("o", 3600.0, 7200.0) == found[5:]

    async def test_what_samples_used_adds_up_by_the_hour(self, store: Store) -> None:
        await store.submit(sample(1))
        entry = used(10.0, "sample", prompt_tokens=1, generated_tokens=2)
        await store.finish("s:sample:0:1", DONE, 10.0, entry)
        await store.add_usage(used(20.0, "sample", prompt_tokens=10, queue_s=0.25))
        await store.add_usage(used(3599.0, "sample", prompt_tokens=100, queue_s=0.5))
        await store.add_usage(used(3600.0, "sample", prompt_tokens=1000))
        hours = [await store.usage("o", at, at + 3600.0) for at in (0.0, 3600.0)]
        sums = [sum((e.usage for e in hour), Usage()) for hour in hours]
        assert sums == [
            Usage(prompt_tokens=111, generated_tokens=2, queue_s=0.75),
            Usage(prompt_tokens=1000),
        ]
        # What is added later is added to what was asked for already.
        await store.add_usage(used(30.0, "sample", prompt_tokens=1, device_s=1.5))
        again = await store.usage("o", 0.0, 3600.0)
        assert sum((e.usage for e in again), Usage()) == Usage(
            prompt_tokens=112, generated_tokens=2, queue_s=0.75, device_s=1.5
        )

    async def test_what_an_operation_used_counts_once(self, store: Store) -> None:
        await store.submit(step(1))
        entry = used(4.0, trained_tokens=3)
        assert await store.finish("s:train:0:1", DONE, 4.0, entry)
        assert not await store.finish("s:train:0:1", DONE, 5.0, entry)
        assert await store.usage("o", 0.0, 3600.0) == [hour_of(0, trained_tokens=3)]

    async def test_a_journal_keeps_bodies_until_they_are_trimmed(self, store: Store) -> None:
        await store.add_model(model())
        for seq in (2, 0, 1, 3):
            await store.submit(step(seq, body=b"body %d" % seq, media="application/x"))
        await store.submit(step(9, run="s:train:1", body=b"other"))
        for seq in (0, 1):
            await store.finish(f"s:train:0:{seq}", DONE, 5.0)
        journal = await store.journal("s:train:0", 0)
        assert [(op.seq_id, op.state, op.body) for op in journal] == [
            (1, "done", b"body 1"),
            (2, "queued", b"body 2"),
            (3, "queued", b"body 3"),
        ]
        assert journal[0].outcome == changed(DONE, body=None)
        assert journal[0].media == "application/x"
        finished = await store.get_operation("s:train:0:1")
        assert finished is not None
        assert finished.outcome == DONE

        await store.trim_journal("s:train:0", 2)
        bodies = [op.body for op in await store.journal("s:train:0", -1)]
        assert bodies == [b"", b"", b"body 2", b"body 3"]
        assert [op.body for op in await store.journal("s:train:1", -1)] == [b"other"]

    async def test_the_last_turn_of_a_model_is_its_highest_finished_one(self, store: Store) -> None:
        assert await store.last_turn("s:train:0") == -1
        for seq in (0, 1, 2):
            await store.submit(step(seq))
        await store.submit(step(7, run="s:train:1"))
        await store.submit(changed(step(8), op_id="loss", model_id=None))
        for op_id in ("s:train:0:1", "s:train:0:0", "loss"):
            await store.finish(op_id, DONE, 5.0)
        turns = [await store.last_turn(f"s:train:{number}") for number in range(3)]
        assert turns == [1, -1, -1]

    async def test_a_new_operation_is_its_models_last_request(self, store: Store) -> None:
        await store.add_model(model())
        await store.submit(step(5))
        found = await store.get_model("s:train:0")
        assert found is not None
        assert found.last_request_at == 5.0
        assert [m.last_request_at for m in await store.models()] == [5.0]

    async def test_old_operations_are_forgotten_but_not_an_open_models_last_turn(
        self, store: Store
    ) -> None:
        await store.add_model(model())
        for seq in range(4):
            await store.submit(step(seq, body=b"b"))
            await store.finish(f"s:train:0:{seq}", DONE, float(seq))
        await store.submit(sample(1))
        await store.finish("s:sample:0:1", DONE, 1.0)
        await store.trim_journal("s:train:0", 0)
        # Of those before 2.5 only one has no body that a journal needs.
        assert await store.forget_operations_before(2.5) == 2
        assert await store.get_operation("s:train:0:0") is None
        assert await store.get_operation("s:sample:0:1") is None
        await store.trim_journal("s:train:0", 3)
        assert await store.forget_operations_before(9.0) == 2
        assert [op.seq_id for op in await store.operations("s")] == [3]
        assert await store.last_turn("s:train:0") == 3
        await store.put_model(model(snapshot_seq=3))
        assert await store.forget_operations_before(9.0) == 1
        assert await store.operations("s") == []

    async def test_what_ended_long_ago_is_forgotten_a_part_at_a_time(self, store: Store) -> None:
        ended = SessionCancelled(detail="silence")
        await store.put_session(session("old", at=1.0, status=ended))
        await store.put_session(session("later", at=8.0, status=ended))
        await store.put_session(session("on", at=1.0))
        await store.put_session(session("one-off", at=1.0, heartbeats=False))
        await store.add_model(model("old:train:0", snapshot_seq=1))
        await store.put_checkpoint(checkpoint(run="old:train:0"))
        for name in ("old", "on"):
            await store.submit(changed(step(1, run=f"{name}:train:0"), session_id=name))
            await store.finish(f"{name}:train:0:1", DONE, 2.0)
            for number in range(3):
                await store.add_sampler(sampler(f"{name}:sample:{number}"))
            await store.add_loss(replace(loss(), loss_id=f"{name}:loss", session_id=name))
            await store.remember("o", f"{name} samples", "0", session_id=name)
        counts: list[int] = []
        while not counts or counts[-1]:
            counts.append(await store.prune(5.0, 3))
        # Six records of the old session, itself, and the one without heartbeats.
        assert (sum(counts), max(counts)) == (8, 3)
        assert [s.session_id for s in await store.sessions()] == ["later", "on"]
        assert await store.get_session("old") is None
        assert await store.get_sampler("old:sample:0") is None
        assert await store.get_loss("old:loss") is None
        assert await store.get_operation("old:train:0:1") is None
        assert await store.recall("o", "old samples") is None
        assert await store.get_model("old:train:0") is not None
        assert len(await store.checkpoints()) == 1
        assert len(await store.samplers("on")) == 3
        assert await store.get_loss("on:loss") is not None
        assert await store.get_operation("on:train:0:1") is not None
        assert await store.recall("o", "on samples") == "0"

    async def test_a_session_that_is_needed_is_not_forgotten(self, store: Store) -> None:
        ended = SessionCancelled(detail="silence")
        for name in ("opened", "located", "lately", "running", "free"):
            await store.put_session(session(name, status=ended))
        await store.add_model(model("opened:train:0"))
        await store.add_sampler(sampler("located:sample:0", location="x"))
        for name in ("lately", "running"):
            await store.submit(changed(step(1, run=f"{name}:train:0"), session_id=name))
        await store.finish("lately:train:0:1", DONE, 9.0)
        assert await store.prune(5.0, 100) == 1
        assert await store.get_session("free") is None
        kept = {s.session_id for s in await store.sessions()}
        assert kept == {"opened", "located", "lately", "running"}
        await store.put_model(model("opened:train:0", snapshot_seq=0))
        await store.close_samplers(["located:sample:0"])
        assert await store.prune(5.0, 100) == 3
        assert await store.prune(5.0, 100) == 0

    async def test_an_answer_of_no_session_is_forgotten_by_its_age(self, store: Store) -> None:
        await store.remember("o", "k", "answer")
        now = SystemClock().wall()
        assert await store.prune(now - 60, 100) == 0
        assert await store.recall("o", "k") == "answer"
        assert await store.prune(now + 60, 100) == 1
        assert await store.recall("o", "k") is None

    async def test_a_sessions_operations_come_without_payloads(self, store: Store) -> None:
        await store.submit(step(1, body=b"large"))
        await store.finish("s:train:0:1", DONE, 2.0)
        (found,) = await store.operations("s")
        assert found.body == b""
        assert found.outcome == changed(DONE, body=None)

    async def test_keys_are_numbered_found_by_hash_and_revoked_once(self, store: Store) -> None:
        first = await store.add_key(key("one"))
        second = await store.add_key(key("two", owner="p"))
        assert first.key_id < second.key_id
        assert await store.find_key("hash of one") == first
        assert await store.find_key("hash of none") is None
        assert await store.keys() == [first, second]
        assert await store.keys("p") == [second]
        assert await store.revoke_key(first.key_id, 9.0)
        assert not await store.revoke_key(first.key_id, 10.0)
        assert not await store.revoke_key(99, 10.0)
        assert await store.find_key("hash of one") == replace(first, revoked_at=9.0)

    async def test_a_key_keeps_its_limits_and_its_last_use(self, store: Store) -> None:
        assert not await store.any_key(1.0)
        limited = replace(
            key("one"),
            read_only=True,
            project_id="p",
            routes=("sample", "read"),
            expires_at=5.0,
        )
        kept = await store.add_key(limited)
        assert kept == replace(limited, key_id=kept.key_id)
        assert await store.get_key(kept.key_id) == kept
        assert await store.get_key(99) is None
        assert await store.any_key(4.9)
        assert not await store.any_key(5.0)
        store.use_key(kept.key_id, 3.0)

    async def test_the_audit_log_says_who_and_goes_by_age_alone(self, store: Store) -> None:
        entry = AuditEntry(
            at=1.0,
            owner="o",
            topic="sessions",
            event="session_ended",
            details={"session_id": "s"},
            key_id=7,
            address="10.0.0.1",
            request_id="r-1",
        )
        await store.audit(entry)
        await store.audit(replace(entry, at=2.0, owner=""))
        assert await store.audit_log("o") == [entry]
        assert [e.owner for e in await store.audit_log(None)] == ["o", ""]
        assert await store.forget_audit_before(1.0, 10) == 0
        assert await store.forget_audit_before(2.0, 10) == 1
        assert [e.at for e in await store.audit_log(None)] == [2.0]

    async def test_of_sessions_at_the_same_time_as_many_are_kept_as_fit(self, store: Store) -> None:
        async def add(name: str, owner: str, **more: Any) -> LimitReached | None:
            new = session(name, owner, **more)
            return await store.add_session(new, max_sessions=5, max_kept_sessions=7)

        found = await asyncio.gather(*(add(f"s{n}", "o") for n in range(40)))
        assert [f for f in found if f is not None] == [LimitReached("max_sessions", 5)] * 35
        assert await store.count_sessions("o") == 5
        # Sessions without heartbeats are no active ones, but they are kept.
        found = await asyncio.gather(*(add(f"t{n}", "p", heartbeats=False) for n in range(40)))
        kept = await store.add_session(
            session("other", "q"), max_sessions=None, max_kept_sessions=1
        )
        assert [f is None for f in found].count(True) == 5 + 2
        assert kept is None

    async def test_of_models_samplers_and_losses_as_many_are_kept_as_fit(
        self, store: Store
    ) -> None:
        await store.put_session(session("s"))
        await store.put_session(session("over", status=SessionCancelled(detail="")))
        await store.put_session(session("silent", heartbeats=False))
        await store.add_model(model("over:train:0"))
        await store.add_model(model("silent:train:0"))  # its last request was at 1.0
        limits = {"max_models": 3, "max_runs": 100, "silent_since": 1.0}
        names = [f"s:train:{n}" for n in range(20)]
        found = await asyncio.gather(*(store.add_model(model(n), **limits) for n in names))
        assert found[3:] == [LimitReached("max_models", 3)] * 17
        # One that is known is returned, however many there are.
        assert await store.add_model(model("s:train:0"), **limits) == found[0]
        assert await store.add_model(
            model("s:train:9"), max_models=4, max_runs=100, silent_since=0.5
        ) == LimitReached("max_models", 4)
        assert await store.add_model(model("s:train:9"), max_runs=5) == LimitReached("max_runs", 5)
        samplers = await asyncio.gather(
            *(store.add_sampler(sampler(f"s:sample:{n}"), max_samplers=4) for n in range(20))
        )
        assert samplers[4:] == [LimitReached("max_samplers", 4)] * 16
        assert await store.add_sampler(sampler("s:sample:0"), max_samplers=1) == samplers[0]
        losses = [replace(loss(), loss_id=f"s:loss:{n}") for n in range(20)]
        added = await asyncio.gather(*(store.add_loss(x, max_losses=2) for x in losses))
        assert added[2:] == [LimitReached("max_losses", 2)] * 18
        assert await store.add_loss(losses[0], max_losses=1) == losses[0]

    async def test_everything_that_is_kept_counts_by_its_part(self, store: Store) -> None:
        assert (await store.kept("o"))["results"] == KeptPart(0, 0)
        await store.put_session(session("s", user_metadata={"k": "v" * 1000}, tags=("t" * 100,)))
        await store.put_session(session("x", "other", user_metadata={"k": "v" * 9000}))
        await store.add_model(model(user_metadata={"a": "b" * 2000}))
        await store.put_checkpoint(checkpoint("a"))
        await store.put_checkpoint(replace(checkpoint("b"), expires_at=5.0))
        await store.add_sampler(sampler(size_bytes=70, location="l", snapshot="x"))
        await store.add_loss(replace(loss(), size_bytes=33))
        await store.submit(step(1, body=b"12345"))
        await store.submit(step(2, body=b"123"))
        await store.finish(step(1).op_id, DONE, 2.0)
        kept = await store.kept("o")
        assert kept["sessions"] == KeptPart(1, ROW_BYTES + 1 + 1000 + 100)
        assert kept["runs"] == KeptPart(1, ROW_BYTES + 1 + 2000)
        assert kept["checkpoints"] == KeptPart(2, 2 * (7 + ROW_BYTES + 2))
        assert kept["samplers"] == KeptPart(1, 70)
        assert kept["losses"] == KeptPart(1, 33)
        assert kept["requests"] == KeptPart(2, 8)
        assert kept["results"] == KeptPart(1, len(DONE.body or b""))
        await store.trim_journal("s:train:0", 1)
        await store.drop_results([step(1).op_id])
        kept = await store.kept("o")
        assert kept["requests"] == KeptPart(1, 3)
        assert kept["results"] == KeptPart(0, 0)
        await store.delete_checkpoint(checkpoint("a"))
        await store.put_checkpoint(replace(checkpoint("b"), size_bytes=9, user_metadata=None))
        await store.put_session(session("s"))
        await store.put_model(model(user_metadata={"a": "b"}))
        kept = await store.kept("o")
        assert kept["checkpoints"] == KeptPart(1, 9 + ROW_BYTES)
        assert kept["sessions"] == KeptPart(1, ROW_BYTES)
        assert kept["runs"] == KeptPart(1, ROW_BYTES + 2)
        await store.put_session(session("s", status=SessionCancelled(detail="")))
        await store.put_model(model(snapshot_seq=1))
        await store.finish(step(2).op_id, DONE, 2.0)
        await store.close_samplers(["s:sample:0"])
        while await store.prune(3.0, 100):
            pass
        kept = await store.kept("o")
        assert (kept["sessions"], kept["losses"]) == (KeptPart(0, 0), KeptPart(0, 0))

    async def test_listings_are_limited_to_a_project(self, store: Store) -> None:
        for number in range(3):
            name, project = f"s{number}", "p" if number else None
            await store.put_session(session(name, at=float(number), project_id=project))
            await store.put_checkpoint(
                replace(checkpoint(name, at=float(number)), project_id=project)
            )
        assert await store.session_ids("o", 0, 9, project_id="p") == ["s2", "s1"]
        assert [s.session_id for s in await store.sessions("o", project_id="p", limit=1)] == ["s2"]
        found = await store.checkpoints(owner="o", project_id="p")
        assert [c.name for c in found] == ["s2", "s1"]
        assert await store.count_checkpoints("o", live_at=1.0, project_id="p") == 2
        assert await store.stored_by_project("o", live_at=1.0, project_id="p") == {
            "p": KeptPart(2, 14)
        }
        assert await store.stored_by_project("o", live_at=1.0) == {
            None: KeptPart(1, 7),
            "p": KeptPart(2, 14),
        }

    async def test_a_probe_leaves_nothing(self, store: Store) -> None:
        for _ in range(2):
            await store.probe(1 << 16)
        assert (await store.kept(""))["results"] == KeptPart(0, 0)

    async def test_the_ids_of_a_session_come_in_order(self, store: Store) -> None:
        for number in range(3):
            await store.add_model(model(f"s:train:{number}"))
            await store.add_sampler(sampler(f"s:sample:{number}"))
        runs, samplers = await store.ids_of_session("s")
        assert runs == [f"s:train:{n}" for n in range(3)]
        assert samplers == [f"s:sample:{n}" for n in range(3)]
        assert await store.ids_of_session("t") == ([], [])

    async def test_many_submits_at_once_keep_their_order_and_are_accepted_once(
        self, store: Store
    ) -> None:
        wanted = [step(seq, body=b"%d" % seq) for seq in range(300)]
        twice = [op for op in wanted for _ in range(2)]
        answers = await asyncio.gather(*(store.submit(op) for op in twice))
        assert [new for _, new in answers] == [True, False] * 300
        assert [op.seq_id for op in await store.pending()] == list(range(300))
        ends = await asyncio.gather(*(store.finish(op.op_id, DONE, 1.0) for op in twice))
        assert ends == [True, False] * 300
        assert await store.pending() == []

    async def test_large_and_strange_values_come_back_as_they_were(self, store: Store) -> None:
        strange = "naïve \u2028 \U0001f9ea \x00 end"
        odd = session(
            user_metadata={strange: strange}, tags=(strange, ""), display_name="\U0001f9ea ñ"
        )
        await store.put_session(odd)
        assert await store.get_session("s") == odd
        assert await store.sessions() == [odd]
        other = OptimizerConfigBase(type="shampoo", block=128)  # type: ignore[call-arg]
        unknown_family = model(user_metadata={"k": "v"}, snapshot_seq=2**63 - 1)
        await store.add_model(replace(unknown_family, optimizer=other))
        assert await store.models() == [replace(unknown_family, optimizer=other)]

        body = bytes(range(256)) * (20_000_000 // 256)
        await store.submit(step(2**63 - 1, body=body))
        await store.finish(
            f"s:train:0:{2**63 - 1}", OperationOutcome(body=body, size_bytes=len(body)), 1.0
        )
        (kept,) = await store.journal("s:train:0", 2**63 - 2)
        assert kept.body == body
        found = await store.get_operation(kept.op_id)
        assert found is not None
        assert found.outcome is not None
        assert found.outcome.body == body

    async def test_text_no_database_takes_is_no_failure(self, store: Store) -> None:
        for bad in ("\0", "half a pair \ud83e"):
            assert await store.get_session(bad) is None
            assert await store.get_operation(bad) is None
            assert await store.get_checkpoint(bad) is None
            await store.remember("o", bad, "answer")
            assert await store.recall("o", bad) == "answer"
            await store.put_session(session(display_name=bad))


class DurableStoreSuite(StoreSuite):
    """What a store must do that remembers across restarts."""

    async def test_records_survive_a_restart(self, place: str) -> None:
        checkpoint_, loss_, audit_ = (
            checkpoint(),
            loss(),
            AuditEntry(at=1.0, owner="o", topic="checkpoints", event="e"),
        )
        async with self.open_store(place) as store:
            await store.put_session(session(tags=("a", "b")))
            await store.add_model(model())
            await store.add_sampler(sampler())
            await store.join_sampler("s:sample:0")
            await store.put_checkpoint(checkpoint_)
            await store.add_loss(loss_)
            await store.remember("o", "k", "answer")
            added = await store.add_key(key())
            await store.audit(audit_)
        async with self.open_store(place) as store:
            assert await store.get_session("s") == session(tags=("a", "b"))
            assert await store.get_model("s:train:0") == model()
            assert await store.get_sampler("s:sample:0") == sampler()
            assert await store.join_sampler("s:sample:0") == 2
            assert await store.get_checkpoint(checkpoint_.path) == checkpoint_
            assert await store.get_loss(loss_.loss_id) == loss_
            assert await store.recall("o", "k") == "answer"
            assert await store.keys() == [added]
            assert await store.audit_log("o") == [audit_]

    async def test_operations_survive_a_restart_and_samples_do_not(self, place: str) -> None:
        async with self.open_store(place) as store:
            for seq in (1, 0, 2):
                await store.submit(step(seq, body=b"body %d" % seq))
            await store.submit(sample(1))
            await store.start(["s:train:0:0", "s:train:0:1"], 5.0)
            await store.finish("s:train:0:0", DONE, 6.0, used(6.0, trained_tokens=3))
        async with self.open_store(place) as store:
            pending = await store.pending()
            # What ran when the server ended is waiting again.
            assert [(op.seq_id, op.state, op.body) for op in pending] == [
                (1, "queued", b"body 1"),
                (2, "queued", b"body 2"),
            ]
            done = await store.get_operation("s:train:0:0")
            assert done is not None
            assert (done.outcome, done.started_at, done.finished_at) == (DONE, 5.0, 6.0)
            assert await store.get_operation("s:sample:0:1") is None
            again, new = await store.submit(step(1, body=b"other"))
            assert not new
            assert again.body == b"body 1"
            assert not (await store.submit(step(0)))[1]
            assert await store.last_turn("s:train:0") == 0
            assert await store.usage("o", 0.0, 3600.0) == [hour_of(0, trained_tokens=3)]
            assert await store.finish("s:train:0:1", DONE, 7.0)

    async def test_refusals_are_one_line_per_minute_and_name(self, place: str) -> None:
        bad = Refusal(owner="", event="bad_key", address="10.0.0.1")
        async with self.open_store(place) as store:
            for number in range(1000):
                store.refused(bad, 60.0 + number % 60)
                store.refused(replace(bad, address=f"10.1.{number // 250}.{number % 250}"), 60.0)
            store.refused(replace(bad, owner="o", event="read_only", key_id=3), 130.0)
        async with self.open_store(place) as store:
            log = await store.audit_log(None)
            assert len(log) <= 260
            first = next(e for e in log if e.address == bad.address)
            assert (first.at, first.topic, first.event) == (60.0, "refused", "bad_key")
            assert first.details == {"count": 1000, "within_s": 60.0}
            counts = [cast("int", e.details["count"]) for e in log]
            assert sum(counts) == 2001
            (ours,) = await store.audit_log("o")
            assert ours.event == "read_only"

    async def test_the_last_use_of_a_key_is_written(self, place: str) -> None:
        async with self.open_store(place) as store:
            kept = await store.add_key(key("one"))
            store.use_key(kept.key_id, 3.0)
            store.use_key(kept.key_id, 4.0)
        async with self.open_store(place) as store:
            assert await store.get_key(kept.key_id) == replace(kept, last_used_at=4.0)

    async def test_what_is_written_later_is_written_at_the_end(self, place: str) -> None:
        async with self.open_store(place) as store:
            await store.put_session(session())
            await store.touch_session("s", 9.0)
            await store.add_usage(used(1.0, "sample", prompt_tokens=1))
        async with self.open_store(place) as store:
            assert [s.last_seen_at for s in await store.sessions()] == [9.0]
            assert await store.usage("o", 0.0, 3600.0) == [hour_of(0, "sample", prompt_tokens=1)]
