"""Three nodes in any order of events: at no time can two of them write for one key.

Nodes that were started again leave their earlier selves behind, which still try to write.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio.from_thread
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.contracts.ownership_suite import KEY, LEASE_S, node
from tests.contracts.store_suite import DONE, model, step
from tinkex.server.store.memory import MemoryStore
from tinkex.server.store.ownership import Claim, ClaimLostError, LeaseLostError, NodeLoad
from tinkex.server.store.sql import SqlStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.contracts.postgres import PostgresServer
    from tinkex.server import Store

NODES = st.integers(0, 2)
EXPIRED_S = -1.0
MOST_STARTS = 5


class Machine(RuleBasedStateMachine):
    """Drives the stores of three nodes. A store never joins twice."""

    def __init__(self, opener: Callable[[], Callable[[], Any]]) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(anyio.from_thread.start_blocking_portal())
        self._open = opener()
        # Mutable state: every store by its node, the nodes now, claims seen, and a counter.
        self.stores: dict[str, Store] = {}
        self.now: list[str] = []
        self.claims: list[Claim] = []
        self.count = 0
        for name in "abc":
            self.now.append(self._start(name))
        self._do(self._store(0).add_model(model()))

    def teardown(self) -> None:
        self._stack.close()

    def _start(self, name: str) -> str:
        opened = self._portal.wrap_async_context_manager(self._open())
        store: Store = self._stack.enter_context(opened)
        number = 1 + sum(known.startswith(name) for known in self.stores)
        node_id = f"{name}-{number}"
        joining = store.join("c", replace(node(name), node_id=node_id), LEASE_S)
        self._do(joining)
        self.stores[node_id] = store
        return node_id

    def _store(self, which: int) -> Store:
        return self.stores[self.now[which]]

    def _do(self, work: Any) -> Any:
        async def wait() -> Any:
            return await work

        return self._portal.call(wait)

    def _try(self, work: Any) -> Any:
        """The answer, or None when this node may not do that."""
        try:
            return self._do(work)
        except (LeaseLostError, ClaimLostError):
            return None

    def _seen(self, claim: Claim | None) -> None:
        if claim is not None:
            self.claims.append(claim)

    @rule(which=NODES, late=st.booleans())
    def renew(self, which: int, late: bool) -> None:
        self._try(self._store(which).renew(EXPIRED_S if late else LEASE_S, NodeLoad()))

    @rule(which=NODES, other=NODES)
    def declare(self, which: int, other: int) -> None:
        self._try(self._store(which).declare_dead(self.now[other]))

    @rule(which=NODES)
    def start_again(self, which: int) -> None:
        if len(self.stores) < MOST_STARTS:
            self.now[which] = self._start(self.now[which][0])

    @rule(which=NODES)
    def leave(self, which: int) -> None:
        self._try(self._store(which).leave())

    @rule(which=NODES, other=NODES)
    def claim(self, which: int, other: int) -> None:
        target_id = self.now[other]
        claiming = self._store(which).claim(KEY, target_id, owner="o", base_model="b")
        self._seen(self._try(claiming))

    @rule(which=NODES, back=st.integers(0, 2))
    def adopt(self, which: int, back: int) -> None:
        if self.claims:
            self._try(self._store(which).adopt(self.claims[-1 - back % len(self.claims)]))

    @rule(which=NODES, back=st.integers(0, 2))
    def give_up(self, which: int, back: int) -> None:
        if self.claims:
            claim = self.claims[-1 - back % len(self.claims)]

            async def give_up() -> None:
                self._store(which).give_up(claim)

            self._do(give_up())

    @rule(which=NODES, other=NODES, back=st.integers(0, 2))
    def reassign(self, which: int, other: int, back: int) -> None:
        if self.claims:
            claim = self.claims[-1 - back % len(self.claims)]
            self._seen(self._try(self._store(which).reassign(claim, self.now[other])))

    @rule(which=NODES)
    def take_over(self, which: int) -> None:
        claim = self._do(self._store(which).get_claim(KEY))
        if claim is None:
            return
        self._try(self._store(which).declare_dead(claim.node_id))
        taken = self._try(self._store(which).reassign(claim, self.now[which]))
        self._seen(taken)
        if taken is not None:
            self._try(self._store(which).adopt(taken))

    @rule(which=NODES)
    def release(self, which: int) -> None:
        if self.claims:
            self._try(self._store(which).release(self.claims[-1]))

    @rule(which=NODES)
    def forget(self, which: int) -> None:
        self._try(self._store(which).forget_nodes(1e12))

    @rule(which=NODES)
    def work(self, which: int) -> None:
        """Accept an operation and finish it, or neither."""
        store = self._store(which)
        self.count += 1
        accepted = self._try(store.submit(step(self.count)))
        if accepted is not None:
            assert self._do(store.finish(step(self.count).op_id, DONE, 1.0))

    @invariant()
    def at_most_one_node_writes(self) -> None:
        wrote: list[str] = []
        for node_id, store in self.stores.items():
            self.count += 1
            try:
                self._do(store.change_model(KEY, snapshot_seq=self.count, snapshot_location="x"))
            except (LeaseLostError, ClaimLostError):
                continue
            wrote.append(node_id)
        assert len(wrote) <= 1
        if wrote:
            store = self.stores[wrote[0]]
            claim = self._do(store.get_claim(KEY))
            assert claim is not None
            assert claim.node_id == wrote[0]
            states = {each.node_id: each.state for each in self._do(store.nodes())}
            assert states[wrote[0]] == "alive"


def check(opener: Callable[[], Callable[[], Any]], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        lambda: Machine(opener),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_nodes_in_memory() -> None:
    def opener() -> Callable[[], AbstractAsyncContextManager[Store]]:
        first = MemoryStore()

        @asynccontextmanager
        async def another() -> AsyncIterator[Store]:
            yield first.beside()

        return another

    check(opener, examples=40, steps=40)


def test_nodes_on_postgres(postgres: PostgresServer) -> None:
    def opener() -> Callable[[], AbstractAsyncContextManager[Store]]:
        place = postgres.new_place()
        return lambda: SqlStore.open(place)

    check(opener, examples=6, steps=30)
