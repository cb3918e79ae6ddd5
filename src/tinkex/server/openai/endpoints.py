"""`POST /v1/completions` (prompts as text or tokens) and `POST /v1/chat/completions` (messages).

Messages become a prompt by the model's own chat template; what it refuses is answered with a 400.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard, cast

from tinkex.chat.messages import readable_message
from tinkex.errors import ChatTemplateError, InputError
from tinkex.server.openai.errors import problem
from tinkex.server.openai.models import choose
from tinkex.server.openai.requests import ChatRequest, CompletionRequest, read
from tinkex.server.openai.responses import CompletionInputs, respond
from tinkex.server.openai.shapes import Chat, Completion
from tinkex.server.openai.tokenization import off_the_loop

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.responses import Response

    from tinkex.chat.template import ChatTemplate
    from tinkex.clock import Clock
    from tinkex.server.api.call import Call
    from tinkex.server.openai.models import Chosen
    from tinkex.server.openai.responses import EventSender
    from tinkex.server.openai.tokenization import TextCodec, TextCodecs

# So many characters are a few milliseconds' work for a template.
_FEW_CHARACTERS = 20_000


async def completions(call: Call, texts: TextCodecs, events: EventSender) -> Response | None:
    """Continue prompts."""
    request = read(CompletionRequest, await call.body())
    if request.stream and request.echo and request.logprobs is not None:
        what = "A stream cannot echo with logprobs: leave out 'stream', 'echo' or 'logprobs'."
        raise problem(400, what, param="echo", code="unsupported_parameter")
    chosen = await choose(call, request.model)
    text = await texts.of(chosen.spec)
    wanted = CompletionInputs(
        prompts=await _prompts(request.prompt, text, call.settings.max_samples),
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        echo=request.echo,
    )
    return await respond(call, request, chosen, text, wanted, Completion(), events)


async def _prompts(prompt: object, text: TextCodec, most: int) -> list[list[int]]:
    """The tokens of each prompt: a string, tokens, or a list of either."""
    several = cast("list[Any]", prompt) if isinstance(prompt, list) else [prompt]
    if len(several) > max(most, text.max_context):
        raise text.too_long("prompt")
    if _are_tokens(several):
        several = [several]
    if not 1 <= len(several) <= most:
        raise problem(400, f"Give at least one prompt, and {most} at most.", param="prompt")
    return [await _tokens(each, text) for each in several]


async def _tokens(prompt: object, text: TextCodec) -> list[int]:
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


async def chat(call: Call, texts: TextCodecs, events: EventSender) -> Response | None:
    """Write an assistant's next message."""
    request = read(ChatRequest, await call.body())
    chosen = await choose(call, request.model)
    text = await texts.of(chosen.spec)
    if request.top_logprobs and not request.logprobs:
        raise problem(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    limit = request.max_completion_tokens
    wanted = CompletionInputs(
        prompts=[await _prompt(call, chosen, text, request)],
        max_tokens=request.max_tokens if limit is None else limit,
        logprobs=request.top_logprobs if request.logprobs else None,
    )
    return await respond(call, request, chosen, text, wanted, Chat(), events)


async def _prompt(call: Call, chosen: Chosen, text: TextCodec, request: ChatRequest) -> list[int]:
    template = text.template
    if template is None:
        raise problem(
            400,
            f"{chosen.spec.name} brings no chat template: use /v1/completions, and write the "
            "prompt as the model was trained on.",
            param="model",
            code="model_without_template",
        )
    if len(request.messages) > chosen.spec.max_context_length:
        raise text.too_long("messages")
    messages = [_message(message, i) for i, message in enumerate(request.messages)]
    size = sum(20 + len(message["content"]) for message in messages)
    rendered = await off_the_loop(
        lambda: prompt_text(template, messages, request.chat_template_kwargs, call.parts.clock),
        aside=size > _FEW_CHARACTERS,
    )
    tokens = await text.encode(rendered, "messages", add_special_tokens=False)
    text.check_prompt(tokens, "messages")
    return tokens


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    try:
        return readable_message(message, f"messages[{index}]")
    except InputError as error:
        text = sentence(error.reason)
        raise problem(400, text, param=error.path, code="invalid_value") from error


def prompt_text(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    clock: Clock,
) -> str:
    """The prompt for an assistant's next message."""
    try:
        return template.render(messages, add_generation_prompt=True, options=options, clock=clock)
    except InputError as error:
        text = f"chat_template_kwargs: {error.reason}."
        raise problem(400, text, param="chat_template_kwargs", code="invalid_value") from error
    except ChatTemplateError as error:
        raise problem(
            400, sentence(str(error)), param="messages", code="invalid_messages"
        ) from error


def sentence(text: str) -> str:
    """`text` as people expect it in a reply: with a capital, and ended."""
    ended = text if text.endswith((".", "!", "?")) else f"{text}."
    return ended[:1].upper() + ended[1:]
