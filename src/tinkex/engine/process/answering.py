"""The engine's half of the conversation: runs calls on an engine and sends what comes of them.

It knows no processes: a test can put any `Engine` behind it. Each call is a task, started in the
order in which calls arrive.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, cast

from tinkex.engine.process.failures import fatal, free_memory, out_of_memory, sendable
from tinkex.engine.process.messages import Answer, Call, Cancel, Tokens
from tinkex.errors import InputError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex.engine.process.messages import Message
    from tinkex.engine.protocol import Best, Engine, OnToken

METHODS: Final = frozenset(
    {
        "create_adapter",
        "load_adapter",
        "save_adapter",
        "drop_adapter",
        "train",
        "optim_step",
        "publish",
        "save_snapshot",
        "drop_snapshot",
        "sample",
        "copy_saved",
        "delete_saved",
        "export_saved",
        "import_saved",
        "stats",
    }
)
"""What may be called: the asynchronous methods of `Engine`."""


class Answering:
    """Runs calls; `give_up` is told when the device cannot be used any more."""

    def __init__(
        self,
        engine: Engine,
        send: Callable[[Message], None],
        give_up: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._send = send
        self._give_up = give_up
        # Mutable state: the calls that run, and tokens drawn since the loop last came round.
        self._running: dict[int, asyncio.Task[None]] = {}
        self._drawn: list[tuple[int, int, int, float, Best | None]] = []

    def take(self, message: Call | Cancel) -> None:
        """Start a call, or end one that nobody waits for."""
        if isinstance(message, Call):
            task = asyncio.get_running_loop().create_task(self._run(message))
            self._running[message.number] = task
        elif task := self._running.get(message.number):
            task.cancel()

    async def _run(self, call: Call) -> None:
        try:
            answer = Answer(call.number, await self._value(call))
        except Exception as error:  # noqa: BLE001 - handed to whoever asked
            answer = Answer(call.number, error=sendable(error))
            self._after(error)
        finally:
            del self._running[call.number]
        self._flush()
        self._deliver(answer)

    async def _value(self, call: Call) -> Any:
        if call.method not in METHODS:
            raise InputError(f"there is no {call.method!r}", "method")
        options = dict(call.options)
        if call.streams:
            options["on_token"] = self._streams(call.number)
        value = await getattr(self._engine, call.method)(*call.args, **options)
        # A batch answers operation by operation; its failures are values.
        for part in cast("list[Any]", value) if isinstance(value, list) else ():
            if isinstance(part, RequestFailedError):
                self._after(part)
        return cast("Any", value)

    def _deliver(self, answer: Answer) -> None:
        try:
            self._send(answer)
        except Exception as error:  # noqa: BLE001 - a result nobody can be told is a failure
            self._send(Answer(answer.number, error=sendable(error)))

    def _after(self, error: BaseException) -> None:
        if fatal(error):
            self._give_up(error)
        elif out_of_memory(error):
            free_memory(error)

    def _streams(self, number: int) -> OnToken:
        """Collects tokens: one message for all that are drawn in one turn of the loop."""

        def on_token(sample: int, token: int, logprob: float, best: Best | None) -> None:
            if not self._drawn:
                asyncio.get_running_loop().call_soon(self._flush)
            self._drawn.append((number, sample, token, logprob, best))

        return on_token

    def _flush(self) -> None:
        if self._drawn:
            drawn, self._drawn = self._drawn, []
            self._send(Tokens(drawn))
