"""The scheduler's interface: accepts operations, each of which ends with an outcome in the store.

The worker connects the scheduler's parts. Every accepted operation gets an outcome, if necessary
after a restart of the engine or of the server.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import anyio

from tinkex.clock import time_limit
from tinkex.errors import ClosedError, RequestFailedError, StorageError
from tinkex.server.scheduler.checkpoints import Checkpoints
from tinkex.server.scheduler.engine_access import EngineAccess
from tinkex.server.scheduler.handover import Handover
from tinkex.server.scheduler.jobs import Done, Jobs
from tinkex.server.scheduler.loop import SchedulerLoop
from tinkex.server.scheduler.lost_samples import LostSamples
from tinkex.server.scheduler.model_run import ModelRun, RunParts
from tinkex.server.scheduler.outcomes import CANCELLED, Load, Outcomes
from tinkex.server.scheduler.room import Room
from tinkex.server.scheduler.samplers import PublishedSamplers
from tinkex.server.scheduler.samples import SampleRunner, Shares
from tinkex.server.scheduler.upkeep import SessionEnds
from tinkex.server.store.ownership import ClaimLostError, claim_key
from tinkex.server.store.records import OperationOutcome
from tinkex.server.supervision import (
    keep_running,
    no_stray_cancellation,
    quietly,
    retry_wait_s,
)
from tinkex.types import Usage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from anyio.abc import TaskGroup

    from tinkex.clock import Clock
    from tinkex.engine.protocol import Engine
    from tinkex.server.observability.meters import Meters
    from tinkex.server.scheduler.outcomes import Waiters
    from tinkex.server.scheduler.samples import Elsewhere
    from tinkex.server.server_settings import ServerSettings
    from tinkex.server.store.ownership import Claim
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import Operation, OpKind, StoredSession
    from tinkex.types import SessionStatus


_LAST_SEQ = (1 << 63) - 1  # the largest number that a database has
# Tries to read what is stored, of the server or of one model.
_MOST_READS = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OperationProgress:
    """Where an unfinished operation stands: how many go first, and since when."""

    state: Literal["queued", "running"]
    position: int
    since: float


class Worker:
    """Runs accepted operations; `run()` is its one long-lived task.

    `owned` are the keys of this node of a cluster, which `handover` takes over one by one, and
    `elsewhere` has other nodes compute samples. A server without others owns everything, and has
    neither.
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        clock: Clock,
        waiters: Waiters,
        meters: Meters,
        settings: ServerSettings,
        *,
        encode: Callable[[OpKind, object], bytes],
        decode: Callable[[Operation], object],
        owned: Mapping[str, Claim] | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._meters = meters
        self._settings = settings
        self._owned = owned
        self.load = Load()
        self.lost = LostSamples(store, clock)
        self._access = access = EngineAccess(engine, settings.max_engine_deaths)
        self._samplers = samplers = PublishedSamplers(store, access, clock)
        self.room = room = Room(
            store,
            samplers,
            clock,
            max_stored_bytes=settings.max_stored_bytes,
            max_checkpoints=settings.max_checkpoints,
            shared=owned is not None,
        )
        self.checkpoints = Checkpoints(store, access, samplers, clock, room, settings.max_samplers)
        jobs = Jobs(store, decode, bool(getattr(engine, "takes_bodies", False)))
        self._outcomes = outcomes = Outcomes(
            store, clock, waiters, meters, self.load, self.lost, encode
        )
        self._samples = SampleRunner(
            store,
            clock,
            jobs,
            access,
            samplers,
            outcomes,
            self.load,
            Shares(settings.max_sequences_running),
            self._restored,
            elsewhere,
        )
        # Mutable state: the run of every model that is alive; training requests that are being
        # read, by owner and oldest first; where background work runs; why nothing runs any more.
        self._runs: dict[str, ModelRun] = {}
        self._arriving: dict[str, dict[object, float]] = {}
        self._group: TaskGroup | None = None
        self.started = anyio.Event()
        self.ended: str | None = None
        self._loop = SchedulerLoop(
            self._runs, clock, access, jobs, outcomes, settings, self._oldest_arrivals
        )
        self._parts = RunParts(
            store=store,
            clock=clock,
            access=access,
            jobs=jobs,
            checkpoints=self.checkpoints,
            samplers=samplers,
            outcomes=outcomes,
            settings=settings,
            changed=self._loop.attend,
            start=self._start,
            claim_epoch=self._claim_epoch,
        )
        self._ends = SessionEnds(
            store, self.checkpoints, samplers, self.lost, self._runs, self._run_of, owned
        )
        self.handover = Handover(
            store=store,
            clock=clock,
            access=access,
            runs=self._runs,
            loop=self._loop,
            load=self.load,
            lost=self.lost,
            samplers=samplers,
            samples=self._samples,
            waiters=waiters,
            ends=self._ends,
            resume=self._resume,
        )

    @property
    def samples_in_flight(self) -> int:
        """Samples accepted and not finished."""
        return len(self._samples)

    @property
    def samples_running(self) -> int:
        """Samples that have started and not finished."""
        return self._samples.running

    def queue_lengths(self) -> dict[str, int]:
        """How many operations wait for their turn, by kind."""
        kinds = (op.kind for queue in self._loop.queues for op in queue.waiting.values())
        return dict(Counter[str](kinds) + Counter({"sample": self._samples.waiting}))

    @property
    def journal_bytes(self) -> int:
        """The bodies that a crash would need: of what has not run, or is in no snapshot yet."""
        return self.load.queued_bytes + sum(run.unsaved_bytes for run in self._runs.values())

    def held(self) -> dict[str, int]:
        """How many objects of each kind are in memory; none on an idle server without sessions."""
        runs = self._runs.values()
        return {
            "models": len(runs),
            "models in the engine": sum(run.in_engine for run in runs),
            "samples": len(self._samples),
            "ending sessions": len(self._ends),
            "published samplers": len(self._samplers),
            "unsaved samplers": sum(len(run.unsaved_samplers) for run in runs),
            "suspects": self._access.suspected,
            "samplers with requests": len(self.lost),
            "requests being read": len(self._arriving),
        }

    async def run(self) -> None:
        """Load what the store has pending, then plan and start work until cancelled.

        Returns only if the scheduler itself has failed; `ended` says why.
        """
        try:
            with no_stray_cancellation():
                await self._run()
        except Exception as error:  # noqa: BLE001 - reported; the process ends in order
            _log.critical("the scheduler has ended", exc_info=error)
            self.ended = f"the scheduler has ended ({type(error).__name__})"

    def _claim_epoch(self, model_id: str) -> int | None:
        claim = None if self._owned is None else self._owned.get(model_id)
        return None if claim is None else claim.epoch

    async def _run(self) -> None:
        # A node of a cluster owns nothing at its start.
        pending = await self._load_patiently() if self._owned is None else []
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(keep_running, "ending sessions", self._ends.run, self._clock)
            self._samples.run_in(group)
            by_model: dict[str, list[Operation]] = {}
            for op in pending:
                self.load.add(op)
                if op.kind == "sample":
                    self._samples.put(op)
                else:
                    by_model.setdefault(cast("str", op.model_id), []).append(op)
            for operations in by_model.values():
                group.start_soon(self._resume, operations)
            self.started.set()
            try:
                with no_stray_cancellation():
                    await self._loop.run(group)
            except Exception as error:  # noqa: BLE001 - raised below, outside the group
                failure = error
                group.cancel_scope.cancel()
            finally:
                self._samples.run_in(None)
                self._group = None
                self.load.clear()
                self._runs.clear()
                self._loop.forget()
        if failure is not None:
            raise failure

    async def _load_patiently(self) -> list[Operation]:
        failures = 0
        while True:
            try:
                with no_stray_cancellation():
                    return await self._load()
            except Exception:
                failures += 1
                if failures == _MOST_READS:
                    raise
                _log.exception("what is stored could not be read; it is tried again")
                await self._clock.sleep(retry_wait_s(failures))

    async def _load(self) -> list[Operation]:
        """Note what is alive in the store; returns what has not finished.

        Models are loaded when something is to be done for them.
        """
        store = self._store
        # Clients could not send heartbeats while the server was down.
        await store.touch_sessions(self._clock.wall())
        samplers = (*await store.samplers(located=True), *await store.samplers(unsaved=True))
        models = await store.open_models()
        # Read last: requests are answered meanwhile, and a model that has just been created must
        # find its session here.
        active = {session.session_id for session in await store.sessions(active=True)}
        for sampler in samplers:
            if sampler.session_id not in active:
                self._ends.add(sampler.session_id)
            elif sampler.dropped is not None:
                await quietly(self._samplers.drop([sampler], sampler.dropped))
            elif sampler.snapshot is not None:
                self._samplers.add(sampler)
        for model in models:
            if model.session_id not in active:
                self._ends.add(model.session_id)
        # Those in `load` have just arrived, and are queued.
        return [op for op in await store.pending() if op.op_id not in self.load]

    async def _resume(self, operations: Sequence[Operation]) -> None:
        """Queue unfinished operations of one model; they fail if the model cannot be read."""
        failures = 0
        while operations:
            try:
                with no_stray_cancellation():
                    queue = (await self._run_of(cast("str", operations[0].model_id))).queue
            except Exception as error:  # noqa: BLE001 - one model is tried again, or fails
                failures += 1
                _log.exception("%s could not be read", operations[0].model_id)
                if failures >= _MOST_READS and not isinstance(error, StorageError):
                    for op in operations:
                        await quietly(self._outcomes.finish(op, self._outcomes.settled(op, error)))
                    operations = [op for op in operations if op.op_id in self.load]
                await self._clock.sleep(retry_wait_s(failures))
            else:
                queue.next_seq = min(queue.next_seq, *(op.seq_id for op in operations))
                for op in operations:
                    queue.put(op, self._clock.now())
                self._loop.attend(self._runs[queue.model_id])
                return

    async def stop(self) -> None:
        """Start nothing new, let what runs end, and save the models, within `grace_s`."""
        grace_s = self._settings.grace_s
        if grace_s <= 0:
            return
        async with time_limit(self._clock, grace_s):
            self._samples.run_in(None)
            if self.ended is not None:
                return
            await self._loop.stop()
            await self._samples.idle()

    async def submit(self, operation: Operation) -> Operation:
        """Accept an operation, or find the one that was accepted under its id."""
        self._check_alive()
        if operation.kind == "sample":
            return await self._submit_sample(operation)
        accepted, new = operation, False
        # Shielded: a cancellation between the store and the queue would leave it stored and not
        # queued, so that nothing would run it before a restart.
        with anyio.CancelScope(shield=True):
            accepted, new = await self._store.submit(operation)
            if new or self._is_lost(accepted):
                self._accepted(accepted)
                try:
                    await self._enqueue(accepted)
                except BaseException:
                    # It was not acknowledged; sent again, it is queued.
                    self.load.remove(accepted.op_id)
                    raise
        return accepted

    def _check_owned(self, key: str) -> None:
        """Refuse to work for a key that this node of a cluster does not own, or not any more."""
        if self._owned is not None and key not in self._owned:
            raise ClaimLostError(f"This node does not own {key}; another node may.")

    def _is_lost(self, operation: Operation) -> bool:
        """Whether an operation is stored and nothing runs it: an error came in between."""
        return operation.state != "done" and operation.op_id not in self.load

    def _check_alive(self) -> None:
        if self.ended is not None:
            raise ClosedError(f"{self.ended}; the server is started again")

    async def _submit_sample(self, operation: Operation) -> Operation:
        numbered = operation.op_id == f"{operation.sampler_id}:{operation.seq_id}"
        if numbered:
            await self.lost.begin(operation)
        if self._owned is not None:
            sampler = await self._store.get_sampler(operation.sampler_id or "")
            # Handed over meanwhile: nothing would run it here. Nothing is awaited from here on.
            self._check_owned(operation.sampler_id or "" if sampler is None else claim_key(sampler))
        accepted, new = await self._store.submit(operation)
        if new or self._is_lost(accepted):
            self._accepted(accepted)
            if numbered:
                self.lost.began(accepted)
            self._samples.put(accepted)
        return accepted

    def place(self, operation: Operation) -> AbstractAsyncContextManager[None]:
        """A turn for a sample that its caller runs itself; the operation is never stored."""
        self._check_alive()
        return self._samples.place(operation)

    async def submit_done(self, operation: Operation, value: object) -> Operation:
        """Accept an operation that needed no waiting; its result is there at once."""
        accepted, new = await self._store.submit(operation)
        if new or accepted.state != "done":
            outcome = self._outcomes.settled(accepted, Done(value, Usage()))
            await self._outcomes.finish(accepted, outcome)
        return accepted

    @contextmanager
    def arriving(self, owner: str) -> Generator[None]:
        """Note that a training request is being read: it may be the one that a queue waits for."""
        request = object()
        self._arriving.setdefault(owner, {})[request] = self._clock.now()
        try:
            yield
        finally:
            requests = self._arriving[owner]
            del requests[request]
            if not requests:
                del self._arriving[owner]
            self._loop.arrived()

    def _oldest_arrivals(self) -> dict[str, float]:
        return {owner: next(iter(times.values())) for owner, times in self._arriving.items()}

    async def take_turn(self, model_id: str) -> int:
        """The number of a request whose client does not number its requests."""
        queue = (await self._run_of(model_id)).queue
        if queue.last_seq >= _LAST_SEQ:
            used_up = f"the numbers of model {model_id!r} are used up; create another model"
            raise RequestFailedError(used_up, None, "user")
        queue.last_seq += 1
        return queue.last_seq

    async def next_turn(self, model_id: str) -> int:
        """The number after everything that was accepted for a model."""
        queue = (await self._run_of(model_id)).queue
        return max(queue.last_seq + 1, queue.next_seq, 1)

    def give_turn_back(self, model_id: str, seq_id: int) -> None:
        """No request will have this number."""
        run = self._runs.get(model_id)
        if run is not None:
            run.queue.skip(seq_id)
            self._loop.attend(run)

    def is_waited_for(self, model_id: str, seq_id: int) -> bool:
        """Whether operations of a model that are here cannot run before this one."""
        run = self._runs.get(model_id)
        return run is not None and bool(run.queue.waiting) and seq_id < min(run.queue.waiting)

    async def cancel(self, operation: Operation) -> bool:
        """Withdraw an operation; False when it ran already or cannot be stopped."""
        if operation.kind == "sample":
            return await self._samples.cancel(operation)
        run = self._runs.get(operation.model_id or "")
        waiting = None if run is None else run.queue.withdraw(operation)
        if run is None or waiting is None:
            return False
        try:
            return await self._outcomes.finish(waiting, CANCELLED)
        except BaseException:
            run.queue.put_back(waiting)
            raise
        finally:
            self._loop.attend(run)

    async def end_session(self, session: StoredSession, status: SessionStatus) -> bool:
        """End a session and free what it held: samples at once, the rest soon.

        False when it had ended already: the first status stays.
        """
        try:
            if not await self._store.end_session(session, status):
                return False
        finally:
            # Also after an error: the end may have been stored all the same.
            self._ends.add(session.session_id)
        await self.session_ended(session.session_id)
        return True

    async def session_ended(self, session_id: str) -> None:
        """Free what a session held here; it may have been ended by another node."""
        self._ends.add(session_id)
        for op in self._samples.of_session(session_id):
            await quietly(self._samples.cancel(op), f"cancelling {op.op_id}")

    async def retry_endings(self) -> None:
        """Retry clean-ups that a storage failure has stopped."""
        self._ends.retry()
        await quietly(self._samplers.retry())

    async def progress(self, operation: Operation) -> OperationProgress:
        """How far an unfinished operation is."""
        if operation.kind == "sample":
            running = self._samples.is_running(operation.op_id)
        else:
            run = self._runs.get(operation.model_id or "")
            running = run is None or operation.seq_id not in run.queue.waiting
        if running and operation.started_at is not None:
            return OperationProgress("running", 0, operation.started_at)
        ahead = 0 if operation.kind == "sample" else self._ahead_of(operation)
        return OperationProgress("queued", ahead, operation.created_at)

    def _ahead_of(self, op: Operation) -> int:
        mine = (op.created_at, op.seq_id)
        waiting = (other for queue in self._loop.queues for other in queue.waiting.values())
        return sum(
            (other.created_at, other.seq_id) < mine for other in waiting if other.op_id != op.op_id
        )

    def forget_samples(self) -> None:
        """Drop every sample in flight without an outcome, as a restart does."""
        self._samples.forget()

    def _accepted(self, operation: Operation) -> None:
        self._meters.accepted(operation)
        self.load.add(operation)

    def _start(self, work: Callable[[], Awaitable[Any]]) -> None:
        if self._group is not None:
            self._group.start_soon(_contained, work)

    async def _run_of(self, model_id: str) -> ModelRun:
        """A model's run; that of a closed model is loaded again for requests that still arrive."""
        run = self._runs.get(model_id)
        if run is None:
            model = await self._store.get_model(model_id)
            loaded = (
                ModelRun(model_id, self._parts)
                if model is None
                else await ModelRun.load(model, self._parts)
            )
            # Handed over during the awaits above; the next owner finds what was stored.
            self._check_owned(model_id)
            # `setdefault`, because another request may have loaded it during the awaits above.
            run = self._runs.setdefault(model_id, loaded)
            # That of a closed model is forgotten again if nothing comes.
            self._loop.attend(run)
        return run

    async def _restored(self, model_id: str) -> None:
        await (await self._run_of(model_id)).be_in_engine()

    async def _enqueue(self, op: Operation) -> None:
        run = await self._run_of(cast("str", op.model_id))
        queue = run.queue
        if op.seq_id < queue.next_seq:
            late = (
                f"request {op.seq_id} of {op.model_id} came after its turn: request "
                f"{queue.next_seq - 1} has already run"
            )
            await self._outcomes.finish(op, OperationOutcome(error=late, category="server"))
            return
        queue.put(op, self._clock.now())
        self._loop.attend(run)


async def _contained(work: Callable[[], Awaitable[Any]]) -> None:
    await quietly(work(), "work for a model")
