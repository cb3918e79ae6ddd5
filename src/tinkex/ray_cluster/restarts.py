"""Pure policy: when a node that has exited is started again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LOST_LEASE: Final = 75
"""Exit status of a node that was declared dead: it starts again as a new node at once."""
MISUSED: Final = 2
"""Exit status of a command line or setting that is refused: another try changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Exponential back-off, and when to give up."""

    first_delay_s: float = 1.0
    longest_delay_s: float = 60.0
    quick_s: float = 60.0
    """A run that was shorter, or never became ready, is a quick failure."""
    most_failures: int = 6
    """Quick failures in a row after which a node is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeExit:
    """How a run of a node ended; `status` is negative for a signal."""

    status: int
    was_ready: bool
    lasted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Start it again after `delay_s`; None is never. `failures` are the quick ones in a row."""

    delay_s: float | None
    failures: int


def after_exit(policy: RestartPolicy, failures: int, ended: NodeExit) -> Restart:
    """What to do after a run, with so many quick failures in a row before it."""
    if ended.was_ready and ended.status == LOST_LEASE:
        return Restart(delay_s=0.0, failures=0)
    if ended.status == MISUSED and not ended.was_ready:
        return Restart(delay_s=None, failures=failures + 1)
    if ended.was_ready and ended.lasted_s >= policy.quick_s:
        return Restart(delay_s=policy.first_delay_s, failures=0)
    failures += 1
    if failures >= policy.most_failures:
        return Restart(delay_s=None, failures=failures)
    delay_s = policy.first_delay_s * 2.0 ** (failures - 1)
    return Restart(delay_s=min(delay_s, policy.longest_delay_s), failures=failures)
