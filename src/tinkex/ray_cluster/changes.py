"""Pure: what turns the running nodes into those that are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tinkex.ray_cluster.nodes import NodeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """In the order in which they are made: what is removed makes room for what is added."""

    remove: tuple[str, ...] = ()
    replace: tuple[NodeSpec, ...] = ()
    """One after the other, so that the others keep serving."""
    add: tuple[NodeSpec, ...] = ()
    keep: tuple[NodeSpec, ...] = ()


def plan_changes(wanted: Iterable[NodeSpec], running: Mapping[str, bool]) -> Changes:
    """`running` says of each running node whether it may stay as it is."""
    specs = {spec.name: spec for spec in wanted}
    return Changes(
        # The last of a group first.
        remove=tuple(sorted(running.keys() - specs.keys(), reverse=True)),
        replace=tuple(spec for name, spec in specs.items() if not running.get(name, True)),
        add=tuple(spec for name, spec in specs.items() if name not in running),
        keep=tuple(spec for name, spec in specs.items() if running.get(name, False)),
    )
