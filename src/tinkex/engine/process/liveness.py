"""Tells a process that computes from one that is frozen, and says how one ended.

Time is counted in looks, not in seconds between heartbeats: when the watching process was itself
stopped for a minute (Ctrl-Z, a debugger, a suspended machine), that minute is one look.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LOOKS: Final = 8
"""Looks within one timeout; the end of a silence is missed by at most one of them."""
_COMPUTES: Final = frozenset("RD")  # running or ready to run; waiting for a disk


class Silence:
    """Counts looks without a sign of life."""

    def __init__(self) -> None:
        self._looks = 0

    def look(self, look_s: float, *, heard: bool) -> float:
        """The seconds of silence seen by now; looks come every `look_s`."""
        self._looks = 0 if heard else self._looks + 1
        return self._looks * look_s


def verdict(
    silent_s: float, limit_s: float, busy_limit_s: float, computing: Callable[[], bool]
) -> str | None:
    """Why a process is to be given up after this much silence, if it is."""
    if silent_s >= max(limit_s, busy_limit_s):
        return f"was busy and gave no sign of life for {silent_s:g} s, and was killed"
    if silent_s >= limit_s and not computing():
        return f"gave no sign of life for {silent_s:g} s and was killed"
    return None


def computes(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a thread of a process runs or waits for a disk; False where that cannot be seen.

    Heartbeats need the interpreter's lock, which a library may keep for seconds while it is
    being loaded. A stopped or deadlocked process has no such thread.
    """
    try:
        stats = [path.read_text() for path in (proc / str(pid) / "task").glob("*/stat")]
    except OSError:  # no such system, or a thread that has just ended
        return False
    # "pid (name) state ...", where the name may hold anything.
    return any(stat.rpartition(")")[2].split()[0] in _COMPUTES for stat in stats)


def how_it_ended(code: int | None, reason: str | None, lines: Iterable[str]) -> str:
    """One sentence on the end of an engine's process, then its last lines.

    `code` is what `Popen.wait` gives, None when the process would not go; `reason` is why it was
    ended on purpose, if it was.
    """
    if reason is not None:
        how = reason if code is not None else f"{reason}, and it is still there"
    elif code is None:
        how = "closed its connection and does not end"
    elif code < 0:
        how = f"was killed by signal {-code} ({_signal_name(-code)})"
        if -code == signal.SIGKILL:
            how += "; the system does that when memory runs out"
    else:
        how = f"ended with exit code {code}"
    tail = "\n".join(lines)
    return f"the engine process {how}" + (f"; its last lines:\n{tail}" if tail else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
