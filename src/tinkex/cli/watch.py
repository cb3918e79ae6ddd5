"""`tinkex run watch`: follow a run, in its folder or on the server, until it ends."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.cli.failures import CommandError
from tinkex.cli.main import FAILED
from tinkex.cli.output import say
from tinkex.clock import SystemClock
from tinkex.tracking.history import follow, write_line
from tinkex.tracking.layout import summary
from tinkex.tracking.run_info import read_run
from tinkex.tracking.state import RunState
from tinkex.tracking.views import PLAIN_WIDTH, open_view, speaks_unicode

if TYPE_CHECKING:
    import argparse

    from tinkex.clock import Clock
    from tinkex.tracking.run_info import Ending

_SAID: dict[Ending, str] = {
    "finished": "The run has finished.",
    "interrupted": "The run was interrupted; it can be resumed.",
    "failed": "The run has failed; its own output says why.",
    "gone": "The run's process is not on this machine any more; it can be resumed.",
}


def watch(args: argparse.Namespace) -> int | None:
    """Follow a run; fails if the run did."""
    folder = Path(args.run).expanduser()
    if not folder.is_dir():
        if not _may_be_an_id(args.run):
            raise CommandError(
                f"There is no folder {args.run}",
                "Give a run's folder, or its id as `tinkex run list` shows it.",
            )
        from tinkex.cli.watch_server import watch_server

        return watch_server(args)
    shown = _Lines() if args.format == "json" else _Picture(folder)
    ending = asyncio.run(_follow(folder, shown, SystemClock(), once=args.once))
    if ending is not None:
        say(_SAID[ending])
    return FAILED if ending in ("failed", "gone") else None


async def _follow(
    folder: Path, shown: _Lines | _Picture, clock: Clock, *, once: bool
) -> Ending | None:
    """Show the run until it ends; returns how it ended, None when it may still go on."""
    last: int | None = None
    # Read before the lines are, so that the lines of a run that has ended are all there.
    info = read_run(folder)
    try:
        async for row in follow(folder, clock):
            if row is not None:
                last = int(row["step"])
                shown.row(last, row, clock.now())
                continue
            shown.idle(clock.now())
            if (ending := info.ended(last)) is not None or once:
                return ending
            info = read_run(folder)
    finally:
        shown.close()
    return None


class _Lines:
    """For programs: every line as it is in the file."""

    def row(self, step: int, row: dict[str, float], now: float) -> None:
        values = {name: value for name, value in row.items() if name != "step"}
        sys.stdout.write(write_line(step, values))
        sys.stdout.flush()

    def idle(self, now: float) -> None:
        pass

    def close(self) -> None:
        pass


class _Picture:
    """For people: the view that the run itself shows, with its curves."""

    def __init__(self, folder: Path) -> None:
        info = read_run(folder)
        self._state = RunState(info.steps or 0, info.title, 0, 0.0)
        self._view = open_view(sys.stdout, chart=True)
        # Mutable: when the first row came, for runs that do not say how long they took.
        self._since: float | None = None

    def row(self, step: int, row: dict[str, float], now: float) -> None:
        if self._since is None:
            self._since = now
        said = row.get("time_s", math.nan)
        values = {name: value for name, value in row.items() if name != "step"}
        self._state.add(step, values, said if math.isfinite(said) else now - self._since)
        self._view.draw(self._state, now)

    def idle(self, now: float) -> None:
        self._view.draw(self._state, now)

    def close(self) -> None:
        self._view.close()
        if self._state.measured:
            unicode = speaks_unicode(sys.stdout)
            self._view.line(summary(self._state, PLAIN_WIDTH, unicode=unicode))


def _may_be_an_id(text: str) -> bool:
    return "/" not in text and not text.startswith((".", "~"))
