"""`POST /v1/completions`: prompts as text or tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard, cast

from tinkex.server.openai.answer import Wanted, respond
from tinkex.server.openai.errors import problem
from tinkex.server.openai.models import choose
from tinkex.server.openai.requests import CompletionRequest, read
from tinkex.server.openai.shapes import Completion

if TYPE_CHECKING:
    from starlette.responses import Response

    from tinkex.server.api.call import Call
    from tinkex.server.openai.events import EventStream
    from tinkex.server.openai.texts import Text, Texts


async def completions(call: Call, texts: Texts, events: EventStream) -> Response | None:
    """Continue prompts."""
    request = read(CompletionRequest, await call.body())
    if request.stream and request.echo and request.logprobs is not None:
        what = "A stream cannot echo with logprobs: leave out 'stream', 'echo' or 'logprobs'."
        raise problem(400, what, param="echo", code="unsupported_parameter")
    chosen = await choose(call, request.model)
    text = await texts.of(chosen.spec)
    wanted = Wanted(
        prompts=await _prompts(request.prompt, text, call.settings.max_samples),
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        echo=request.echo,
    )
    return await respond(call, request, chosen, text, wanted, Completion(), events)


async def _prompts(prompt: object, text: Text, most: int) -> list[list[int]]:
    """The tokens of each prompt: a string, tokens, or a list of either."""
    several = cast("list[Any]", prompt) if isinstance(prompt, list) else [prompt]
    if _are_tokens(several):
        several = [several]
    if not 1 <= len(several) <= most:
        raise problem(400, f"Give at least one prompt, and {most} at most.", param="prompt")
    return [await _tokens(each, text) for each in several]


async def _tokens(prompt: object, text: Text) -> list[int]:
    if isinstance(prompt, str):
        tokens = await text.encode(prompt, "prompt")
    elif _are_tokens(prompt):
        tokens = prompt
    else:
        what = "A prompt is a string, a list of token ids, or a list of either."
        raise problem(400, what, param="prompt", code="invalid_value")
    text.check_prompt(tokens, "prompt")
    return tokens


def _are_tokens(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or not value:
        return False
    return all(type(each) is int for each in cast("list[Any]", value))
