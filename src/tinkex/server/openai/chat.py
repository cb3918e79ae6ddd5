"""`POST /v1/chat/completions`: messages, put together by the model's own template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from tinkex.server.openai.answer import Wanted, respond
from tinkex.server.openai.errors import problem
from tinkex.server.openai.models import choose
from tinkex.server.openai.requests import ChatRequest, read
from tinkex.server.openai.shapes import Chat
from tinkex.server.openai.texts import off_the_loop

if TYPE_CHECKING:
    from starlette.responses import Response

    from tinkex.server.api.call import Call
    from tinkex.server.openai.events import EventStream
    from tinkex.server.openai.models import Chosen
    from tinkex.server.openai.texts import Text, Texts

# OpenAI's newer name for a system message; no template knows it.
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
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
        lambda: template.render(messages, request.chat_template_kwargs, call.parts.clock),
        aside=size > _FEW_CHARACTERS,
    )
    tokens = await text.encode(rendered, "messages", add_special_tokens=False)
    text.check_prompt(tokens, "messages")
    return tokens


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """A message as templates expect it: a known role, and its content as one string."""
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise problem(
            400,
            f"A message's role is one of {', '.join(_ROLES)}, not {role!r}.",
            param=f"messages[{index}].role",
            code="invalid_value",
        )
    path = f"messages[{index}].content"
    return {**message, "role": _ROLES[role], "content": _content(message.get("content"), path)}


def _content(content: object, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise problem(400, "A message's content is text.", param=path, code="invalid_value")
    parts = [_part(part, f"{path}[{i}]") for i, part in enumerate(cast("list[Any]", content))]
    return "\n".join(parts)


def _part(part: object, path: str) -> str:
    if isinstance(part, dict):
        known = cast("dict[str, Any]", part)
        if known.get("type") == "text" and isinstance(known.get("text"), str):
            return known["text"]
    raise problem(
        400, "Only parts of type 'text' are supported.", param=path, code="unsupported_value"
    )
