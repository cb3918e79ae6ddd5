"""Samples that another node computes: which one, and the two sides of the call.

The owner of a sampler accepts, numbers and answers its samples. Another node of the same base model
may compute one: it loads the weights by their location when it first needs them. If that fails, for
whatever reason, the owner computes the sample itself, and asks that node again only after a while.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from starlette.responses import Response
from starlette.routing import Route

from tinkex.errors import APIStatusError, InputError, RequestFailedError, TinkerError
from tinkex.server.cluster.peers import BrokenOffError, NodeUnreachable
from tinkex.server.cluster.placement import can_take, prefix_hash, route_sample
from tinkex.server.cluster.sample_wire import decode_op, decode_outcome, encode_op, encode_outcome
from tinkex.server.observability.requests import INTERNAL_SAMPLE, request_record
from tinkex.server.store.records import Operation
from tinkex.server.supervision import while_connected
from tinkex.types import EncodedTextChunk

if TYPE_CHECKING:
    from starlette.requests import Request

    from tinkex.clock import Clock
    from tinkex.engine.protocol import Engine, SampleOp, SampleResult, Weights
    from tinkex.server.cluster.member import Member
    from tinkex.server.scheduler.worker import Worker
    from tinkex.server.store.ownership import Node

PATH: Final = "/internal/sample"
_MEDIA: Final = "application/octet-stream"
# How long a node that failed is not asked, and of how many versions it is known who has them.
_PAUSE_S: Final = 10.0
_MOST_VERSIONS: Final = 1000
# A prompt and its parameters; `max_body_bytes` bounds what clients send.
_MOST_BYTES: Final = 64 << 20

_log = logging.getLogger(__name__)


class RemoteSamples:
    """Has other nodes compute samples. Used from one event loop."""

    def __init__(self, member: Member, clock: Clock) -> None:
        self._member = member
        self._clock = clock
        # Mutable state: samples under way by node, which nodes have which version of weights, last
        # used last, nodes that are not asked before a time, and how many were computed elsewhere.
        self._running: Counter[str] = Counter()
        self._present: OrderedDict[str, set[str]] = OrderedDict()
        self._not_before: dict[str, float] = {}
        self.computed = 0

    @property
    def running(self) -> int:
        """How many samples other nodes compute now."""
        return self._running.total()

    async def sample(self, op: SampleOp, weights: Weights) -> SampleResult | None:
        """A sample with weights that other nodes can load; None if this node is to compute it.

        Raises `RequestFailedError` as an engine does.
        """
        node = self._choose(op, weights)
        if node.node_id == self._member.node_id:
            return None
        self._running[node.node_id] += 1
        try:
            return await self._ask(node, replace(op, weights=weights))
        finally:
            self._running[node.node_id] -= 1
            if not self._running[node.node_id]:
                del self._running[node.node_id]

    def _choose(self, op: SampleOp, weights: Weights) -> Node:
        member, now = self._member, self._clock.now()
        others = [
            node
            for node in member.roster.nodes.values()
            if can_take(node, weights.base_model) and now >= self._not_before.get(node.node_id, 0.0)
        ]
        if all(node.node_id == member.node_id for node in others):
            return member.roster.node
        tokens = (c.tokens for c in op.prompt.chunks if isinstance(c, EncodedTextChunk))
        version = _version(weights)
        return route_sample(
            others,
            prefix_hash(chain.from_iterable(tokens)),
            owner=member.roster.node,
            base_model=weights.base_model,
            version=version,
            present=self._present.get(version, ()),
            running={**self._running, member.node_id: self._here()},
        )

    def _here(self) -> int:
        """How many samples this node computes, or is about to."""
        return max(self._member.samples_running - self.running, 0)

    async def _ask(self, node: Node, op: SampleOp) -> SampleResult | None:
        try:
            outcome = await self._call(node, op)
        except (NodeUnreachable, BrokenOffError, APIStatusError, InputError) as error:
            _log.warning("node %s computes no samples for now: %s", node.name, error)
            self._not_before[node.node_id] = self._clock.now() + _PAUSE_S
            for nodes in self._present.values():
                nodes.discard(node.node_id)
            return None
        if isinstance(outcome, RequestFailedError):
            if outcome.category == "user":
                raise outcome
            # Such as weights that it cannot read; here they may be in memory.
            _log.warning("node %s failed to compute a sample: %s", node.name, outcome)
            self._not_before[node.node_id] = self._clock.now() + _PAUSE_S
            return None
        self.computed += 1
        self._note(_version(op.weights), node)
        return outcome

    async def _call(self, node: Node, op: SampleOp) -> SampleResult | RequestFailedError:
        ask = self._member.forwarder.ask
        return decode_outcome(await ask(node, "POST", PATH, encode_op(op), _MEDIA), op)

    def _note(self, version: str, node: Node) -> None:
        self._present.setdefault(version, set()).add(node.node_id)
        self._present.move_to_end(version)
        while len(self._present) > _MOST_VERSIONS:
            self._present.popitem(last=False)


def route(member: Member, worker: Worker, engine: Engine) -> Route:
    """The route on which a node computes samples for others."""

    async def compute(request: Request) -> Response:
        request_record(request.scope).route = INTERNAL_SAMPLE
        try:
            if member.hops.admit(request.scope) is None:
                return Response(status_code=404)
            op = decode_op(await _body(request))
        except (APIStatusError, InputError) as error:
            return Response(str(error), 403 if isinstance(error, APIStatusError) else 400)
        outcomes: list[SampleResult | RequestFailedError] = []

        async def work() -> None:
            try:
                async with worker.place(_operation(op)):
                    outcomes.append(await engine.sample(op))
            except InputError as error:
                outcomes.append(RequestFailedError(str(error), None, "user"))
            except RequestFailedError as error:
                outcomes.append(error)

        try:
            await while_connected(request.receive, work)
        except TinkerError as error:
            return Response(str(error), 503)
        if not outcomes:
            return Response("the node that asked has disconnected", 503)
        return Response(encode_outcome(outcomes[0]), media_type=_MEDIA)

    return Route(PATH, compute, methods=["POST"], name=INTERNAL_SAMPLE)


async def _body(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > _MOST_BYTES:
            raise InputError(f"a sample may have {_MOST_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _operation(op: SampleOp) -> Operation:
    """What takes a turn here for a sample; its own operation is on the node that asked."""
    return Operation(
        op_id=f"{op.op_id}@{uuid4().hex}",
        kind="sample",
        owner=op.cache_salt,
        session_id="",
        created_at=0.0,
        sequence_ids=tuple(op.sequence_ids),
    )


def _version(weights: Weights) -> str:
    return weights.location or "base"
