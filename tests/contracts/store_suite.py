"""What every `Store` must do; a subclass says how one is made."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tinkex.server.store.records import (
    AuditEntry,
    Model,
    Operation,
    Outcome,
    Sampler,
    Session,
    StoredCheckpoint,
    StoredLoss,
    UsageEntry,
)
from tinkex.types import (
    AdamOptimizerConfig,
    CustomLossGraph,
    CustomLossInput,
    LoraConfig,
    OptimStepRequest,
    SessionCancelled,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from tinkex.server import Store

LORA, ADAM = LoraConfig(rank=8, train_mlp=False), AdamOptimizerConfig()


def session(name: str = "s", owner: str = "o", at: float = 1.0, **more: Any) -> Session:
    return Session(session_id=name, owner=owner, created_at=at, last_seen_at=at, **more)


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


def sampler(name: str = "s:sample:0") -> Sampler:
    return Sampler(
        sampler_id=name, owner="o", session_id=name.split(":")[0], base_model="b", created_at=1.0
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


def step(seq: int, run: str = "s:train:0") -> Operation:
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


DONE = Outcome(body=b"result", size_bytes=6, usage=Usage(trained_tokens=3))


class StoreSuite:
    """Inherit this and define `open_store`."""

    pytestmark = pytest.mark.anyio

    def open_store(self) -> AbstractAsyncContextManager[Store]:
        """A fresh, empty store."""
        raise NotImplementedError

    @pytest.fixture
    async def store(self) -> AsyncIterator[Store]:
        async with self.open_store() as store:
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
        assert await store.get_session("z") is None

    async def test_the_first_model_of_an_id_stays(self, store: Store) -> None:
        first = model(user_metadata={"k": "v"})
        assert await store.add_model(first) == first
        assert await store.add_model(model(owner="thief")) == first
        changed = replace(first, last_request_at=9.0)
        await store.put_model(changed)
        assert await store.get_model(first.model_id) == changed
        await store.add_model(model("s:train:1"))
        await store.add_model(model("t:train:0", owner="p"))
        mine = await store.models(owner="o")
        assert [m.model_id for m in mine] == ["s:train:1", "s:train:0"]
        assert len(await store.models(session_id="t")) == 1

    async def test_samplers_are_kept_and_their_copies_counted(self, store: Store) -> None:
        first = await store.add_sampler(sampler())
        assert await store.add_sampler(replace(first, base_model="other")) == first
        await store.add_sampler(sampler("t:sample:0"))
        assert [s.sampler_id for s in await store.samplers("s")] == ["s:sample:0"]
        assert len(await store.samplers()) == 2
        counts = [await store.join_sampler(first.sampler_id) for _ in range(3)]
        assert counts == [1, 2, 3]

    async def test_checkpoints_are_kept_by_path_and_listed_newest_first(self, store: Store) -> None:
        old, new = checkpoint("old", at=1.0), checkpoint("new", at=2.0)
        elsewhere = checkpoint("x", run="t:train:0", at=3.0)
        for each in (new, old, elsewhere):
            await store.put_checkpoint(each)
        assert await store.get_checkpoint(old.path) == old
        assert [c.name for c in await store.checkpoints(owner="o")] == ["x", "new", "old"]
        assert [c.name for c in await store.checkpoints(model_id="s:train:0")] == ["new", "old"]
        await store.put_checkpoint(replace(old, public=True, expires_at=5.0))
        found = await store.get_checkpoint(old.path)
        assert found is not None
        assert (found.public, found.expires_at) == (True, 5.0)
        assert await store.delete_checkpoint(old.path)
        assert not await store.delete_checkpoint(old.path)
        assert await store.get_checkpoint(old.path) is None

    async def test_the_first_loss_of_an_id_stays(self, store: Store) -> None:
        loss = StoredLoss(
            loss_id="s:loss:0",
            owner="o",
            session_id="s",
            inputs=(CustomLossInput(name="logprobs", rank=1),),
            graph=CustomLossGraph(nodes=[]),
        )
        assert await store.add_loss(loss) == loss
        assert await store.add_loss(replace(loss, owner="thief")) == loss
        assert await store.get_loss("s:loss:0") == loss
        assert await store.get_loss("no") is None

    async def test_an_operation_is_accepted_once(self, store: Store) -> None:
        accepted, new = await store.submit(step(1))
        assert new
        again, new = await store.submit(replace(step(1), kind="forward"))
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
        assert not await store.finish("s:train:0:1", Outcome(error="late"), 5.0)
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
        await store.finish("s:sample:0:2", Outcome(error="no"), 2.0)
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
        assert dropped.outcome == replace(DONE, body=None)
        assert await store.drop_results_before(2.5) == 1
        assert await store.drop_results_before(2.5) == 0
        assert not (await store.submit(step(2)))[1]

    async def test_the_first_answer_to_a_key_is_remembered_per_owner(self, store: Store) -> None:
        assert await store.recall("o", "k") is None
        await store.remember("o", "k", "first")
        await store.remember("o", "k", "second")
        assert await store.recall("o", "k") == "first"
        assert await store.recall("p", "k") is None

    async def test_audit_and_usage_are_kept_per_owner_in_order(self, store: Store) -> None:
        for at, owner in ((1.0, "o"), (2.0, "p"), (3.0, "o")):
            await store.audit(AuditEntry(at=at, owner=owner, topic="checkpoints", event=f"e{at:g}"))
            await store.add_usage(
                UsageEntry(
                    at=at,
                    owner=owner,
                    session_id="s",
                    base_model="b",
                    project_id=None,
                    kind="sample",
                    usage=Usage(prompt_tokens=int(at)),
                )
            )
        assert [e.event for e in await store.audit_log("o")] == ["e1", "e3"]
        assert [e.at for e in await store.usage("o", 0.0, 3.0)] == [1.0]
        assert [e.at for e in await store.usage("o", 0.0, 3.5)] == [1.0, 3.0]
