"""The actor of a node. Ray rebuilds it from its constructor's arguments on another machine."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Final

from tinkex.ray_cluster.child_process import ChildProcess, start_child
from tinkex.ray_cluster.supervisor import NodeReport, Supervisor

if TYPE_CHECKING:
    from tinkex.ray_cluster.nodes import NodeSpec
    from tinkex.ray_cluster.restarts import RestartPolicy
    from tinkex.ray_cluster.secrets import NodeSecrets

_STARTED_S: Final = 60.0


class NodeActor:
    """Runs a node as a child process, and answers how it is.

    A thread of its own supervises, and lives as long as the actor's process: the kernel kills the
    child when the thread that started it ends.
    """

    def __init__(
        self,
        spec: NodeSpec,
        secrets: NodeSecrets,
        policy: RestartPolicy,
        machine: str | None = None,
    ) -> None:
        self._spec = spec
        self._secrets = secrets
        self._policy = policy
        self._machine = machine or _machine()
        self._running = threading.Event()
        threading.Thread(target=self._supervise, name="tinkex-node", daemon=True).start()
        self._running.wait(_STARTED_S)

    def __repr__(self) -> str:
        # Ray prefixes log lines with it.
        return self._spec.actor_name

    def report(self, version: int = -1, timeout_s: float = 0.0) -> NodeReport:
        """How the node is, once that is newer than `version` or `timeout_s` have passed."""
        return self._supervisor.wait_change(version, timeout_s)

    def matches(self, spec: NodeSpec, secrets: NodeSecrets) -> bool:
        """Whether the node runs with these settings."""
        return (spec, secrets) == (self._spec, self._secrets)

    def stop(self, limit_s: float) -> None:
        """Begin to stop the node; `report` says when it has stopped."""
        with contextlib.suppress(RuntimeError):  # it has stopped, and its loop is closed
            self._loop.call_soon_threadsafe(self._supervisor.stop, limit_s)

    def _supervise(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._supervisor = Supervisor(
            self._spec.name, self._start, policy=self._policy, machine=self._machine
        )
        self._running.set()
        await self._supervisor.run()

    async def _start(self) -> ChildProcess:
        host = self._spec.host or self._machine
        return await start_child(self._spec, self._secrets, host, _log)


def _machine() -> str:
    """The address of this machine, as Ray knows it."""
    from tinkex.ray_cluster.connection import this_machine

    return this_machine()


def _log(line: str) -> None:
    """To the log file that Ray keeps of this actor."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
