"""What one tenant may have at a time, and the refusal when it has that much.

Official clients wait after a 429 and send again, some for ever. So only limits that are freed
without the client's help are refused with it, and never a request that was accepted before.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Literal

from tinkex.server.api.errors import refuse

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tinkex.clock import Clock
    from tinkex.errors import APIStatusError
    from tinkex.server.scheduler.worker import Worker
    from tinkex.server.server_settings import ServerSettings
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import Model, Operation

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]

_RATE_BURST_S = 2.0
# Models of clients that send no heartbeats count for this long after their last request.
_SILENT_MODEL_S = 3600.0

_MOST_NAMES = 4096


class TenantLimits:
    """The tenants' limits; what they have is counted by the worker and the store."""

    def __init__(
        self, settings: ServerSettings, clock: Clock, store: Store, worker: Worker
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._store = store
        self._worker = worker
        rate = settings.max_requests_per_s
        self._rate = None
        if rate is not None:
            self._rate = Throttle(clock, per_s=rate, burst=max(rate * _RATE_BURST_S, 1.0))

    def request(self, owner: str) -> None:
        """Any request but a heartbeat."""
        wait_s = self._rate.take(owner) if self._rate is not None else 0.0
        if wait_s > 0:
            most = self._settings.max_requests_per_s
            raise refuse(
                429,
                f"A tenant may send {most:g} requests per second here (max_requests_per_s); "
                "send this one again later.",
                headers={"retry-after": str(math.ceil(min(wait_s, 60.0)))},
            )

    async def session(self, owner: str) -> None:
        """One more session."""
        most = self._settings.max_sessions
        # Clients without heartbeats never report that they are done.
        have = await self._store.count_sessions(owner, active=True, heartbeats=True)
        if have >= most:
            raise _over(
                "max_sessions", most, have, "sessions", "close one, or wait until one ends", 10
            )

    async def model(self, owner: str) -> None:
        """One more model."""
        most = self._settings.max_models
        models = await self._store.open_models(owner)
        if len(models) < most:
            return
        have = sum([await self._is_alive(model) for model in models])
        if have >= most:
            raise _over(
                "max_models", most, have, "models", "close a session, or unload a model", 10
            )

    def sample(self, owner: str) -> None:
        """One more sample."""
        most, have = self._settings.max_samples_in_flight, self._worker.load.of(owner).samples
        if have >= most:
            raise _over("max_samples_in_flight", most, have, "samples in flight", "slow down", 1)

    def training(self, owner: str, model_id: str, seq_id: int, size_bytes: int) -> None:
        """One more training operation; one that queued operations wait for is always accepted."""
        if self._worker.is_waited_for(model_id, seq_id):
            return
        have = self._worker.load.of(owner)
        most, most_bytes = self._settings.max_queued_ops, self._settings.max_queued_bytes
        step = "wait for results before sending more"
        if have.operations >= most:
            raise _over("max_queued_ops", most, have.operations, "operations in flight", step, 2)
        # The first one fits whatever its size: it could not become smaller by waiting.
        if have.operations and have.queued_bytes + size_bytes > most_bytes:
            held = have.queued_bytes
            raise _over("max_queued_bytes", most_bytes, held, "bytes in flight", step, 2)

    def queue_state(self, op: Operation) -> tuple[QueueState, str | None]:
        """Why an unfinished operation waits, for the client that polls for it."""
        if op.state == "running":
            return "active", None
        have, most = self._worker.load.of(op.owner).operations, self._settings.max_training_ops
        if op.kind != "sample" and have > most:
            reason = (
                f"{have} operations of yours are in flight, more than the {most} that a tenant "
                "should have here (max_training_ops); they run in order"
            )
            return "paused_rate_limit", reason
        others = op.kind == "sample" or self._worker.load.of_others(op.owner)
        if others and self._clock.wall() - op.created_at >= self._settings.busy_after_s:
            return "paused_capacity", "the server is busy; this request waits for its turn"
        return "active", None

    async def _is_alive(self, model: Model) -> bool:
        session = await self._store.get_session(model.session_id)
        if session is None or not session.active:
            return False
        silent_s = self._clock.wall() - model.last_request_at
        return session.heartbeats or silent_s < _SILENT_MODEL_S


def _over(
    name: str, most: int, have: int, what: str, next_step: str, wait_s: int
) -> APIStatusError:
    fits = max(most - have, 0)
    return refuse(
        429,
        f"You have {have} {what}; a tenant may have {most} here ({name}), so {fits} more would "
        f"fit. To go on, {next_step}.",
        headers={"retry-after": str(wait_s)},
    )


class Throttle:
    """Allows `per_s` on average and `burst` at once, for each name apart."""

    def __init__(self, clock: Clock, *, per_s: float, burst: float) -> None:
        self._clock = clock
        self._per_s = per_s
        self._burst = burst
        # Mutable state: (what is left, at which time) per name, longest unused first. A name that
        # is forgotten starts with a full bucket, which only helps it.
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, name: Hashable) -> float:
        """Take one; returns 0, or after how many seconds to try again."""
        now = self._clock.now()
        left, since = self._left.get(name, (self._burst, now))
        left = min(left + (now - since) * self._per_s, self._burst)
        wait_s = 0.0 if left >= 1 else (1 - left) / self._per_s if self._per_s > 0 else math.inf
        self._left[name] = (left if wait_s else left - 1, now)
        self._left.move_to_end(name)
        while len(self._left) > _MOST_NAMES:
            self._left.popitem(last=False)
        return wait_s
