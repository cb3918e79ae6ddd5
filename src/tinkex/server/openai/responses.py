"""Answers to completion requests: as a whole, or as a stream of server-sent events.

Both stop the engine at once when the caller disconnects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from starlette.requests import ClientDisconnect

from tinkex.server.api.call import reply
from tinkex.server.openai.choice import Choice, Delta, Token
from tinkex.server.openai.sampling import SampleOrder, sample, sampling_params
from tinkex.server.openai.shapes import Frame, usage_of
from tinkex.server.openai.tokenization import Detokenizer, off_the_loop
from tinkex.server.supervision import while_connected

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from starlette.responses import Response
    from starlette.types import Message, Send

    from tinkex.engine.protocol import Best, SampleResult
    from tinkex.server.api.call import Call
    from tinkex.server.openai.models import Chosen
    from tinkex.server.openai.requests import CommonParameters
    from tinkex.server.openai.shapes import Shape
    from tinkex.server.openai.tokenization import TextCodec
    from tinkex.types.sequences import TopkLists

# More tokens than this take long enough to decode that other requests would wait.
_FEW_TOKENS = 4_000

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the nginx family buffer an answer unless this header forbids it.
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionInputs:
    """The inputs that the two endpoints name differently; `logprobs` is how many per token."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int | None
    logprobs: int | None
    echo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionAnswer:
    """What to sample, and how to write the answer."""

    order: SampleOrder
    frame: Frame
    shape: Shape
    text: TextCodec
    stops: Sequence[str]
    echo: bool = False

    def echoed(self, choice: int, result: SampleResult | None = None) -> Delta:
        """What precedes a choice's own text: the prompt, if the request asks for it."""
        if not self.echo:
            return Delta()
        return _prompt(self.text, self.order.prompts[choice // self.order.n], result)


async def respond(
    call: Call,
    request: CommonParameters,
    chosen: Chosen,
    text: TextCodec,
    wanted: CompletionInputs,
    shape: Shape,
    events: EventSender,
) -> Response | None:
    """Sample and answer; None if the answer was sent as events, or the caller disconnected."""
    request_id = f"{shape.prefix}-{call.parts.new_id()}"
    topk = wanted.logprobs or 0
    answer = CompletionAnswer(
        order=SampleOrder(
            request_id=request_id,
            chosen=chosen,
            prompts=wanted.prompts,
            n=request.n,
            params=sampling_params(request, wanted.max_tokens, text),
            topk=topk,
            prompt_logprobs=wanted.echo and wanted.logprobs is not None,
        ),
        frame=Frame(
            request_id=request_id,
            created=int(call.now()),
            model=request.model,
            pieces=text.pieces,
            logprobs=wanted.logprobs is not None,
            topk=topk,
            include_usage=request.include_usage,
        ),
        shape=shape,
        text=text,
        stops=request.stops,
        echo=wanted.echo,
    )
    return await (stream(call, answer, events) if request.stream else _at_once(call, answer))


async def _at_once(call: Call, answer: CompletionAnswer) -> Response | None:
    results: list[SampleResult] = []

    async def work() -> None:
        results.extend(await sample(call, answer.order))

    if not await while_connected(call.request.receive, work):
        return None
    tokens = sum(result.prompt_tokens + result.generated_tokens for result in results)
    body = await off_the_loop(lambda: _body(answer, results), aside=tokens > _FEW_TOKENS)
    return reply(body)


def _body(answer: CompletionAnswer, results: Sequence[SampleResult]) -> Any:
    choices = [
        _whole(answer, index, result, sample)
        for index, (result, sample) in enumerate(
            (result, sample) for result in results for sample in range(answer.order.n)
        )
    ]
    return answer.shape.whole(answer.frame, choices, usage_of(results))


def _whole(answer: CompletionAnswer, index: int, result: SampleResult, sample: int) -> Delta:
    sequence = result.response.sequences[sample]
    delta = answer.echoed(index, result)
    choice = Choice(answer.text, answer.stops, start=len(delta.text))
    likeliest = _rows(sequence.topk_logprobs, len(sequence.tokens))
    logprobs = sequence.logprobs or [None] * len(sequence.tokens)
    for token, logprob, best in zip(sequence.tokens, logprobs, likeliest, strict=True):
        delta.extend(choice.feed(token, logprob, best))
    delta.extend(choice.end(sequence.stop_reason))
    return delta


def _prompt(text: TextCodec, tokens: Sequence[int], result: SampleResult | None) -> Delta:
    """A prompt as if it had been drawn; its first token has no log-probability."""
    response = None if result is None else result.response
    logprobs = (response and response.prompt_logprobs) or [None] * len(tokens)
    likeliest = _rows(response and response.topk_prompt_logprobs, len(tokens))
    detokenizer, delta = Detokenizer(text.pieces), Delta()
    for token, logprob, best in zip(tokens, logprobs, likeliest, strict=True):
        delta.tokens.append(Token(token, logprob, best, len(delta.text)))
        delta.text += detokenizer.feed(token)
    delta.text += detokenizer.end()
    return delta


def _rows(lists: TopkLists | None, length: int) -> list[Best | None]:
    if lists is None:
        return [None] * length
    return [None if not row else ([t for t, _ in row], [p for _, p in row]) for row in lists]


async def stream(call: Call, answer: CompletionAnswer, events: EventSender) -> None:
    """Send the answer as events while it is sampled."""

    async def work() -> None:
        growing = _StreamedChoices(answer)
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


class _StreamedChoices:
    """The choices of a stream: tokens in, events out."""

    def __init__(self, answer: CompletionAnswer) -> None:
        self._answer = answer
        # Mutable state: the choices that have begun, those that an event has opened, what they
        # have grown by since the last events, whether sampling has ended, and the sender's wake-up.
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


class EventSender:
    """Sends a streamed answer. Its head is sent with the first event.

    Until then the request can still fail with a status of its own.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        # Mutable state: whether the head was sent.
        self.started = False

    async def put(self, events: Iterable[dict[str, Any]]) -> None:
        """Send events, all in one piece."""
        await self._write(b"".join(map(_encoded, events)))

    async def end(self) -> None:
        """Send the last event."""
        await self._write(_DONE, more=False)

    async def fail(self, event: dict[str, Any]) -> None:
        """End with an error in place of the rest; without the usual last event."""
        await self._write(_encoded(event), more=False)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        if not self.started:
            self.started = True
            await self._pass({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._pass({"type": "http.response.body", "body": data, "more_body": more})

    async def _pass(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:  # how some ASGI servers report a disconnect
            raise ClientDisconnect from error


def _encoded(event: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(event)
