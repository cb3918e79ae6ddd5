"""What `tinkex cluster status` prints: nodes, their sum, and which node owns which key."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tinkex.cli.output import print_json, show, size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from tinkex.server.store.ownership import Claim, Node

_ENDED = ("dead", "left")
_ID_CHARACTERS = 8


def show_status(
    args: argparse.Namespace, nodes: Sequence[Node], claims: Sequence[Claim], now: float
) -> None:
    """Print nodes, without those that ended and own nothing, and keys if they are asked for."""
    owned = Counter(claim.node_id for claim in claims)
    shown = [n for n in nodes if args.all or n.state not in _ENDED or owned[n.node_id]]
    total = _sum(nodes, claims)
    names = {node.node_id: node.name for node in nodes}
    if args.format == "json":
        data: dict[str, object] = {
            "nodes": [_plain(node, owned[node.node_id]) for node in shown],
            "sum": asdict(total),
        }
        if args.models:
            data["models"] = [_plain_claim(claim, names) for claim in claims]
        print_json(data)
        return
    _show_nodes(args, shown, owned, now)
    print()
    print(_sum_line(total))
    if args.models:
        print()
        _show_claims(args, claims, names)


def _show_nodes(
    args: argparse.Namespace, nodes: Sequence[Node], owned: Mapping[str, int], now: float
) -> None:
    columns = (
        "Name",
        "State",
        "Role",
        "Base models",
        "Owns",
        "Queue",
        "Samples",
        "Resident",
        "Lease",
        "URL",
        "ID",
    )
    rows = [
        (
            node.name,
            state_of(node),
            node.role,
            base_models(node) or "-",
            owned[node.node_id],
            node.load.queued_ops,
            node.load.samples_running,
            _memory(node),
            _lease(node, now),
            node.url,
            short_id(node),
        )
        for node in nodes
    ]
    show(args, [], columns, rows, empty="No node is in the cluster now; --all shows earlier ones.")


def _show_claims(
    args: argparse.Namespace, claims: Sequence[Claim], names: Mapping[str, str]
) -> None:
    show(
        args,
        [],
        ("Key", "Tenant", "Base model", "Node", "Epoch", "Wanted"),
        [
            (
                claim.key,
                claim.owner,
                claim.base_model,
                names.get(claim.node_id, claim.node_id),
                claim.epoch,
                "-" if claim.wanted is None else names.get(claim.wanted, claim.wanted),
            )
            for claim in claims
        ],
        empty="No node owns anything.",
    )


def state_of(node: Node) -> str:
    """The state, with `silent` for a member whose lease has run out."""
    return "silent" if node.expired and node.state not in _ENDED else node.state


def base_models(node: Node) -> str:
    """What a node serves, in a line."""
    return ", ".join(model.name for model in node.base_models)


def short_id(node: Node) -> str:
    """What its id has besides the name; an id begins with the name."""
    return node.node_id.removeprefix(f"{node.name}-")[:_ID_CHARACTERS]


def _memory(node: Node) -> str:
    load = node.load
    taken = size(load.resident_bytes) or ""
    return f"{taken} of {size(load.capacity_bytes)}" if load.capacity_bytes else taken


def _lease(node: Node, now: float) -> str:
    """What is left of a lease, by the clock of this machine, which may differ from the database's:
    whether it has run out is what the database says."""
    if node.state in _ENDED:
        return "-"
    left_s = node.lease_until - now
    if node.expired:
        return f"ran out {max(-left_s, 0):.0f} s ago"
    return f"{max(left_s, 0):.0f} s left"


@dataclass(frozen=True, kw_only=True)
class _Sum:
    """What all members have to do together."""

    nodes: int
    states: dict[str, int]
    owned: int
    moving: int
    queued_ops: int
    samples_running: int
    resident_bytes: int


def _sum(nodes: Sequence[Node], claims: Sequence[Claim]) -> _Sum:
    members = [node for node in nodes if node.state not in _ENDED]
    return _Sum(
        nodes=len(members),
        states=dict(sorted(Counter(map(state_of, members)).items())),
        owned=len(claims),
        moving=sum(claim.wanted not in (None, claim.node_id) for claim in claims),
        queued_ops=sum(node.load.queued_ops for node in members),
        samples_running=sum(node.load.samples_running for node in members),
        resident_bytes=sum(node.load.resident_bytes for node in members),
    )


def _sum_line(total: _Sum) -> str:
    states = ", ".join(f"{count} {state}" for state, count in total.states.items())
    return (
        f"Nodes: {total.nodes} ({states or 'none'}). Owned: {total.owned} ({total.moving} to move)."
        f"\nQueue: {total.queued_ops}. Samples: {total.samples_running}. "
        f"Resident: {size(total.resident_bytes)}."
    )


def _plain(node: Node, owned: int) -> dict[str, object]:
    return {
        "node_id": node.node_id,
        "name": node.name,
        "state": state_of(node),
        "role": node.role,
        "url": node.url,
        "release": node.release,
        "version": node.version,
        "number": node.number,
        "base_models": [model.name for model in node.base_models],
        "owned": owned,
        "open_models": node.load.models,
        "queued_ops": node.load.queued_ops,
        "samples_running": node.load.samples_running,
        "resident_bytes": node.load.resident_bytes,
        "capacity_bytes": node.load.capacity_bytes or None,
        "joined_at": _iso(node.joined_at),
        "lease_until": _iso(node.lease_until),
    }


def _plain_claim(claim: Claim, names: Mapping[str, str]) -> dict[str, object]:
    return {
        "key": claim.key,
        "owner": claim.owner,
        "base_model": claim.base_model,
        "node_id": claim.node_id,
        "node": names.get(claim.node_id),
        "epoch": claim.epoch,
        "since": _iso(claim.since),
        "wanted": claim.wanted,
    }


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
