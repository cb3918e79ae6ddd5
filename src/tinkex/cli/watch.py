"""`tinkex run watch`: follow a run until it ends.

A run is followed in its folder, which has every step, or by its id on the server, which knows its
last request, its checkpoints and its session.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.cli.command_errors import CommandError
from tinkex.cli.commands import FAILED, Argument, Command
from tinkex.cli.connect import rest_client
from tinkex.cli.output import plain, say, text
from tinkex.clock import SystemClock
from tinkex.tracking.history import follow, write_line
from tinkex.tracking.layout import summary
from tinkex.tracking.run_info import read_run
from tinkex.tracking.state import RunState
from tinkex.tracking.views import PLAIN_WIDTH, open_view, speaks_unicode

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from datetime import datetime

    from tinkex.cli.run_status import Status
    from tinkex.clients.rest import RestClient
    from tinkex.clock import Clock
    from tinkex.tracking.run_info import Ending
    from tinkex.types import Checkpoint, TrainingRun

_SAID: dict[Ending, str] = {
    "finished": "The run has finished.",
    "interrupted": "The run was interrupted; it can be resumed.",
    "failed": "The run has failed; its own output says why.",
    "gone": "The run's process is not on this machine any more; it can be resumed.",
}
_SAID_BY_SERVER: dict[Status, str] = {
    "running": "The run's session is open.",
    "finished": "The run has finished.",
    "interrupted": "The run was interrupted.",
    "failed": "The run has failed.",
}
_ASK_EVERY_S = 2.0
# A busy run sends requests all the time; they get one line in this time.
_BUSY_EVERY_S = 30.0


def watch(args: argparse.Namespace) -> int | None:
    """Follow a run while it trains. Fails if the run fails."""
    import asyncio

    folder = Path(args.run).expanduser()
    if not folder.is_dir():
        if not _may_be_an_id(args.run):
            raise CommandError(
                f"There is no folder {args.run}",
                "Give a run's folder, or its id as `tinkex run list` shows it.",
            )
        return _watch_server(args)
    shown = _Lines() if args.format == "json" else _Picture(folder)
    ending = asyncio.run(_follow(folder, shown, SystemClock(), once=args.once))
    if ending is not None:
        say(_SAID[ending])
    return FAILED if ending in ("failed", "gone") else None


async def _follow(
    folder: Path, shown: _Lines | _Picture, clock: Clock, *, once: bool
) -> Ending | None:
    """Show the run until it ends; returns how it ended, None when it may still continue."""
    last: int | None = None
    # Read before the lines, so that a run which has ended by now has all of its lines.
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
    """For programs: every line of the file."""

    def row(self, step: int, row: dict[str, float], now: float) -> None:
        values = {name: value for name, value in row.items() if name != "step"}
        sys.stdout.write(write_line(step, values))
        sys.stdout.flush()

    def idle(self, now: float) -> None:
        pass

    def close(self) -> None:
        pass


class _Picture:
    """For people: the view of the run itself, with its curves."""

    def __init__(self, folder: Path) -> None:
        info = read_run(folder)
        self._state = RunState(info.steps or 0, info.title, 0, 0.0)
        self._view = open_view(sys.stdout, chart=True)
        # Mutable: when the first row came, for runs without `time_s`.
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


# -- on the server -------------------------------------------------------------------------------


def _watch_server(args: argparse.Namespace) -> int | None:
    """Show the run's state and every change until its session ends; fails if the run failed."""
    import asyncio

    from tinkex.cli.run_status import status_of

    async def show(rest: RestClient) -> Status:
        status: Status = "unknown"

        async def is_over() -> bool:
            nonlocal status
            status = await status_of(rest, args.run)
            return status not in ("running", "unknown")

        states = changes(rest, args.run, SystemClock(), is_over, once=args.once)
        before: TrainingRun | None = None
        async for run in states:
            if args.format == "json":
                line = json.dumps(plain(run), ensure_ascii=False)
            else:
                line = "\n".join(_lines(before, run))
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            before = run
        return "failed" if before is not None and before.corrupted else status

    with rest_client() as rest:
        status = asyncio.run(show(rest))
    if status != "unknown":
        say(_SAID_BY_SERVER[status])
    return FAILED if status == "failed" else None


async def changes(
    rest: RestClient,
    run_id: str,
    clock: Clock,
    is_over: Callable[[], Awaitable[bool]],
    *,
    once: bool,
) -> AsyncGenerator[TrainingRun]:
    """The run's state, then each changed state; ends with the run."""
    shown: TrainingRun | None = None
    while True:
        # Asked first, so that the state of an ended run is its last one.
        over = await is_over()
        run = await rest.get_training_run_async(run_id)
        if shown is None or _is_news(shown, run):
            shown = run
            yield run
        if run.corrupted or once or over:
            return
        await clock.sleep(_ASK_EVERY_S)


def _is_news(before: TrainingRun, now: TrainingRun) -> bool:
    busy_s = (now.last_request_time - before.last_request_time).total_seconds()
    return busy_s >= _BUSY_EVERY_S or now.corrupted or _saves(before) != _saves(now)


def _lines(before: TrainingRun | None, run: TrainingRun) -> list[str]:
    """The changes, each with its time."""
    asked = _clock_time(run.last_request_time)
    lines: list[str] = []
    if before is None:
        rank = f", rank {run.lora_rank}" if run.lora_rank else ""
        lines.append(f"{text(run.training_run_id)}: {text(run.base_model)}{rank}")
    known = _saves(before) if before else []
    lines += [
        f"{_clock_time(one.time)}  saved {text(one.tinker_path)}"
        for one in _saves(run)
        if one not in known
    ]
    if run.corrupted:
        lines.append(f"{asked}  failed; begin again from its last checkpoint")
    elif len(lines) == (before is None):
        lines.append(f"{asked}  last request")
    return lines


def _saves(run: TrainingRun) -> list[Checkpoint]:
    both = (run.last_checkpoint, run.last_sampler_checkpoint)
    return sorted((one for one in both if one is not None), key=lambda one: one.time)


def _clock_time(time: datetime) -> str:
    return f"{time.astimezone():%H:%M:%S}"


WATCH = Command(
    watch,
    Argument("run RUN", "a run's folder, or its id on the server"),
    Argument("--once", "show the current state and exit"),
)
