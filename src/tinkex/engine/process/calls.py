"""The caller's half of the conversation: sends calls, hands out tokens and answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex.engine.process.messages import Answer, Call, Cancel, Tokens
from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex.engine.process.messages import Message
    from tinkex.engine.protocol import Best, OnToken
    from tinkex.errors import TinkerError

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    answer: asyncio.Future[Any]
    on_token: OnToken | None


class Calls:
    """Calls under way."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        # Mutable state: who waits for which call.
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = itertools.count()

    async def call(
        self, method: str, *args: Any, on_token: OnToken | None = None, **options: Any
    ) -> Any:
        """Call a method over there; cancelling this cancels it there."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            self._send(Call(number, method, args, options, streams=on_token is not None))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise InputError(f"holds something that cannot be sent: {error}", method) from error
        self._waiting[number] = _Waiting(answer, on_token)
        try:
            return await answer
        except asyncio.CancelledError:
            if number in self._waiting:
                self._send(Cancel(number))
            raise
        finally:
            self._waiting.pop(number, None)

    def take(self, message: Answer | Tokens) -> None:
        """Something came back; what nobody waits for is dropped."""
        if isinstance(message, Tokens):
            for number, sample, token, logprob, best in message.drawn:
                waiting = self._waiting.get(number)
                if waiting is not None:
                    _hand_over(waiting, sample, token, logprob, best)
            return
        waiting = self._waiting.pop(message.number, None)
        if waiting is None or waiting.answer.done():
            return
        if message.error is None:
            waiting.answer.set_result(message.value)
        else:
            waiting.answer.set_exception(message.error)

    def fail(self, error: Callable[[], TinkerError]) -> None:
        """End every call with an error of its own."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            if not each.answer.done():
                each.answer.set_exception(error())


def _hand_over(
    waiting: _Waiting, sample: int, token: int, logprob: float, best: Best | None
) -> None:
    if waiting.on_token is None:
        return
    try:
        waiting.on_token(sample, token, logprob, best)
    except Exception:  # noqa: BLE001 - the caller's own code; its sample goes on without it
        _log.exception("on_token failed and is not called again")
        waiting.on_token = None
