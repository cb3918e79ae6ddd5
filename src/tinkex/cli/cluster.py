"""`tinkex cluster`: the nodes of a cluster and what they own, changed directly in its database.

Commands only ask: a node hands over what it owns when it reads that it drains, or that another node
is wanted for a key. So a command may wait until that was done, for a bounded time.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tinkex.cli import cluster_ray
from tinkex.cli.cluster_status import base_models, show_status, state_of
from tinkex.cli.command_errors import CommandError, misuse
from tinkex.cli.commands import Argument, Command, real_number, whole_number
from tinkex.cli.output import print_json, say, show
from tinkex.cli.server_store import SERVER, server_store, wait_for
from tinkex.clock import SystemClock

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from tinkex.clock import Clock
    from tinkex.server.cluster.placement import Move
    from tinkex.server.store.ownership import Claim, Node, Ownership

_POLL_S = 0.5
_NAMED = 10
_SEE_NODES = "`tinkex cluster status` shows the nodes."
_SEE_KEYS = "`tinkex cluster status --models` shows the keys."


@asynccontextmanager
async def cluster_of(args: argparse.Namespace) -> AsyncGenerator[Ownership]:
    """The nodes and claims in a server's database."""
    async with server_store(args) as store:
        yield store


async def members(ownership: Ownership) -> Sequence[Node]:
    """All nodes, of which there is at least one."""
    nodes = await ownership.nodes()
    if not nodes:
        raise CommandError(
            "There is no cluster in this database",
            "Name its database with --database, or start a node: tinkex serve --join NAME",
        )
    return nodes


def find_node(nodes: Sequence[Node], text: str) -> Node:
    """The node with this name, or with an id that begins so; nodes that ended are no answer."""
    found = [node for node in nodes if node.node_id == text]
    found = found or [node for node in nodes if node.name == text]
    found = found or [node for node in nodes if text and node.node_id.startswith(text)]
    members = [node for node in found if node.member]
    if len(members) == 1:
        return members[0]
    if members:
        ids = ", ".join(node.node_id for node in members)
        raise misuse(f"{text!r} may be one of several nodes", f"Name one by its id: {ids}")
    if found:
        ended = "was declared dead" if found[-1].state == "dead" else "has left the cluster"
        raise CommandError(f"Node {text} {ended}", _SEE_NODES)
    raise CommandError(f"There is no node {text!r}", _SEE_NODES)


# -- status ----------------------------------------------------------------------------------------


def status(args: argparse.Namespace) -> None:
    """Show the nodes of a cluster and what they have to do."""
    nodes, claims = wait_for(_read(args))
    show_status(args, nodes, claims, SystemClock().wall())


async def _read(args: argparse.Namespace) -> tuple[Sequence[Node], Sequence[Claim]]:
    async with cluster_of(args) as ownership:
        return await members(ownership), await ownership.claims()


# -- drain -----------------------------------------------------------------------------------------


def drain(args: argparse.Namespace) -> None:
    """Have a node hand over what it owns, and wait for that. It is given nothing new. It exits with
    1 if the node still owns something in the end."""
    if args.undo:
        node = wait_for(_undo_drain(args))
        _report(args, {"node_id": node.node_id, "state": "alive"})
        _print(args, f"Node {node.name} takes new work again.")
        return

    async def work() -> tuple[Node, Sequence[Claim]]:
        async with cluster_of(args) as ownership:
            return await drain_node(ownership, args.node, args.wait_s, SystemClock())

    node, left = wait_for(work())
    _report(args, {"node_id": node.node_id, "left": [claim.key for claim in left]})
    if not left:
        _print(args, f"Node {node.name} drains and owns nothing.")
        return
    listed = ", ".join(claim.key for claim in left[:_NAMED])
    more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
    if args.wait_s > 0:
        raise CommandError(
            f"Node {node.name} drains and still owns {len(left)} after {args.wait_s:g} s: "
            f"{listed}{more}",
            "It goes on handing over. Run the command again to wait for it.",
        )
    _print(args, f"Node {node.name} drains. It owns {len(left)}: {listed}{more}")


async def _undo_drain(args: argparse.Namespace) -> Node:
    async with cluster_of(args) as ownership:
        return await undo_drain(ownership, args.node)


async def undo_drain(ownership: Ownership, name: str) -> Node:
    """Let a node that drains take new work again."""
    node = find_node(await members(ownership), name)
    if not await ownership.drain(node.node_id, undo=True):
        raise CommandError(f"Node {node.name} has ended meanwhile", _SEE_NODES)
    return node


async def drain_node(
    ownership: Ownership, name: str, wait_s: float, clock: Clock
) -> tuple[Node, Sequence[Claim]]:
    """Ask a node to hand over everything; the node, and what it owns in the end."""
    from tinkex.server.cluster.placement import can_take, why_not

    node = find_node(await members(ownership), name)
    if not await ownership.drain(node.node_id):
        raise CommandError(f"Node {node.name} has ended meanwhile", _SEE_NODES)
    nodes = await ownership.nodes()
    left: Sequence[Claim] = await ownership.claims([node.node_id])
    for base_model in sorted({claim.base_model for claim in left}):
        if not any(can_take(each, base_model) for each in nodes):
            say(f"Nothing of {base_model} can be handed over: {why_not(nodes, base_model)}.")
    if node.expired:
        say(f"Node {node.name} is silent: its lease has run out.")

    async def is_empty() -> bool:
        nonlocal left
        before, left = len(left), await ownership.claims([node.node_id])
        if len(left) != before:
            say(f"Node {node.name} owns {len(left)}.")
        return not left

    await wait_until(is_empty, wait_s, clock)
    return node, left


async def wait_until(done: Callable[[], Awaitable[bool]], wait_s: float, clock: Clock) -> bool:
    """Ask until it is done, for at most `wait_s`."""
    end = clock.now() + wait_s
    while not await done():
        rest = end - clock.now()
        if rest <= 0:
            return False
        await clock.sleep(min(rest, _POLL_S))
    return True


# -- move ------------------------------------------------------------------------------------------


def move(args: argparse.Namespace) -> None:
    """Have a model, or another key, handed to a node, and wait for that. It exits with 1 if the key
    is not there in the end."""

    async def work() -> tuple[Node, bool]:
        async with cluster_of(args) as ownership:
            return await move_key(ownership, args.key, args.node, args.wait_s, SystemClock())

    node, done = wait_for(work())
    _report(args, {"key": args.key, "node_id": node.node_id, "moved": done})
    if not done and args.wait_s > 0:
        raise CommandError(
            f"{args.key} is not on node {node.name} after {args.wait_s:g} s",
            "Its owner still has been asked. Run the command again to wait for it.",
        )
    text = "is on" if done else "is to go to"
    _print(args, f"{args.key} {text} node {node.name}.")


async def move_key(
    ownership: Ownership, key: str, name: str, wait_s: float, clock: Clock
) -> tuple[Node, bool]:
    """Ask a key's owner to hand it to a node; the node, and whether it owns the key in the end."""
    nodes = await members(ownership)
    claim = await _claim(ownership, key)
    node = find_node(nodes, name)
    if claim.node_id == node.node_id:
        if claim.wanted is not None:
            await ownership.want(key, None)
        return node, True
    _check_target(nodes, node, claim)
    _check_owner(nodes, claim)
    if not await ownership.want(key, node.node_id):
        raise _unknown(key)

    async def arrived() -> bool:
        now = await _claim(ownership, key)
        if now.node_id != node.node_id and now.wanted != node.node_id:
            raise CommandError(f"{key} was sent to another node meanwhile", _SEE_KEYS)
        return now.node_id == node.node_id

    return node, await wait_until(arrived, wait_s, clock)


async def _claim(ownership: Ownership, key: str) -> Claim:
    claim = await ownership.get_claim(key)
    if claim is None:
        raise _unknown(key)
    return claim


def _unknown(key: str) -> CommandError:
    return CommandError(f"No node owns {key!r}", _SEE_KEYS)


def _check_target(nodes: Sequence[Node], node: Node, claim: Claim) -> None:
    """Raise unless a node can take a key."""
    from tinkex.server.cluster.placement import can_take

    base_model = claim.base_model
    if can_take(node, base_model):
        return
    fit = ", ".join(each.name for each in nodes if can_take(each, base_model)) or "none"
    hint = f"Nodes that can take {base_model}: {fit}"
    if node.role == "api":
        raise CommandError(f"Node {node.name} has no engine: its role is api", hint)
    if not node.serving:
        raise CommandError(f"Node {node.name} takes no work: it is {state_of(node)}", hint)
    served = base_models(node) or "no model"
    raise CommandError(f"Node {node.name} does not serve {base_model}, but {served}", hint)


def _check_owner(nodes: Sequence[Node], claim: Claim) -> None:
    """Raise unless a key's owner can hand it over."""
    owner = next((node for node in nodes if node.node_id == claim.node_id), None)
    if owner is None or owner.state in ("dead", "left"):
        name = claim.node_id if owner is None else owner.name
        raise CommandError(
            f"Node {name}, which owns {claim.key}, is not in the cluster any more",
            "Another node takes it over. Try again after that.",
        )
    if owner.expired:
        say(f"Node {owner.name}, which owns {claim.key}, is silent: its lease has run out.")


# -- rebalance -------------------------------------------------------------------------------------


def rebalance(args: argparse.Namespace) -> None:
    """Have keys handed from nodes with many to nodes with few. Keys of nodes that drain come first.
    It does not wait."""

    async def work() -> Sequence[Move]:
        async with cluster_of(args) as ownership:
            return await rebalance_all(ownership, args.most, dry_run=args.dry_run)

    found = wait_for(work())
    show(
        args,
        [
            {
                "key": each.claim.key,
                "owner": each.claim.owner,
                "base_model": each.claim.base_model,
                "from": each.source.node_id,
                "to": each.target.node_id,
                "reason": each.reason,
            }
            for each in found
        ],
        ("Key", "Tenant", "Base model", "From", "To", "Why"),
        [
            (
                each.claim.key,
                each.claim.owner,
                each.claim.base_model,
                each.source.name,
                each.target.name,
                each.reason,
            )
            for each in found
        ],
        empty="Nothing has to move.",
    )
    if found and not args.dry_run:
        say("The nodes were asked. `tinkex cluster status --models` shows what is left to do.")


async def rebalance_all(ownership: Ownership, most: int, *, dry_run: bool) -> Sequence[Move]:
    """Ask for the moves that balance the nodes; those that were asked for."""
    from tinkex.server.cluster.placement import moves

    found = moves(await members(ownership), await ownership.claims(), most=most)
    if dry_run:
        return found
    # A key that is over by now has no claim any more.
    return [each for each in found if await ownership.want(each.claim.key, each.target.node_id)]


def _report(args: argparse.Namespace, data: dict[str, object]) -> None:
    if args.format == "json":
        print_json(data)


def _print(args: argparse.Namespace, text: str) -> None:
    if args.format != "json":
        print(text)


def _wait(default: float) -> Argument:
    return Argument(
        "--wait-s SECONDS",
        "how long to wait; 0 does not",
        type=real_number(lambda number: 0 <= number <= 86400, "from 0 to 86400"),
        default=default,
    )


_NODE = Argument("node NODE", "its name, or the beginning of its id")
VERBS = {
    "status": Command(
        status,
        Argument("--models", "also show which node owns which key"),
        Argument("--all", "also show nodes that have left or are dead"),
        *SERVER,
    ),
    "drain": Command(
        drain,
        _NODE,
        Argument("--undo", "let the node take new work again; what it handed over stays away"),
        _wait(300.0),
        *SERVER,
    ),
    "move": Command(
        move,
        Argument("key KEY", "a model, or a sampler that belongs to none"),
        _NODE,
        _wait(60.0),
        *SERVER,
    ),
    "rebalance": Command(
        rebalance,
        Argument("--dry-run", "only show what would move"),
        Argument("--most N", "move at most so many keys", type=whole_number(1), default=1000),
        *SERVER,
    ),
    **cluster_ray.VERBS,
}
