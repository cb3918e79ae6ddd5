"""`tinkex cluster up` and `down`: the nodes of a cluster as actors on Ray."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from tinkex.cli.command_errors import CommandError, misuse
from tinkex.cli.commands import Argument, Command, real_number, whole_number
from tinkex.cli.output import print_json, say, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from tinkex.ray_cluster.cluster import Cluster, Limits
    from tinkex.ray_cluster.connection import RayConnection
    from tinkex.ray_cluster.local_ray import LocalRay
    from tinkex.ray_cluster.nodes import NodeSpec
    from tinkex.ray_cluster.secrets import NodeSecrets
    from tinkex.ray_cluster.supervisor import NodeReport

# Options that may have a password, and the variables that say the same.
_SECRET_OPTIONS = {"--database": "TINKEX_DATABASE", "--artifacts": "TINKEX_ARTIFACTS"}


def up(args: argparse.Namespace) -> None:
    """Start the nodes of a cluster on Ray, or change a running cluster to what is asked for."""
    run_up(args)


def down(args: argparse.Namespace) -> None:
    """Drain and stop the nodes of a cluster on Ray."""
    from tinkex.ray_cluster.connection import ClusterError, RayConnection
    from tinkex.ray_cluster.local_ray import LocalRay

    local = LocalRay(_cluster_name(args))
    address = _address(args) or _local_address(local)
    if address is None:
        raise CommandError(
            f"there is no cluster {args.name} on this machine",
            "Name its Ray cluster with --address.",
        )
    try:
        with RayConnection(address, _limits(args).placement_s) as connection:
            stopped = _cluster(args, connection).down(force=args.force)
    except ClusterError as error:
        raise CommandError(str(error), error.hint) from error
    if address == local.address():
        local.stop()
        say(f"stopped Ray at {address}")
    if args.format == "json":
        print_json({"cluster": args.name, "stopped": stopped})
    elif stopped:
        print(f"Stopped {stopped} nodes of {args.name}.")
    else:
        say(f"{args.name} has no nodes at {address}.")


def run_up(args: argparse.Namespace, program: Sequence[str] | None = None) -> None:
    """`up`; `program` is run instead of `tinkex serve`."""
    from tinkex.config import node_environment, process_environment
    from tinkex.ray_cluster.connection import ClusterError, RayConnection
    from tinkex.ray_cluster.local_ray import LocalRay
    from tinkex.ray_cluster.secrets import NodeSecrets

    specs = _specs(args, program)
    given = {
        variable: value
        for option, variable in _SECRET_OPTIONS.items()
        if (value := getattr(args, option[2:])) is not None
    }
    _leave_command_line(given, process_environment())
    secrets = NodeSecrets({**node_environment(), **given})
    local, started = LocalRay(args.name), False
    address = _address(args) or _local_address(local)
    try:
        if address is None:
            say("starting Ray on this machine")
            hidden = node_environment()
            plain = {k: v for k, v in process_environment().items() if k not in hidden}
            address, started = local.start(plain), True
        with RayConnection(address, _limits(args).placement_s) as connection:
            reports = _up(args, connection, specs, secrets)
    except BaseException as error:
        if started and not args.keep_partial:
            local.stop()
        if isinstance(error, ClusterError):
            raise CommandError(str(error), error.hint) from error
        raise
    _show(args, address, specs, reports)


def _up(
    args: argparse.Namespace,
    connection: RayConnection,
    specs: Sequence[NodeSpec],
    secrets: NodeSecrets,
) -> list[NodeReport]:
    cluster = _cluster(args, connection)
    return cluster.up(specs, secrets, keep_partial=args.keep_partial)


def _cluster(args: argparse.Namespace, connection: RayConnection) -> Cluster:
    from tinkex.ray_cluster.cluster import Cluster

    return Cluster(connection, args.name, say, limits=_limits(args))


def _limits(args: argparse.Namespace) -> Limits:
    from tinkex.ray_cluster.cluster import Limits

    given = {
        "drain_s": args.drain_timeout,
        "placement_s": getattr(args, "placement_timeout", None),
        "start_s": getattr(args, "start_timeout", None),
    }
    return Limits(**{name: value for name, value in given.items() if value is not None})


def _cluster_name(args: argparse.Namespace) -> str:
    from tinkex.ray_cluster.nodes import check_cluster_name

    return check_cluster_name(args.name)


def _address(args: argparse.Namespace) -> str | None:
    from tinkex.config import ray_address

    return args.address or ray_address()


def _local_address(local: LocalRay) -> str | None:
    """Where the Ray of this machine runs; it accepts any command, so only from this machine."""
    from tinkex.config import keep_ray_on_loopback

    keep_ray_on_loopback()
    return local.address()


def _specs(args: argparse.Namespace, program: Sequence[str] | None) -> list[NodeSpec]:
    from tinkex.ray_cluster.nodes import NodeGroup, node_specs, parse_cpu_nodes, parse_gpu_nodes

    name = _cluster_name(args)
    if args.port and args.port_base:
        raise misuse("--port and --port-base exclude each other", "Leave one of them out.")
    groups = [parse_gpu_nodes(text) for text in args.nodes or ()]
    groups += [parse_cpu_nodes(text) for text in args.cpu_nodes or ()]
    groups.append(NodeGroup(kind="api", count=args.api_nodes or 0))
    specs = node_specs(
        name,
        groups,
        cpus=args.cpus,
        host=args.host,
        port=args.port or 0,
        port_base=args.port_base,
        program=program,
    )
    if not any(spec.kind != "api" for spec in specs):
        raise misuse(
            "there is no node that computes",
            "Name some with --nodes 'MODEL=4xGPU' or --cpu-nodes 'MODEL=2'. "
            "`tinkex cluster down` stops all.",
        )
    return specs


def _leave_command_line(given: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Start this command again without its secrets, if they are on its command line.

    Lists of processes show it as long as the command runs, and Ray shows the command line of every
    program that has connected.
    """
    from tinkex.ray_cluster.secrets import url_secrets

    words = sys.orig_argv
    secret = [text for value in given.values() for text in url_secrets(value)]
    if not any(text in word for text in secret for word in words):
        return
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in _SECRET_OPTIONS:
            kept.append(word)
        elif not equals:
            next(rest, None)
    sys.stdout.flush()
    os.execve(sys.executable, kept, {**environment, **given})


def _show(
    args: argparse.Namespace, address: str, specs: Sequence[NodeSpec], reports: Sequence[NodeReport]
) -> None:
    models = {spec.name: spec.base_model for spec in specs}
    nodes = [
        {
            "name": report.name,
            "state": report.state,
            "url": report.url,
            "base_model": models[report.name],
            "machine": report.machine,
            "starts": report.starts,
        }
        for report in reports
    ]
    show(
        args,
        {"cluster": args.name, "address": address, "nodes": nodes},
        ("Node", "State", "URL", "Model", "Machine", "Starts"),
        [tuple(node.values()) for node in nodes],
    )


_SECONDS = real_number(lambda number: number > 0, "above 0")
_NAME = Argument("--name NAME", "the cluster's name", required=True)
_ADDRESS = Argument(
    "--address ADDRESS", "a running Ray cluster, such as auto (default: RAY_ADDRESS, or its own)"
)
_DRAIN = Argument(
    "--drain-timeout S", "then a node is killed (default: 120)", type=_SECONDS, dest="drain_timeout"
)

VERBS = {
    "up": Command(
        up,
        _NAME,
        Argument("--database URL", "postgresql://… of all nodes (default: TINKEX_DATABASE)"),
        Argument("--artifacts URL", "s3://… of all nodes (default: TINKEX_ARTIFACTS)"),
        Argument(
            "--nodes MODEL=NxGPU", "N nodes with one GPU each; may be repeated", action="append"
        ),
        Argument(
            "--cpu-nodes MODEL=N", "N nodes that compute on CPUs; may be repeated", action="append"
        ),
        Argument("--api-nodes N", "nodes without a model", type=whole_number(0)),
        Argument(
            "--cpus N",
            "CPUs that Ray reserves for each node",
            type=real_number(lambda number: number >= 0, "of 0 or more"),
            default=1.0,
        ),
        _ADDRESS,
        Argument("--host ADDRESS", "where nodes listen (default: their machine's address in Ray)"),
        Argument("--port N", "all nodes listen on N, one on each machine", type=whole_number(1)),
        Argument("--port-base N", "nodes listen on N, N+1, … (default: any)", type=whole_number(1)),
        Argument(
            "--placement-timeout S",
            "for Ray to answer, and to place all nodes (default: 60)",
            type=_SECONDS,
        ),
        Argument("--start-timeout S", "for all nodes to be ready (default: 900)", type=_SECONDS),
        _DRAIN,
        Argument("--keep-partial", "keep the nodes that run if some cannot be had"),
    ),
    "down": Command(
        down, _NAME, _ADDRESS, _DRAIN, Argument("--force", "kill the nodes without draining")
    ),
}
