"""Pure: the message about nodes that Ray cannot place, demanded against free."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tinkex.ray_cluster.nodes import NodeSpec

_COUNTED: Final = ("GPU", "CPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine of the Ray cluster."""

    node_id: str
    address: str
    total: Mapping[str, float] = field(default_factory=dict[str, float])
    free: Mapping[str, float] = field(default_factory=dict[str, float])


def missing_resources(unplaced: Sequence[NodeSpec], machines: Iterable[Machine]) -> str:
    """What these nodes demand, and what each machine has free, one per line."""
    demanded = Counter(_needs(spec.resources) for spec in unplaced)
    kinds = [f"{count} x ({needs})" for needs, count in demanded.items()]
    lines = [f"demanded: {', '.join(kinds)}, for {_names(unplaced)}"]
    known = list(machines)
    for machine in known:
        free = ", ".join(
            f"{_number(machine.free.get(name, 0.0))} of {_number(machine.total[name])} {name}"
            for name in _COUNTED
            if machine.total.get(name)
        )
        lines.append(f"free on {machine.address} ({machine.node_id[:8]}): {free or 'nothing'}")
    if not known:
        lines.append("free: Ray has no machine")
    return "\n".join(lines)


def _needs(resources: Mapping[str, float]) -> str:
    found = [f"{_number(resources[name])} {name}" for name in _COUNTED if name in resources]
    return ", ".join(found)


def _number(amount: float) -> str:
    return f"{amount:g}"


def _names(specs: Sequence[NodeSpec], most: int = 4) -> str:
    names = [spec.name for spec in specs]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
