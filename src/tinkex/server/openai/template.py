"""A chat's prompt by the model's own template; what it refuses is answered with a 400."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinkex.errors import ChatTemplateError, InputError
from tinkex.server.openai.errors import problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinkex.chat.template import ChatTemplate
    from tinkex.clock import Clock


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
