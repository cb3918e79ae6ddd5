"""Answers in pieces: events go out while the rest is still being drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
from starlette.requests import ClientDisconnect

from tinkex.server.openai.choice import Choice, Delta
from tinkex.server.openai.events import while_connected
from tinkex.server.openai.sampling import sample
from tinkex.server.openai.shapes import usage_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.engine.protocol import Best, SampleResult
    from tinkex.server.api.call import Call
    from tinkex.server.openai.answer import Answer
    from tinkex.server.openai.events import EventStream


async def stream(call: Call, answer: Answer, events: EventStream) -> None:
    """The answer in pieces; when the caller goes away the engine stops at once."""

    async def work() -> None:
        growing = _Growing(answer)
        results: list[SampleResult] = []
        failure: Exception | None = None

        async def draw() -> None:
            nonlocal failure
            try:
                results.extend(await sample(call, answer.order, growing.drawn))
            except Exception as error:  # noqa: BLE001 - raised below, without a group around it
                failure = error
            growing.close()

        async with anyio.create_task_group() as group:
            group.start_soon(draw)
            try:
                while (new := await growing.next()) is not None:
                    await events.put(new)
            except ClientDisconnect as error:
                failure = error
                group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        await events.put(growing.last(results))
        await events.end()

    await while_connected(call.request.receive, work)


class _Growing:
    """The choices of a stream under way: tokens in, events out."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        # Mutable state: the choices that have begun and those that the caller knows of, what
        # they have grown by since the last events, whether there is more to come, and the
        # wake-up for whoever sends them.
        self._choices: dict[int, Choice] = {}
        self._opened: set[int] = set()
        self._new: dict[int, Delta] = {}
        self._closed = False
        self._bell = anyio.Event()

    def drawn(self, choice: int, token: int, logprob: float, best: Best | None) -> None:
        """Take a token."""
        self._add(choice, self._begun(choice).feed(token, logprob, best))

    def close(self) -> None:
        """No more tokens."""
        self._closed = True
        self._bell.set()

    async def next(self) -> list[dict[str, Any]] | None:
        """The next events, when there are some; None when there will be none."""
        while not self._new and not self._closed:
            await self._bell.wait()
            self._bell = anyio.Event()
        return self._take() if self._new else None

    def last(self, results: Sequence[SampleResult]) -> list[dict[str, Any]]:
        """What is known only when everything has been drawn."""
        n = self._answer.order.n
        for index in range(len(results) * n):
            sequence = results[index // n].response.sequences[index % n]
            self._add(index, self._begun(index).end(sequence.stop_reason))
        frame, shape = self._answer.frame, self._answer.shape
        ending = [shape.ending(frame, usage_of(results))] if frame.include_usage else []
        return [*self._take(), *ending]

    def _begun(self, index: int) -> Choice:
        if index not in self._choices:
            prompt = self._answer.echoed(index)
            self._choices[index] = Choice(
                self._answer.text, self._answer.stops, start=len(prompt.text)
            )
            self._new[index] = prompt
            self._bell.set()
        return self._choices[index]

    def _add(self, index: int, delta: Delta) -> None:
        if not self._answer.frame.logprobs:
            delta.tokens.clear()
        if delta:
            self._new.setdefault(index, Delta()).extend(delta)
            self._bell.set()

    def _take(self) -> list[dict[str, Any]]:
        new, self._new = self._new, {}
        frame, shape = self._answer.frame, self._answer.shape
        events: list[dict[str, Any]] = []
        for index, delta in new.items():
            if index not in self._opened:
                self._opened.add(index)
                events += shape.opening(frame, index)
            if delta:
                events.append(shape.piece(frame, index, delta))
        return events
