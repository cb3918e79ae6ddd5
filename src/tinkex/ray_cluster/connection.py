"""A connection to Ray: its actors and machines in our words. The only module that imports ray."""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from tinkex.clock import SystemClock
from tinkex.errors import MissingPackageError
from tinkex.ray_cluster.actor import NodeActor
from tinkex.ray_cluster.nodes import NAMESPACE, actor_prefix
from tinkex.ray_cluster.placement import Machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from tinkex.ray_cluster.nodes import NodeSpec
    from tinkex.ray_cluster.restarts import RestartPolicy
    from tinkex.ray_cluster.secrets import NodeSecrets

_CONCURRENT_CALLS: Final = 16  # a few wait for a change of the report
_ALIVE: Final = "ALIVE"
_PAUSE_S: Final = 0.5
_CHECK_ADDRESS: Final = (
    "Check --address, and that `ray status` works there. Without --address, Ray is started on this "
    "machine."
)


class ClusterError(Exception):
    """Ray cannot do what was asked; `hint` is the next step."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Actor:
    """A node's actor; `handle` is Ray's."""

    name: str
    handle: Any


class RayConnection:
    """Connected while it is entered. One that this process already has is used as it is.

    The head may still be starting: it is waited for up to `wait_s`.
    """

    def __init__(self, address: str, wait_s: float = 0.0) -> None:
        self.address = address
        self._wait_s = wait_s
        self._ray = _ray()
        # Mutable state: whether leaving disconnects.
        self._owned = False

    def __enter__(self) -> RayConnection:
        if self._ray.is_initialized():
            return self
        await_head(self.address, self._wait_s)
        try:
            self._ray.init(
                address=self.address,
                namespace=NAMESPACE,
                # The logs of nodes stay in Ray's files: this process only follows their states.
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            text = f"cannot connect to Ray at {self.address}: {error}"
            raise ClusterError(text, _CHECK_ADDRESS) from error
        self._owned = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._owned:
            self._ray.shutdown()

    # -- actors --------------------------------------------------------------------------------

    def create(self, spec: NodeSpec, secrets: NodeSecrets, policy: RestartPolicy) -> Actor:
        """Ask Ray for the actor of a node; it may wait for resources."""
        remote = self._ray.remote(NodeActor).options(
            name=spec.actor_name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=_CONCURRENT_CALLS,
            num_cpus=spec.cpus,
            num_gpus=spec.gpus,
            # Losing one machine should cost few nodes.
            scheduling_strategy="SPREAD",
        )
        try:
            return Actor(spec.name, remote.remote(spec, secrets, policy))
        except ValueError as error:  # the name is taken
            raise ClusterError(
                f"{spec.actor_name} was started by somebody else meanwhile: {error}",
                "Run `tinkex cluster up` once at a time.",
            ) from error

    def actors(self, cluster: str) -> dict[str, Actor]:
        """The actors of a cluster by the names of their nodes, placed or not."""
        prefix = actor_prefix(cluster)
        listed: list[dict[str, str]] = self._ray.util.list_named_actors(all_namespaces=True)
        names = [
            row["name"].removeprefix(prefix)
            for row in listed
            if row["namespace"] == NAMESPACE and row["name"].startswith(prefix)
        ]
        found = {name: self._find(f"{prefix}{name}") for name in sorted(names)}
        return {name: Actor(name, handle) for name, handle in found.items() if handle is not None}

    def _find(self, actor_name: str) -> Any:
        try:
            return self._ray.get_actor(actor_name, namespace=NAMESPACE)
        except ValueError:  # it has ended meanwhile
            return None

    def is_alive(self, actor: Actor) -> bool:
        """Whether it runs: not one that waits for resources or for a restart."""
        row = _state().actors(actor.handle._actor_id.hex())
        return row.get("State") == _ALIVE

    def kill(self, actor: Actor) -> None:
        """End an actor and its node at once, for good."""
        self._ray.kill(actor.handle, no_restart=True)

    def clusters(self) -> set[str]:
        """The names of all clusters that have actors here."""
        listed: list[dict[str, str]] = self._ray.util.list_named_actors(all_namespaces=True)
        names = [row["name"].split("/") for row in listed if row["namespace"] == NAMESPACE]
        return {name[1] for name in names if len(name) == 3}

    # -- calls ---------------------------------------------------------------------------------

    def first_done(self, calls: Iterable[Any], timeout_s: float) -> Sequence[Any]:
        """Wait until one of these calls is done; returns those that are."""
        waiting = list(calls)
        done, _ = self._ray.wait(
            waiting, num_returns=1, timeout=max(timeout_s, 0.0), fetch_local=True
        )
        return cast("Sequence[Any]", done)

    def result(self, call: Any, timeout_s: float | None = None) -> Any:
        """The result of a call; None when the actor was lost or has not answered in time."""
        errors = self._ray.exceptions
        lost = (errors.RayActorError, errors.GetTimeoutError, errors.WorkerCrashedError)
        try:
            return self._ray.get(call, timeout=timeout_s)
        except lost:
            return None

    # -- machines ------------------------------------------------------------------------------

    def machines(self) -> list[Machine]:
        """The machines that are alive, with what they have free."""
        free = _state().available_resources_per_node()
        return [
            Machine(
                node_id=row["NodeID"],
                address=row["NodeManagerAddress"],
                total=row["Resources"],
                free=free.get(row["NodeID"], {}),
            )
            for row in self._ray.nodes()
            if row["Alive"]
        ]


def this_machine() -> str:
    """The address of this actor's machine, as it joined Ray.

    `ray.util.get_node_ip_address` would guess one, also where Ray is on loopback only.
    """
    ray = _ray()
    here = ray.get_runtime_context().get_node_id()
    return next(row["NodeManagerAddress"] for row in ray.nodes() if row["NodeID"] == here)


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingPackageError("nodes on Ray need ray", "'tinkex[ray]'") from error
    return cast("Any", ray)


def await_head(address: str, wait_s: float) -> None:
    """Return when something listens there: Ray itself would try for a quarter of an hour."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # a word such as `auto`
    clock = SystemClock()
    deadline = clock.now() + wait_s
    while True:
        left_s = max(deadline - clock.now(), 0.0)
        try:
            # One attempt has some seconds in any case.
            socket.create_connection((host.strip("[]"), int(port)), max(left_s, 5.0)).close()
        except (OSError, OverflowError) as error:  # the latter for a port above 65535
            if not left_s:
                text = f"Ray's head does not answer at {address}: {error}"
                raise ClusterError(text, _CHECK_ADDRESS) from error
            threading.Event().wait(min(_PAUSE_S, left_s))
        else:
            return


def _state() -> Any:
    """Ray's public API has neither the state of one actor nor what each machine has free."""
    from ray._private import state

    return cast("Any", state)
