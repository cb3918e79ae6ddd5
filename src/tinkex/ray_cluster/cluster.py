"""`up` and `down`: turns the running nodes into those that are asked for, and ends them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tinkex.clock import SystemClock
from tinkex.ray_cluster.changes import plan_changes
from tinkex.ray_cluster.connection import ClusterError
from tinkex.ray_cluster.placement import missing_resources
from tinkex.ray_cluster.restarts import RestartPolicy
from tinkex.ray_cluster.supervisor import NodeReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tinkex.clock import Clock
    from tinkex.ray_cluster.connection import Actor, RayConnection
    from tinkex.ray_cluster.nodes import NodeSpec
    from tinkex.ray_cluster.secrets import NodeSecrets

_ANSWER_S: Final = 10.0  # an actor that is alive answers in milliseconds
_CHANGE_S: Final = 5.0
_PAUSE_S: Final = 0.2
_SHOWN_LINES: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long `up` and `down` wait."""

    placement_s: float = 60.0
    """Until Ray's head answers, and until Ray has placed one more node.

    An autoscaler needs time to add machines.
    """
    start_s: float = 900.0
    """Until every node is ready: base models are downloaded and loaded."""
    drain_s: float = 120.0
    """Until a node that is stopped has handed over what it owns; then it is killed."""


class Cluster:
    """The nodes of one cluster on Ray. `say` gets a line for each thing that happened."""

    def __init__(
        self,
        connection: RayConnection,
        name: str,
        say: Callable[[str], None],
        *,
        limits: Limits | None = None,
        policy: RestartPolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._ray = connection
        self._name = name
        self._say = say
        self._limits = limits or Limits()
        self._policy = policy or RestartPolicy()
        self._clock = clock or SystemClock()

    def up(
        self, wanted: Sequence[NodeSpec], secrets: NodeSecrets, *, keep_partial: bool = False
    ) -> list[NodeReport]:
        """Make these nodes run, and no others; returns how they are.

        What it has started is stopped again when not all of it can be had, unless `keep_partial`.
        """
        running = self._ray.actors(self._name)
        changes = plan_changes(wanted, self._comparison(running, wanted, secrets))
        started: dict[str, Actor] = {}
        try:
            self._stop({name: running[name] for name in changes.remove}, self._limits.drain_s)
            for spec in changes.replace:
                self._stop({spec.name: running[spec.name]}, self._limits.drain_s)
                self._start([spec], secrets, started)
            self._start(changes.add, secrets, started)
        except BaseException:
            # A Ctrl-C, too: nothing half-started is left behind.
            if not keep_partial and started:
                self._say("stopping what was started")
                self._stop(started, _ANSWER_S)
            raise
        kept = {spec.name: running[spec.name] for spec in changes.keep}
        self._follow(changes.keep, kept)
        actors = started | kept
        return [self._report(actors[spec.name]) for spec in wanted]

    def down(self, *, force: bool = False) -> int:
        """Drain and stop every node; returns how many there were."""
        running = self._ray.actors(self._name)
        self._stop(running, 0.0 if force else self._limits.drain_s)
        return len(running)

    def reports(self) -> list[NodeReport]:
        """How the nodes are."""
        return [self._report(actor) for actor in self._ray.actors(self._name).values()]

    # -- comparing -----------------------------------------------------------------------------

    def _comparison(
        self, running: Mapping[str, Actor], wanted: Iterable[NodeSpec], secrets: NodeSecrets
    ) -> dict[str, bool]:
        """Of each running node, whether it may stay as it is."""
        specs = {spec.name: spec for spec in wanted}
        return {
            name: name in specs and self._may_stay(actor, specs[name], secrets)
            for name, actor in running.items()
        }

    def _may_stay(self, actor: Actor, spec: NodeSpec, secrets: NodeSecrets) -> bool:
        if not self._ray.is_alive(actor):
            # Ray is about to place it; what it will run with cannot be asked, so it starts anew.
            return False
        same = self._ray.result(actor.handle.matches.remote(spec, secrets), _ANSWER_S)
        return bool(same) and self._report(actor).state not in ("failed", "stopping", "stopped")

    def _report(self, actor: Actor) -> NodeReport:
        found = None
        if self._ray.is_alive(actor):
            found = self._ray.result(actor.handle.report.remote(), _ANSWER_S)
        return NodeReport(name=actor.name) if found is None else found

    # -- starting ------------------------------------------------------------------------------

    def _start(
        self, specs: Sequence[NodeSpec], secrets: NodeSecrets, started: dict[str, Actor]
    ) -> None:
        """Start these and wait until they are ready; `started` gets each as soon as it exists."""
        for spec in specs:
            started[spec.name] = self._ray.create(spec, secrets, self._policy)
        self._follow(specs, {spec.name: started[spec.name] for spec in specs})

    def _follow(self, specs: Sequence[NodeSpec], actors: Mapping[str, Actor]) -> None:
        """Wait until every node is ready; raises `ClusterError` for one that cannot be."""
        following = _Following(self._ray, actors)
        began = placed_at = self._clock.now()
        placed = 0
        while following.waiting:
            now = self._clock.now()
            if len(following.reports) > placed:
                placed, placed_at = len(following.reports), now
            if placed < len(specs) and now - placed_at >= self._limits.placement_s:
                unplaced = [spec for spec in specs if spec.name not in following.reports]
                raise self._unplaced(unplaced, len(specs))
            if now - began >= self._limits.start_s:
                raise _not_ready(following, self._limits.start_s)
            for report in following.step(min(1.0, self._limits.placement_s)):
                self._tell(report, len(specs), following)

    def _tell(self, report: NodeReport, total: int, following: _Following) -> None:
        if report.state == "ready":
            done = sum(each.state == "ready" for each in following.reports.values())
            self._say(f"[{done}/{total}] {report.name}: {report.url}")
        elif report.state == "failed":
            raise _failed(report)
        elif report.state == "waiting":
            last = report.lines[-1] if report.lines else "no output"
            self._say(f"{report.name} exited with {report.exit_status}, starts again: {last}")

    def _unplaced(self, specs: Sequence[NodeSpec], total: int) -> ClusterError:
        details = missing_resources(specs, self._ray.machines())
        return ClusterError(
            f"Ray cannot place {len(specs)} of {total} new nodes; it was waited for "
            f"{self._limits.placement_s:g} s\n{details}",
            "Ask for fewer nodes, add machines to Ray, or stop what uses theirs (`ray status`). "
            "Where an autoscaler adds machines, allow it more time: --placement-timeout.",
        )

    # -- stopping ------------------------------------------------------------------------------

    def _stop(self, actors: Mapping[str, Actor], limit_s: float) -> None:
        """Drain nodes in parallel, then end their actors; 0 s kills them at once."""
        alive = {name: each for name, each in actors.items() if self._ray.is_alive(each)}
        if limit_s > 0:
            for actor in alive.values():
                actor.handle.stop.remote(limit_s)
            deadline = self._clock.now() + limit_s + _ANSWER_S
            following = _Following(self._ray, alive, until="stopped")
            while following.waiting and self._clock.now() < deadline:
                following.step(min(1.0, limit_s))
        for name, actor in actors.items():
            self._ray.kill(actor)
            self._say(f"stopped {name}")
        self._await_gone(actors)

    def _await_gone(self, actors: Mapping[str, Actor]) -> None:
        """Until Ray has forgotten the names: they may be used again at once."""
        deadline = self._clock.now() + _ANSWER_S
        while self._clock.now() < deadline and self._ray.actors(self._name).keys() & actors.keys():
            _pause()


class _Following:
    """Calls under way that return the next change of each node."""

    def __init__(
        self, connection: RayConnection, actors: Mapping[str, Actor], until: str = "ready"
    ) -> None:
        self._ray = connection
        self._actors = actors
        self._until = until
        # Mutable state: calls under way by node, and the last report of each.
        self._calls: dict[Any, str] = {}
        self.reports: dict[str, NodeReport] = {}
        for name in actors:
            self._ask(name, -1)

    @property
    def waiting(self) -> bool:
        """Whether some are not yet as they should be."""
        return bool(self._calls)

    def step(self, timeout_s: float) -> list[NodeReport]:
        """Wait for changes, for `timeout_s` at most; returns the changed reports."""
        changed: list[NodeReport] = []
        for call in self._ray.first_done(self._calls, timeout_s):
            name = self._calls.pop(call)
            report: NodeReport | None = self._ray.result(call)
            if report is None:
                # The actor was lost; Ray restarts it, unless it was killed.
                if self._until == "stopped":
                    continue
                _pause()
                self._ask(name, -1)
                continue
            before = self.reports.get(name)
            self.reports[name] = report
            if before is None or before.state != report.state:
                changed.append(report)
            if report.state != self._until:
                self._ask(name, report.version)
        return changed

    def _ask(self, name: str, version: int) -> None:
        call = self._actors[name].handle.report.remote(version, _CHANGE_S)
        self._calls[call] = name


def _failed(report: NodeReport) -> ClusterError:
    lines = "\n".join(report.lines[-_SHOWN_LINES:]) or "it has written nothing"
    return ClusterError(
        f"{report.name} on {report.machine} failed {report.failures} times in a row, "
        f"the last time with exit status {report.exit_status}. Its last lines:\n{lines}",
        "Correct what they say and run `tinkex cluster up` again.",
    )


def _not_ready(following: _Following, limit_s: float) -> ClusterError:
    waiting = [report for report in following.reports.values() if report.state != "ready"]
    states = "\n".join(f"{report.name}: {report.state}, on {report.machine}" for report in waiting)
    return ClusterError(
        f"{len(waiting)} nodes are not ready after {limit_s:g} s\n{states}",
        "Their logs are in Ray's folder on those machines (session_latest/logs/worker-*.err). "
        "Large models need longer: --start-timeout.",
    )


def _pause() -> None:
    threading.Event().wait(_PAUSE_S)
