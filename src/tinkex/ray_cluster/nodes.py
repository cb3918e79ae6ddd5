"""Which nodes a cluster has: what `--nodes` means, their names, and the command line of each."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NodeKind = Literal["gpu", "cpu", "api"]

NAMESPACE: Final = "tinkex"
_CLUSTER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}")
_GPUS: Final = re.compile(r"([0-9]{1,4})xGPU", re.IGNORECASE)
_NUMBER: Final = re.compile(r"[0-9]{1,4}")
_LONGEST_SLUG: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes that serve the same base model on the same kind of device."""

    kind: NodeKind
    count: int
    base_model: str | None = None
    """As `tinkex serve --base-model` takes it; None for nodes without an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One node, without its secrets. Equal specs need no restart."""

    cluster: str
    name: str
    kind: NodeKind
    base_model: str | None
    cpus: float
    gpus: float
    host: str | None = None
    """None is the address that Ray knows the machine by."""
    port: int = 0
    program: tuple[str, ...] | None = None
    """What is run instead of `tinkex serve`, with the same arguments."""

    @property
    def actor_name(self) -> str:
        """Its name in Ray."""
        return f"{actor_prefix(self.cluster)}{self.name}"

    @property
    def resources(self) -> dict[str, float]:
        """What Ray reserves for it."""
        needs = {"CPU": self.cpus, "GPU": self.gpus}
        return {name: amount for name, amount in needs.items() if amount}


def actor_prefix(cluster: str) -> str:
    """What the names of all actors of a cluster begin with."""
    return f"tinkex/{cluster}/"


def check_cluster_name(name: str) -> str:
    """The name, if it can be part of an actor's name and of a folder's."""
    if not _CLUSTER_NAME.fullmatch(name):
        raise InputError(
            f"must have up to 63 letters, digits, dots and dashes, got {name!r}", "name"
        )
    return name


def parse_gpu_nodes(text: str) -> NodeGroup:
    """`MODEL=4xGPU`: four nodes with one GPU each. MODEL may be NAME=FOLDER."""
    model, _, amount = text.rpartition("=")
    found = _GPUS.fullmatch(amount.strip())
    if found is None or not model:
        raise InputError(
            f"must be MODEL=NxGPU, such as 'Qwen/Qwen3-8B=4xGPU', got {text!r}", "nodes"
        )
    return NodeGroup(kind="gpu", count=int(found[1]), base_model=model)


def parse_cpu_nodes(text: str) -> NodeGroup:
    """`MODEL=2`: two nodes that compute on CPUs."""
    model, _, amount = text.rpartition("=")
    if not model or not _NUMBER.fullmatch(amount.strip()):
        raise InputError(f"must be MODEL=N, such as 'tinkex/tiny=2', got {text!r}", "cpu_nodes")
    return NodeGroup(kind="cpu", count=int(amount), base_model=model)


def node_specs(
    cluster: str,
    groups: Iterable[NodeGroup],
    *,
    cpus: float = 1.0,
    host: str | None = None,
    port: int = 0,
    port_base: int | None = None,
    program: Sequence[str] | None = None,
) -> list[NodeSpec]:
    """The nodes of these groups. The same groups always give the same names.

    All of them listen on `port`; 0 is any that is free. With `port_base` each node has a port of
    its own in the whole cluster, so that any number of them may share a machine.
    """
    specs: list[NodeSpec] = []
    for group in _merged(groups):
        for index in range(group.count):
            specs.append(
                NodeSpec(
                    cluster=cluster,
                    name=f"{_group_name(group)}-{index}",
                    kind=group.kind,
                    base_model=group.base_model,
                    cpus=cpus,
                    gpus=1.0 if group.kind == "gpu" else 0.0,
                    host=host,
                    port=port if port_base is None else port_base + len(specs),
                    program=None if program is None else tuple(program),
                )
            )
    if specs and specs[-1].port > 65535:
        raise InputError(f"leaves no ports for {len(specs)} nodes, got {port_base}", "port_base")
    return specs


def _merged(groups: Iterable[NodeGroup]) -> list[NodeGroup]:
    """Groups of the same model and kind as one, because names count within a group."""
    counts: dict[tuple[NodeKind, str | None], int] = {}
    for group in groups:
        key = (group.kind, group.base_model)
        counts[key] = counts.get(key, 0) + group.count
    return [
        NodeGroup(kind=kind, base_model=model, count=count)
        for (kind, model), count in counts.items()
    ]


def _group_name(group: NodeGroup) -> str:
    if group.base_model is None:
        return group.kind
    name, _, folder = group.base_model.partition("=")
    slug = re.sub(r"[^a-z0-9]+", "-", name.rpartition("/")[2].lower()).strip("-")
    # Models of two organisations may have the same last part, and a folder may change.
    digest = hashlib.sha256(f"{name}={folder}".encode()).hexdigest()[:4]
    return f"{group.kind}-{slug[:_LONGEST_SLUG] or 'model'}-{digest}"


def node_arguments(spec: NodeSpec, *, host: str, data_dir: str) -> list[str]:
    """The arguments of `tinkex serve`. Database, artifacts and keys are in its environment."""
    arguments = ["--join", spec.cluster, "--node-name", spec.name]
    arguments += ["--host", host, "--port", str(spec.port)]
    arguments += ["--data-dir", data_dir, "--format", "json"]
    if spec.base_model is not None:
        arguments += ["--base-model", spec.base_model]
    if spec.kind == "api":
        return [*arguments, "--role", "api"]
    return [*arguments, "--device", "cuda" if spec.kind == "gpu" else "cpu"]
