"""One model from its creation to its end: its queue, its place in the engine, what is saved.

Every engine call for a model is made here or, for a batch of many models, while the states of all
of them say that they run. So at any time one activity owns a model:

| state       | meaning                                      | next                              |
| ----------- | -------------------------------------------- | --------------------------------- |
| `absent`    | the engine does not have the model           | restoring, running (first or last |
|             |                                              | operation), leaving               |
| `restoring` | its snapshot is loaded, its journal replayed | ready; absent if that failed      |
| `ready`     | the engine has it, nothing runs              | running, leaving; absent when the |
|             |                                              | engine dies                       |
| `running`   | its operations are in the engine             | saving, ready; absent if the      |
|             |                                              | engine died, or a failure may     |
|             |                                              | have half-changed the model       |
| `saving`    | a snapshot is being written                  | ready, absent                     |
| `leaving`   | its session is over, it is dropped           | closed; absent if storage fails   |
| `closed`    | unloaded, or its session is over             |                                   |

A model is its last snapshot and the operations after it. Training is deterministic, so running
them again gives the bits that the clients got. A failure that may have left the model half-changed
evicts it: the next operation finds it as it was before.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import anyio

from tinkex.errors import EngineDiedError, InputError, RequestFailedError, StorageError
from tinkex.server.scheduler.checkpoints import failure
from tinkex.server.scheduler.engine_access import EngineRestartedError
from tinkex.server.scheduler.jobs import Done, check_created, check_same, spec_of
from tinkex.server.scheduler.outcomes import CANCELLED
from tinkex.server.scheduler.plan import Queue
from tinkex.server.scheduler.samplers import SESSION_OVER, UnsavedSamplers
from tinkex.server.supervision import no_stray_cancellation, quietly, retry_wait_s
from tinkex.types import CreateModelResponse, LoadWeightsResponse, UnloadModelResponse, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tinkex.clock import Clock
    from tinkex.server.scheduler.checkpoints import Checkpoints
    from tinkex.server.scheduler.engine_access import EngineAccess, Epoch
    from tinkex.server.scheduler.jobs import Jobs
    from tinkex.server.scheduler.outcomes import Outcomes
    from tinkex.server.scheduler.samplers import PublishedSamplers
    from tinkex.server.server_settings import ServerSettings
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import LoadOrder, Model, Operation

State = Literal["absent", "restoring", "ready", "running", "saving", "leaving", "closed"]

_NEXT: Mapping[State, frozenset[State]] = {
    "absent": frozenset({"restoring", "running", "leaving"}),
    "restoring": frozenset({"ready", "absent"}),
    "ready": frozenset({"absent", "running", "leaving"}),
    "running": frozenset({"ready", "absent", "saving"}),
    "saving": frozenset({"ready", "absent"}),
    "leaving": frozenset({"closed", "absent"}),
    "closed": frozenset(),
}
_ACTIVE = frozenset({"restoring", "running", "saving", "leaving"})
# What a model is made of; the rest reads it and changes nothing. A load is its own snapshot.
_CHANGING = frozenset({"create_model", "forward_backward", "optim_step"})
_PUBLISH = "save_weights_for_sampler"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunParts:
    """What all runs share. `changed` plans a run again, `start` runs work in the background."""

    store: Store
    clock: Clock
    access: EngineAccess
    jobs: Jobs
    checkpoints: Checkpoints
    samplers: PublishedSamplers
    outcomes: Outcomes
    settings: ServerSettings
    changed: Callable[[ModelRun], None]
    start: Callable[..., None]


@dataclass(slots=True)
class _Unsaved:
    """What the model has done since its last snapshot, and since when."""

    since: float
    ops: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class _Wanted:
    """Samples that wait for the model to be in the engine; `error` says why it will not be."""

    done: anyio.Event = field(default_factory=anyio.Event)
    error: Exception | None = None


class ModelRun:
    """The owner of one model. Used from one event loop, without locks."""

    def __init__(self, model_id: str, parts: RunParts) -> None:
        self.model_id = model_id
        self._parts = parts
        # Mutable state: what waits; the state of the table above; the engine that has the model;
        # tries in a row that failed; why the model is not restored any more; whether it is
        # unloaded, or leaves when nothing waits.
        self.queue = Queue(model_id)
        self._state: State = "absent"
        self._epoch: Epoch | None = None
        self._failures = 0
        self._given_up: RequestFailedError | None = None
        self._unloaded = False
        self._leaves = False
        # Mutable state: what the snapshot lacks, and when the next try to write one is; who waits
        # for the model.
        self._unsaved: _Unsaved | None = None
        self._snapshot_failures = 0
        self._no_snapshot_before = 0.0
        self._wanted: _Wanted | None = None
        self.unsaved_samplers = UnsavedSamplers(
            parts.samplers, parts.access, parts.clock, parts.start
        )

    @classmethod
    async def load(cls, model: Model, parts: RunParts) -> ModelRun:
        """The run of a stored model, in the state that its records describe."""
        run, queue = cls(model.model_id, parts), Queue(model.model_id)
        last = await parts.store.last_turn(model.model_id)
        op = await parts.store.get_operation(f"{model.model_id}:{last}")
        if op is not None and _was_cancelled(op):
            # It ended before its turn, so the numbers before it may still come.
            journal = await parts.store.journal(model.model_id, model.snapshot_seq)
            ended = [o for o in journal if o.state == "done"]
            last = max((o.seq_id for o in ended if not _was_cancelled(o)), default=-1)
            queue.void = {o.seq_id for o in ended if _was_cancelled(o) and o.seq_id > last}
        queue.next_seq = max(last, model.snapshot_seq) + 1
        queue.last_seq = max(queue.next_seq - 1, *queue.void, -1)
        run.queue = queue
        run._unloaded = model.closed
        for sampler in await parts.store.samplers(model_id=model.model_id, unsaved=True):
            run.unsaved_samplers.add(sampler)
        return run

    # -- what the planner and the worker ask --------------------------------------------------

    @property
    def state(self) -> State:
        """Where the run is; an engine that died has made a ready model absent."""
        self._notice_death()
        return self._state

    @property
    def active(self) -> bool:
        """Whether something runs for the model."""
        return self._state in _ACTIVE

    @property
    def in_engine(self) -> bool:
        """Whether the present engine has the model as its clients know it."""
        return self._epoch is not None and self._epoch == self._parts.access.epoch()

    @property
    def unsaved_bytes(self) -> int:
        """The bodies of what a crash would run again."""
        return 0 if self._unsaved is None else self._unsaved.size_bytes

    @property
    def over(self) -> bool:
        """Whether nothing of the run needs to stay in memory."""
        wanted = self.queue.waiting or self._leaves or self._wanted is not None
        idle = self.state == "absent" and self._unloaded and not wanted
        return idle or self._state == "closed"

    @property
    def idle(self) -> bool:
        """Whether nothing is to be started for it before it says that it has changed."""
        wanted = self._leaves or self._wanted is not None
        return not self.queue.waiting and (self.active or not wanted)

    @property
    def missing(self) -> bool:
        """Whether the next work needs the model, and the engine does not have it."""
        head = self.queue.head
        needed = self._wanted is not None or (head is not None and self._needs_model(head))
        return needed and self.state == "absent"

    @property
    def may_leave(self) -> bool:
        """Whether its session is over, and everything that was accepted has run."""
        return self._leaves and not self.queue.waiting and not self.active

    @property
    def wakes_at(self) -> float | None:
        """When the next try is, for a model that something waits for or that is to leave."""
        waits = self._wanted is not None or self._leaves
        return self.queue.not_before if waits and not self.active else None

    def _needs_model(self, op: Operation) -> bool:
        """The first operation makes the model; the last only needs samplers to be saved."""
        if op.kind == "unload_model":
            return len(self.unsaved_samplers) > 0
        return op.seq_id != 0

    async def be_in_engine(self) -> None:
        """Return when the engine has the model; raises why it cannot have it."""
        if self.in_engine:
            return
        if self._state == "closed":
            raise _session_over()
        wanted = self._wanted = self._wanted or _Wanted()
        self._parts.changed(self)
        await wanted.done.wait()
        if wanted.error is not None:
            raise wanted.error

    def leave(self) -> None:
        """The session is over: drop the model when everything that was accepted has run."""
        self._leaves = True
        self._parts.changed(self)

    # -- transitions ----------------------------------------------------------------------------

    def begin(self, state: Literal["restoring", "running", "leaving"]) -> None:
        """Take the model for one activity. Whatever was planned to run starts right after."""
        self._notice_death()
        self._enter(state)

    def take(self, operations: Iterable[Operation]) -> None:
        """Begin to run operations that wait."""
        self.begin("running")
        for op in operations:
            del self.queue.waiting[op.seq_id]

    def _notice_death(self) -> None:
        if self._state == "ready" and not self.in_engine:
            self._enter("absent")

    def _enter(self, state: State) -> None:
        if state not in _NEXT[self._state]:
            raise AssertionError(f"{self.model_id} cannot go from {self._state} to {state}")
        self._state = state
        self.queue.busy = state in _ACTIVE

    def _idle(self) -> None:
        """Nothing runs any more."""
        self._enter("ready" if self.in_engine else "absent")
        self._parts.changed(self)

    def evict(self) -> None:
        """Treat the engine's copy as lost: the next use restores the model from its records."""
        self._epoch = None

    def rest(self, error: Exception) -> None:
        """Wait before the next try, longer each time."""
        self._failures += 1
        self.queue.not_before = self._parts.clock.now() + retry_wait_s(self._failures)
        _log.error("%s is tried again later: %s", self.model_id, error)

    def failed(self, error: Exception, again: Sequence[Operation] = ()) -> None:
        """End an activity that raised an unexpected error; operations that it had run `again`."""
        self.evict()
        self.rest(error)
        self.queue.waiting.update({op.seq_id: op for op in again})
        if self.active:
            self._idle()
        else:
            self._parts.changed(self)

    def ran(self, last_seq: int, again: Sequence[Operation], error: Exception | None) -> bool:
        """Operations up to `last_seq` ended, but those that run `again`; True if a snapshot is due.

        In that case the state is `saving`, and `snapshot` has to follow.
        """
        left = [op.seq_id for op in again]
        for op in again:
            self.queue.waiting[op.seq_id] = op
        self.queue.advance(min(left) - 1 if left else last_seq)
        if error is not None:
            self.rest(error)
        elif not again:
            self._failures = 0
        if self._snapshot_due():
            self._enter("saving")
            return True
        self._idle()
        return False

    # -- restoring --------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Make the engine's model what its clients know it to be; in state `restoring`."""
        access, name = self._parts.access, f"restoring {self.model_id}"
        error: Exception | None = self._given_up
        try:
            if error is None:
                with no_stray_cancellation():
                    async with access.running([name]):
                        await self._replay()
                access.clear([name])
                self._failures = 0
                self._answer(None)
        except EngineRestartedError as restarted:
            if access.hopeless:
                self.rest(restarted)
        except EngineDiedError:
            if access.blame(name):
                access.clear([name])
                error = await self._give_up("brought back")
        except StorageError as failed:
            self.rest(failed)
        except Exception as failed:  # noqa: BLE001 - what waits for the model gets the error
            error = failed
        if error is not None:
            await self._fail_head(error)
        self._idle()

    async def _replay(self) -> None:
        parts = self._parts
        epoch = await parts.access.ready()
        model = await self._model()
        if model.closed:
            self._unloaded = True
            raise failure(f"model {self.model_id!r} was unloaded; create another one")
        journal = await parts.store.journal(self.model_id, model.snapshot_seq)
        done = [op for op in journal if op.state == "done"]
        for op in done:
            # Its outcome was stored although storing it raised an error.
            if self.queue.withdraw(op) is not None:
                parts.outcomes.found_finished(op)
        check_created(model, done)
        await self._start_from_snapshot(model, epoch)
        succeeded = [op for op in done if op.outcome is not None and op.outcome.error is None]
        for kind, ops in groupby(succeeded, key=lambda op: op.kind):
            if kind == _PUBLISH:
                await self._publish_again(list(ops), epoch)
            elif kind in _CHANGING:
                await self._run_again(kind, model, list(ops), epoch)
        self._unsaved = None
        for op in succeeded:
            self._count(op)
        self._epoch = epoch
        # A save that failed may have left a record of a sampler that was never acknowledged.
        failed = {op.seq_id for op in done if op.outcome is not None and op.outcome.error}
        self.unsaved_samplers.forget(s for s in self.unsaved_samplers if s.seq_id in failed)
        self.unsaved_samplers.write()
        _log.info("restored model %s from %d operations", self.model_id, len(done))

    async def _start_from_snapshot(self, model: Model, epoch: Epoch) -> None:
        engine, guard = self._parts.access.engine, self._parts.access.guard
        # A restore that failed may have left a part.
        await guard(epoch, engine.drop_adapter(self.model_id))
        if model.snapshot_location is not None:
            await guard(epoch, engine.create_adapter(spec_of(model)))
            load = engine.load_adapter(self.model_id, model.snapshot_location, optimizer=True)
            await guard(epoch, load)

    async def _publish_again(self, operations: Sequence[Operation], epoch: Epoch) -> None:
        unsaved = {sampler.seq_id: sampler for sampler in self.unsaved_samplers}
        for op in operations:
            if op.seq_id in unsaved:
                await self._parts.samplers.publish(unsaved[op.seq_id], epoch)

    async def _run_again(
        self, kind: str, model: Model, operations: Sequence[Operation], epoch: Epoch
    ) -> None:
        parts = self._parts
        engine, guard, at_once = parts.access.engine, parts.access.guard, parts.settings
        match kind:
            case "forward_backward":
                for start in range(0, len(operations), at_once.max_batch_ops):
                    part = operations[start : start + at_once.max_batch_ops]
                    batch = [await parts.jobs.train_op(op) for op in part]
                    check_same(part, await guard(epoch, engine.train(batch)))
            case "optim_step":
                for op in operations:
                    step = [parts.jobs.optim_op(op)]
                    check_same([op], await guard(epoch, engine.optim_step(step)))
            case _:
                await guard(epoch, engine.create_adapter(spec_of(model)))

    async def _give_up(self, when: str) -> RequestFailedError:
        why = f"the engine died each time model {self.model_id!r} was {when}"
        advice = "so it is given up; load its last checkpoint into another model"
        self._given_up = RequestFailedError(f"{why}, {advice}", None, "server")
        # Only the model's journal could publish these again.
        lost = list(self.unsaved_samplers)
        await quietly(self._parts.samplers.drop(lost, why))
        self.unsaved_samplers.forget(lost)
        return self._given_up

    async def _fail_head(self, error: Exception) -> None:
        """The model cannot be restored: fail its first operation; the next one tries again."""
        self._answer(error)
        head = self.queue.head
        if head is not None:
            outcomes = self._parts.outcomes
            await outcomes.finish(head, outcomes.settled(head, error))
            self.queue.waiting.pop(head.seq_id, None)
            self.queue.advance(head.seq_id)

    def _answer(self, error: Exception | None) -> None:
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            wanted.error = error
            wanted.done.set()

    # -- operations -------------------------------------------------------------------------------

    async def settle(self, op: Operation, result: Done | Exception) -> None:
        """Record how an operation ended; what builds on it starts only after that."""
        outcomes = self._parts.outcomes
        outcome = outcomes.settled(op, result)
        await outcomes.finish(op, outcome)
        self._parts.access.clear([op.op_id])
        if outcome.error is None:
            self._count(op)
            if op.kind == "unload_model":
                self._unloaded = True
            if op.kind == _PUBLISH:
                self.unsaved_samplers.write()

    async def control(self, op: Operation) -> Done | Exception:
        """Run an operation that is neither training nor sampling; in state `running`."""
        parts = self._parts
        try:
            request = parts.jobs.request(op)
            model = await self._model()
            if op.kind in ("load_weights", "unload_model"):
                # The journal that a crash would publish them from is about to be trimmed. Before
                # `running`: an operation that runs alone would keep the saves out of the engine.
                await self.unsaved_samplers.saved()
            async with parts.access.running([op.op_id]):
                epoch = await parts.access.ready()
                if self._needs_model(op) and not self.in_engine:
                    raise EngineRestartedError("the engine was started again")
                return Done(await self._control(op, model, request, epoch), Usage())
        except (EngineDiedError, EngineRestartedError, StorageError):
            raise
        except (RequestFailedError, InputError) as error:
            return error
        except Exception as error:  # noqa: BLE001 - an operation ends here; its failure is recorded
            self.evict()
            return error

    async def _control(self, op: Operation, model: Model, request: Any, epoch: Epoch) -> object:
        checkpoints = self._parts.checkpoints
        match op.kind:
            case "create_model":
                await self._create(model, epoch)
                return CreateModelResponse(model_id=model.model_id)
            case "load_weights":
                return await self._load(op, model, request, epoch)
            case "save_weights":
                return await checkpoints.state(op, model, request, epoch)
            case "save_weights_for_sampler":
                response, sampler = await checkpoints.for_sampler(op, model, request, epoch)
                if sampler is not None and sampler.location is None and sampler.dropped is None:
                    self.unsaved_samplers.add(sampler)
                return response
            case "save_weights_external":
                return await checkpoints.external(op, model, request, epoch)
            case "unload_model":
                await self._unload(op)
                return UnloadModelResponse(model_id=model.model_id, type="unload_model")
            case _:
                raise RequestFailedError(f"{op.kind} is no control operation", op.op_id, "server")

    async def _create(self, model: Model, epoch: Epoch) -> None:
        engine, guard = self._parts.access.engine, self._parts.access.guard
        # An attempt that was not finished may have left an adapter.
        await guard(epoch, engine.drop_adapter(model.model_id))
        await guard(epoch, engine.create_adapter(spec_of(model)))
        self._epoch = epoch

    async def _load(
        self, op: Operation, model: Model, order: LoadOrder, epoch: Epoch
    ) -> LoadWeightsResponse:
        parts = self._parts
        checkpoint = await parts.checkpoints.loadable(order, model)
        try:
            if order.creates_model:
                await self._create(model, epoch)
            load = parts.access.engine.load_adapter(
                model.model_id, checkpoint.location, optimizer=order.optimizer
            )
            await parts.access.guard(epoch, load)
            # The client may delete the checkpoint as soon as it is loaded, so the model needs a
            # snapshot of its own before the operation ends.
            await self._take_snapshot(op.seq_id)
        except BaseException:
            # Half loaded, or loaded without a snapshot: it fails, or it runs again.
            self.evict()
            raise
        return LoadWeightsResponse(path=order.path, model_id=model.model_id, type="load_weights")

    async def _unload(self, op: Operation) -> None:
        parts = self._parts
        self.evict()
        await parts.access.engine.drop_adapter(self.model_id)
        self._unsaved = None
        # If a crash follows, this operation runs again and needs no snapshot.
        await self._delete_snapshots()
        # Without a location the model is closed: nothing can restore it.
        await parts.store.change_model(
            self.model_id, snapshot_location=None, snapshot_seq=op.seq_id
        )

    async def _model(self) -> Model:
        model = await self._parts.store.get_model(self.model_id)
        if model is None:
            raise failure(f"there is no model {self.model_id!r}")
        return model

    # -- snapshots --------------------------------------------------------------------------------

    def _count(self, op: Operation) -> None:
        if op.kind in _CHANGING:
            self._unsaved = self._unsaved or _Unsaved(self._parts.clock.now())
            self._unsaved.ops += 1
            self._unsaved.size_bytes += len(op.body)

    def _snapshot_due(self) -> bool:
        unsaved, settings, now = self._unsaved, self._parts.settings, self._parts.clock.now()
        return (
            unsaved is not None
            and (
                unsaved.ops >= settings.snapshot_ops
                or unsaved.size_bytes >= settings.snapshot_bytes
                or now >= unsaved.since + settings.snapshot_s
            )
            and now >= self._no_snapshot_before
            # A crash would publish them again from the journal that the snapshot replaces.
            and not self.unsaved_samplers
            and self.in_engine
        )

    async def snapshot(self) -> None:
        """Write a snapshot, or try again later; in state `saving`."""
        await self._try_snapshot()
        self._idle()

    async def save_changes(self) -> None:
        """Write a snapshot if the model has changed; at shutdown, when nothing runs."""
        try:
            if self._unsaved is not None and self.in_engine:
                await self.unsaved_samplers.saved()
                await self._try_snapshot()
        except EngineRestartedError:
            return  # the next server replays the journal

    async def _try_snapshot(self) -> None:
        access, name = self._parts.access, f"saving {self.model_id}"
        try:
            with no_stray_cancellation():
                async with access.running([name]):
                    await self._take_snapshot(self.queue.next_seq - 1)
            access.clear([name])
            self._snapshot_failures = 0
        except EngineRestartedError:
            return  # the restore counts afresh
        except EngineDiedError:
            if access.blame(name):
                access.clear([name])
                await self._give_up("saved")
        except Exception as error:  # noqa: BLE001 - training continues without this snapshot
            _log.error("no snapshot of %s: %s", self.model_id, error)
            self._snapshot_failures += 1
            wait_s = retry_wait_s(self._snapshot_failures)
            self._no_snapshot_before = self._parts.clock.now() + wait_s

    async def _take_snapshot(self, seq_id: int) -> None:
        """Save the model as it is after request `seq_id`, and trim its journal."""
        parts = self._parts
        model = await self._model()
        # Two locations alternate, so that there is a complete snapshot at every moment.
        first, second = _places(self.model_id)
        location = second if model.snapshot_location == first else first
        epoch, engine = parts.access.epoch(), parts.access.engine
        await parts.access.guard(
            epoch, engine.save_adapter(self.model_id, location, optimizer=True)
        )
        await parts.store.change_model(
            self.model_id, snapshot_location=location, snapshot_seq=seq_id
        )
        # From here on the snapshot counts. What cannot be deleted now, the next one deletes.
        self._unsaved = None
        await quietly(parts.store.trim_journal(self.model_id, seq_id))
        if model.snapshot_location is not None:
            await quietly(engine.delete_saved(model.snapshot_location))

    async def _delete_snapshots(self) -> None:
        for location in _places(self.model_id):
            try:
                await self._parts.access.engine.delete_saved(location)
            except EngineDiedError:
                raise
            except Exception:  # noqa: BLE001 - a file too many is not worth an error
                _log.exception("%s could not be deleted", location)

    # -- the end ----------------------------------------------------------------------------------

    async def drop(self) -> None:
        """Drop the model of a session that is over; in state `leaving`."""
        parts = self._parts
        self._leaves = False
        self.evict()
        self._unsaved = None
        self._answer(_session_over())
        parts.access.clear([f"restoring {self.model_id}", f"saving {self.model_id}"])
        await quietly(parts.access.engine.drop_adapter(self.model_id))
        try:
            # A request that was accepted before the session ended may have published one more.
            with no_stray_cancellation():
                samplers = await parts.store.samplers(model_id=self.model_id)
                held = [sampler for sampler in samplers if parts.samplers.holds(sampler)]
                await parts.samplers.drop(held, SESSION_OVER)
                self.unsaved_samplers.forget(samplers)
                await self._delete_snapshots()
                await self._close()
        except Exception as error:  # noqa: BLE001 - it leaves later
            self._leaves = True
            self.rest(error)
            self._idle()
            return
        self._answer(_session_over())
        self._enter("closed")
        parts.changed(self)

    async def _close(self) -> None:
        model = await self._parts.store.get_model(self.model_id)
        if model is not None:
            last = max(self.queue.last_seq, model.snapshot_seq, 0)
            await self._parts.store.trim_journal(self.model_id, last)
            # The last step: until it is done, the next start finds the model and drops it again.
            await self._parts.store.change_model(
                self.model_id, snapshot_location=None, snapshot_seq=last
            )


def _places(model_id: str) -> tuple[str, str]:
    """The two locations that hold a model's snapshots in turn."""
    return f"snapshot/{model_id}@0", f"snapshot/{model_id}@1"


def _session_over() -> RequestFailedError:
    return RequestFailedError("the session is over", None, "user")


def _was_cancelled(op: Operation) -> bool:
    return op.outcome is not None and op.outcome.error == CANCELLED.error
