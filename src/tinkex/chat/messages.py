"""Messages as templates expect them: a known role, and the content as one string.

The server's chat endpoint and training data use the same functions, so that a model is trained on
the form in which it is prompted later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from tinkex.errors import InputError, whole_text

if TYPE_CHECKING:
    from collections.abc import Sequence

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, and whatever else a template reads, such as `tool_calls`."""

# OpenAI's newer name for a system message; no template knows it.
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}


def readable_messages(messages: Sequence[Message], path: str = "messages") -> list[dict[str, Any]]:
    """Every message as `readable_message` returns it; the error names the first bad one."""
    return [readable_message(message, f"{path}[{i}]") for i, message in enumerate(messages)]


def readable_message(message: object, path: str) -> dict[str, Any]:
    """One message with a role that templates know and its content as a string.

    What OpenAI sends as JSON text inside JSON, the arguments of a tool call, becomes the object
    that templates expect.
    """
    if not isinstance(message, Mapping):
        raise InputError(f"a message is an object with a role and a content, not {message!r}", path)
    known = cast("Message", message)
    role = known.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InputError(
            f"a message's role is one of {', '.join(ROLES)}, not {role!r}", f"{path}.role"
        )
    content = content_text(known.get("content"), f"{path}.content")
    made = {**known, "role": ROLES[role], "content": content}
    if known.get("tool_calls"):
        made["tool_calls"] = _tool_calls(known["tool_calls"], f"{path}.tool_calls")
    return made


def is_trained(message: Message, path: str) -> bool:
    """Whether a message is one to learn: an assistant's, unless its weight is 0.

    Raises InputError for a weight that is neither 0 nor 1, and for one that says nothing.
    """
    if "weight" not in message:
        return message["role"] == "assistant"
    weight = message["weight"]
    if message["role"] != "assistant":
        raise InputError("only messages of the assistant's have a weight", f"{path}.weight")
    if type(weight) is not int or weight not in (0, 1):
        raise InputError(f"is 0 or 1, not {weight!r}", f"{path}.weight")
    return weight == 1


def content_text(content: object, path: str) -> str:
    """A message's content as text: as it is, or its parts of type text, one per line."""
    if content is None or isinstance(content, str):
        return whole_text(content or "", path)
    if not isinstance(content, list | tuple):
        raise InputError("a message's content is text", path)
    parts = [_part(part, f"{path}[{i}]") for i, part in enumerate(cast("list[Any]", content))]
    return "\n".join(parts)


def _part(part: object, path: str) -> str:
    if isinstance(part, dict):
        known = cast("dict[str, Any]", part)
        if known.get("type") == "text" and isinstance(known.get("text"), str):
            return whole_text(known["text"], path)
    raise InputError("only parts of type 'text' are supported", path)


def _tool_calls(calls: object, path: str) -> list[Any]:
    if not isinstance(calls, list | tuple):
        raise InputError("tool_calls is a list of calls", path)
    return [_tool_call(call, f"{path}[{i}]") for i, call in enumerate(cast("list[Any]", calls))]


def _tool_call(call: object, path: str) -> dict[str, Any]:
    function = cast("Message", call).get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(
        cast("Message", function).get("name"), str
    ):
        raise InputError("a tool call has a function with a name", path)
    named = cast("Message", function)
    arguments = named.get("arguments")
    if isinstance(arguments, str):
        arguments = _arguments(arguments, f"{path}.function.arguments")
    return {**cast("Message", call), "function": {**named, "arguments": arguments}}


def _arguments(text: str, path: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InputError("the arguments of a tool call are a JSON object", path)
    return cast("dict[str, Any]", found)
