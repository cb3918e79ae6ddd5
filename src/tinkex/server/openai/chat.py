"""`POST /v1/chat/completions`: messages, put together by the model's own template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinkex.chat.messages import readable_message
from tinkex.errors import InputError
from tinkex.server.openai.answer import Wanted, respond
from tinkex.server.openai.errors import problem
from tinkex.server.openai.models import choose
from tinkex.server.openai.requests import ChatRequest, read
from tinkex.server.openai.shapes import Chat
from tinkex.server.openai.template import prompt_text, sentence
from tinkex.server.openai.texts import off_the_loop

if TYPE_CHECKING:
    from starlette.responses import Response

    from tinkex.server.api.call import Call
    from tinkex.server.openai.events import EventStream
    from tinkex.server.openai.models import Chosen
    from tinkex.server.openai.texts import Text, Texts

# So many characters are a few milliseconds' work for a template.
_FEW_CHARACTERS = 20_000


async def chat(call: Call, texts: Texts, events: EventStream) -> Response | None:
    """Write an assistant's next message."""
    request = read(ChatRequest, await call.body())
    chosen = await choose(call, request.model)
    text = await texts.of(chosen.spec)
    if request.top_logprobs and not request.logprobs:
        raise problem(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    limit = request.max_completion_tokens
    wanted = Wanted(
        prompts=[await _prompt(call, chosen, text, request)],
        max_tokens=request.max_tokens if limit is None else limit,
        logprobs=request.top_logprobs if request.logprobs else None,
    )
    return await respond(call, request, chosen, text, wanted, Chat(), events)


async def _prompt(call: Call, chosen: Chosen, text: Text, request: ChatRequest) -> list[int]:
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
