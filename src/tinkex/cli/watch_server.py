"""`tinkex run watch ID`: what the server knows of a run, and each change of it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

from tinkex.cli.connect import rest_client
from tinkex.cli.main import FAILED
from tinkex.cli.output import plain, say, text
from tinkex.cli.run_status import status_of
from tinkex.clock import SystemClock

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from datetime import datetime

    from tinkex.cli.run_status import Status
    from tinkex.clients.rest import RestClient
    from tinkex.clock import Clock
    from tinkex.types import Checkpoint, TrainingRun

_SAID: dict[Status, str] = {
    "running": "The run's session is open.",
    "finished": "The run has finished.",
    "interrupted": "The run was interrupted.",
    "failed": "The run has failed.",
}
_ASK_EVERY_S = 2.0
# A run that is busy asks all the time; nobody wants a line for each request.
_BUSY_EVERY_S = 30.0


def watch_server(args: argparse.Namespace) -> int | None:
    """Show the run's state and every change, until its session has ended; fails if the run did."""

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
        say(_SAID[status])
    return FAILED if status == "failed" else None


async def changes(
    rest: RestClient,
    run_id: str,
    clock: Clock,
    is_over: Callable[[], Awaitable[bool]],
    *,
    once: bool,
) -> AsyncGenerator[TrainingRun]:
    """The run as it is, and whenever something about it is new; ends when it has ended."""
    shown: TrainingRun | None = None
    while True:
        # Asked first, so that the state of a run that is over is its last.
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
    """What is new, each with the time it is about."""
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
