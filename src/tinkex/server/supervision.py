"""What the failure of background work means: one policy for each task, in this table.

| task                                   | what its failure means                                  |
| -------------------------------------- | ------------------------------------------------------- |
| scheduler loop (`SchedulerLoop.run`)   | the worker has ended: not ready, new work gets 503, the |
|                                        | process exits with an error and is started again        |
| one operation of a batch               | it runs again, alone and from records; in the end it    |
|                                        | fails with the error                                    |
| restore, snapshot, drop of one model   | the model is evicted and tried again after a pause      |
| one sample                             | it fails with the error                                 |
| a file of a published sampler          | written again after a pause                             |
| clean-up of one session (`SessionEnds`)| that session again at the next sweep; `keep_running`    |
| sweep, prune (`Upkeep`)                | each item for itself, again at the next round;          |
|                                        | `keep_running`                                          |
| watcher of uploads (`Uploads`)         | `keep_running`                                          |
| usage and heartbeats (`WriteBehind`)   | kept and written in the next round; `keep_running`      |
| thread of the database                 | raised at the calls that wait; it continues             |
| lease of a node (`Member._renew`)      | renewed again; a node that was declared dead exits (75) |
| announcing a node, looking after the   | `keep_running`                                          |
| cluster (`Member`)                     |                                                         |
| thread that hears hints (`Listener`)   | connects again; until then a node caches no records     |
| supervisor of the engine process       | the process exits with an error and is started again    |
| engine process, and what reads from it | killed and started again; calls get `EngineDiedError`   |
| one engine call                        | raised at its caller                                    |
| request, stream, export                | answered with the error                                 |

Memory and storage that run out, and errors of dependencies, are failures like any other. A
`CancelledError` is one, too, if nothing has cancelled the task: it would end the task silently.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Receive

    from tinkex.clock import Clock

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0
# The failure of a task that worked for so long begins a new series.
_WELL_S = 60.0

_log = logging.getLogger(__name__)


def retry_wait_s(failures: int) -> float:
    """How long to wait before the next try after so many failures in a row."""
    return min(_FIRST_RETRY_S * 2.0 ** min(failures - 1, 10), _LONGEST_RETRY_S)


class StrayCancellationError(RuntimeError):
    """A call was cancelled from inside, and not because its task was."""


class no_stray_cancellation:
    """Raise an ordinary error instead of a `CancelledError` that nothing has asked for.

    A class, because every sample passes several: a generator would take four times as long.
    """

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                why = "a call was cancelled, and its task was not"
                raise StrayCancellationError(why) from error


async def quietly(work: Awaitable[object], what: str = "clean-up") -> bool:
    """Await something whose failure changes nothing else and is logged. False if it failed."""
    try:
        with no_stray_cancellation():
            await work
    except Exception:  # noqa: BLE001 - it ends here
        _log.exception("%s failed", what)
        return False
    return True


async def keep_running(what: str, work: Callable[[], Awaitable[object]], clock: Clock) -> None:
    """Run a task that is to run until it is cancelled; start it again when it fails or returns."""
    failures = 0
    while True:
        began = clock.now()
        await quietly(work(), what)
        failures = failures + 1 if clock.now() - began < _WELL_S else 1
        wait_s = retry_wait_s(failures)
        _log.error("%s ended and is started again in %g s", what, wait_s)
        await clock.sleep(wait_s)


async def while_connected(receive: Receive, work: Callable[[], Awaitable[None]]) -> bool:
    """Do the work unless the caller disconnects first; returns whether it was done.

    The request's body must have been read: the next message after it is the disconnect.
    """
    failure: Exception | None = None
    done = False

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(listen)
        try:
            await work()
            done = True
        except Exception as error:  # noqa: BLE001 - raised below, without a group around it
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return done
