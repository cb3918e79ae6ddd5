"""The object of one line as an example, or an InputError that names the bad member.

Unknown members are ignored: data has ids, sources and scores of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from tinkex.chat.examples import ChatExample, CompletionExample, PreferenceExample
from tinkex.chat.messages import content_text, is_trained, readable_message
from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Kind = Literal["sft", "preference"]
Example = ChatExample | CompletionExample | PreferenceExample
Messages = tuple[dict[str, Any], ...]

_FORMS: Mapping[Kind, str] = {
    "sft": "messages, or prompt and completion",
    "preference": "prompt, chosen and rejected, or input, preferred_output and "
    "non_preferred_output",
}


def kind_of_object(found: Mapping[str, Any]) -> Kind:
    """The kind of an object, by the names of its members."""
    return "preference" if {"chosen", "rejected", "preferred_output"} & found.keys() else "sft"


def example_of(found: Mapping[str, Any], kind: Kind, line: int) -> Example:
    """The example in an object."""
    form = tuple(name for name in _READERS if name[0] == kind and set(name[1:]) <= found.keys())
    if not form:
        raise InputError(_no_form(found, kind))
    return _READERS[form[0]](found, line)


def _no_form(found: Mapping[str, Any], kind: Kind) -> str:
    names = ", ".join(sorted(found)[:8]) or "nothing"
    text = f"has {names}, but needs {_FORMS[kind]}"
    other: Kind = "sft" if kind == "preference" else "preference"
    if kind_of_object(found) != kind or (kind == "preference" and "messages" in found):
        text += f"; this looks like data for `tinkex train {_COMMANDS[other]}`"
    return text


_COMMANDS: Mapping[Kind, str] = {"sft": "sft", "preference": "dpo"}


def _chat(found: Mapping[str, Any], line: int) -> ChatExample:
    messages = _messages(found["messages"], "messages")
    if not any(is_trained(message, "messages") for message in messages):
        raise InputError("has no message of the assistant's to train", "messages")
    return ChatExample(messages, line, _tools(found))


def _completion(found: Mapping[str, Any], line: int) -> CompletionExample:
    prompt, completion = _text(found, "prompt"), _text(found, "completion")
    if not completion:
        raise InputError("is empty, so there is nothing to train", "completion")
    return CompletionExample(prompt, completion, line)


def _preference(found: Mapping[str, Any], line: int) -> PreferenceExample:
    if isinstance(found["prompt"], str):
        texts = [_text(found, name) for name in ("prompt", "chosen", "rejected")]
        return _pair(texts[0], _filled(texts[1], "chosen"), _filled(texts[2], "rejected"), line)
    answers = [_answer(found[name], name) for name in ("chosen", "rejected")]
    prompt = _messages(found["prompt"], "prompt")
    return _pair(prompt, answers[0], answers[1], line, _tools(found))


def _openai_preference(found: Mapping[str, Any], line: int) -> PreferenceExample:
    given: Any = found["input"]
    if not isinstance(given, dict) or "messages" not in given:
        raise InputError("is an object with messages", "input")
    known = cast("dict[str, Any]", given)
    names = ("preferred_output", "non_preferred_output")
    answers = [_answer(found[name], name) for name in names]
    prompt = _messages(known["messages"], "input.messages")
    return _pair(prompt, answers[0], answers[1], line, _tools(known))


_READERS: Mapping[tuple[str, ...], Callable[[Mapping[str, Any], int], Example]] = {
    ("sft", "messages"): _chat,
    ("sft", "prompt", "completion"): _completion,
    ("preference", "prompt", "chosen", "rejected"): _preference,
    (
        "preference",
        "input",
        "preferred_output",
        "non_preferred_output",
    ): _openai_preference,
}
"""How an object is read: by what it is for, and the members that it must have."""


def _pair(
    prompt: Messages | str,
    chosen: Messages | str,
    rejected: Messages | str,
    line: int,
    tools: tuple[Mapping[str, Any], ...] = (),
) -> PreferenceExample:
    if chosen == rejected:
        raise InputError("the chosen and the rejected answer are the same")
    return PreferenceExample(prompt, chosen, rejected, line, tools)


def _answer(given: object, path: str) -> Messages:
    """An answer to messages: messages, or the text of one."""
    if isinstance(given, str):
        text = _filled(content_text(given, path), path)
        return ({"role": "assistant", "content": text},)
    messages = _messages(given, path)
    if messages[-1]["role"] != "assistant":
        raise InputError("must end with a message of the assistant's", path)
    return messages


def _messages(given: object, path: str) -> Messages:
    if not isinstance(given, list):
        raise InputError(f"must be a list of messages, not {_kind(given)}", path)
    if not given:
        raise InputError("must not be empty", path)
    return tuple(_message(each, f"{path}[{i}]") for i, each in enumerate(cast("list[Any]", given)))


def _message(given: Any, path: str) -> dict[str, Any]:
    message = readable_message(given, path)
    trained = is_trained(message, path)
    if given.get("content") is None and not message.get("tool_calls"):
        raise InputError("is missing", f"{path}.content")
    if trained and not message["content"] and not message.get("tool_calls"):
        raise InputError("is empty, so there is nothing to train", f"{path}.content")
    return message


def _tools(found: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    given: Any = found.get("tools")
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in cast("Any", given)):
        raise InputError("must be a list of objects, one per tool", "tools")
    return tuple(cast("list[dict[str, Any]]", given))


def _text(found: Mapping[str, Any], name: str) -> str:
    given = found[name]
    if not isinstance(given, str):
        raise InputError(f"must be text, not {_kind(given)}", name)
    return content_text(given, name)


def _filled(text: str, path: str) -> str:
    if not text:
        raise InputError("is empty, so there is nothing to train", path)
    return text


def _kind(given: object) -> str:
    if given is None:
        return "null"
    if isinstance(given, bool):
        return "true or false"
    if isinstance(given, str):
        return "text"
    if isinstance(given, list):
        return "a list"
    return "an object" if isinstance(given, dict) else "a number"
