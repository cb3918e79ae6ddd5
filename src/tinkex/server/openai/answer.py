"""Answering a request: what to sample, and the whole answer out of what was drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex.server.api.call import reply
from tinkex.server.openai.choice import Choice, Delta, Token
from tinkex.server.openai.events import while_connected
from tinkex.server.openai.growing import stream
from tinkex.server.openai.pieces import Detokenizer
from tinkex.server.openai.sampling import Order, sample, sampling_params
from tinkex.server.openai.shapes import Frame, usage_of
from tinkex.server.openai.texts import off_the_loop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.responses import Response

    from tinkex.engine.protocol import Best, SampleResult
    from tinkex.server.api.call import Call
    from tinkex.server.openai.events import EventStream
    from tinkex.server.openai.models import Chosen
    from tinkex.server.openai.requests import Asked
    from tinkex.server.openai.shapes import Shape
    from tinkex.server.openai.texts import Text
    from tinkex.types.sequences import TopkLists

# More tokens than this take long enough to read that others would notice.
_FEW_TOKENS = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the two endpoints ask for in words of their own; `logprobs` is how many of each."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int | None
    logprobs: int | None
    echo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How to answer an order."""

    order: Order
    frame: Frame
    shape: Shape
    text: Text
    stops: Sequence[str]
    echo: bool = False

    def echoed(self, choice: int, result: SampleResult | None = None) -> Delta:
        """What goes before a choice's own text: the prompt, if it was asked for."""
        if not self.echo:
            return Delta()
        return _prompt(self.text, self.order.prompts[choice // self.order.n], result)


async def respond(
    call: Call,
    request: Asked,
    chosen: Chosen,
    text: Text,
    wanted: Wanted,
    shape: Shape,
    events: EventStream,
) -> Response | None:
    """Sample and answer; None when the answer went out as events, or nobody waits for it."""
    request_id = f"{shape.prefix}-{call.parts.new_id()}"
    topk = wanted.logprobs or 0
    answer = Answer(
        order=Order(
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


async def _at_once(call: Call, answer: Answer) -> Response | None:
    results: list[SampleResult] = []

    async def work() -> None:
        results.extend(await sample(call, answer.order))

    if not await while_connected(call.request.receive, work):
        return None
    tokens = sum(result.prompt_tokens + result.generated_tokens for result in results)
    body = await off_the_loop(lambda: _body(answer, results), aside=tokens > _FEW_TOKENS)
    return reply(body)


def _body(answer: Answer, results: Sequence[SampleResult]) -> Any:
    choices = [
        _whole(answer, index, result, sample)
        for index, (result, sample) in enumerate(
            (result, sample) for result in results for sample in range(answer.order.n)
        )
    ]
    return answer.shape.whole(answer.frame, choices, usage_of(results))


def _whole(answer: Answer, index: int, result: SampleResult, sample: int) -> Delta:
    sequence = result.response.sequences[sample]
    delta = answer.echoed(index, result)
    choice = Choice(answer.text, answer.stops, start=len(delta.text))
    likeliest = _rows(sequence.topk_logprobs, len(sequence.tokens))
    logprobs = sequence.logprobs or [None] * len(sequence.tokens)
    for token, logprob, best in zip(sequence.tokens, logprobs, likeliest, strict=True):
        delta.extend(choice.feed(token, logprob, best))
    delta.extend(choice.end(sequence.stop_reason))
    return delta


def _prompt(text: Text, tokens: Sequence[int], result: SampleResult | None) -> Delta:
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
