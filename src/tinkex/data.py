"""Training data from files: JSON Lines to examples, and examples to tokens.

One object per line, UTF-8. A byte-order mark, Windows line ends and blank lines are skipped;
everything else that is no object, ambiguous, or not what a loop needs is refused with its line
number. Every bad line is reported at once, before any is used. Unknown members of an object are
ignored: data has ids, sources and scores of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

from tinkex.chat.examples import ChatExample, CompletionExample, PreferenceExample
from tinkex.chat.messages import content_text, is_trained, readable_message
from tinkex.errors import ChatTemplateError, DataError, DataProblem, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tinkex.chat.examples import Rendered
    from tinkex.chat.renderer import Renderer

__all__ = [
    "ChatExample",
    "CompletionExample",
    "PreferenceExample",
    "kind_of",
    "read_examples",
    "render_all",
    "render_pairs",
]

Kind = Literal["sft", "preference"]
Example = ChatExample | CompletionExample | PreferenceExample
Messages = tuple[dict[str, Any], ...]
E = TypeVar("E", bound=Example)
R = TypeVar("R")

MOST_LINE_BYTES = 16 * 2**20
_CHUNK_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_FORMS: Mapping[Kind, str] = {
    "sft": "messages, or prompt and completion",
    "preference": "prompt, chosen and rejected, or input, preferred_output and "
    "non_preferred_output",
}


@overload
def read_examples(
    path: Path | str, kind: Literal["sft"]
) -> list[ChatExample | CompletionExample]: ...
@overload
def read_examples(path: Path | str, kind: Literal["preference"]) -> list[PreferenceExample]: ...
@overload
def read_examples(
    path: Path | str, kind: Kind
) -> list[ChatExample | CompletionExample] | list[PreferenceExample]: ...
def read_examples(path: Path | str, kind: Kind) -> Any:
    """The examples of a file, in order; raises DataError that has every bad line."""
    examples: list[Example] = []
    problems: list[DataProblem] = []
    for line, raw in _lines(Path(path)):
        try:
            examples.append(example_of(_object(raw), kind, line))
        except InputError as error:
            problems.append(DataProblem(line, str(error)))
    if problems:
        raise DataError(str(path), problems)
    if not examples:
        raise _unusable(path, "has no examples; each is one JSON object on a line of its own")
    return examples


def kind_of(path: Path | str) -> Kind:
    """What a file is for, by its first object; `sft` where there is none."""
    for _, raw in _lines(Path(path)):
        try:
            return kind_of_object(_object(raw))
        except InputError:
            continue
    return "sft"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers; a longer one than allowed comes cut."""
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    raw = _without_mark(raw, path)
                if raw.strip():
                    yield number, raw
                while raw and not raw.endswith(b"\n"):  # what is left of too long a line
                    raw = file.readline(_CHUNK_BYTES)
    except IsADirectoryError:
        raise _unusable(path, "is a folder; name a file of JSON Lines in it") from None
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror or error}") from error


def _without_mark(raw: bytes, path: Path) -> bytes:
    if raw.startswith(_UTF_16):
        raise _unusable(path, "is UTF-16; save it as UTF-8")
    text = raw.removeprefix(_BOM)
    if text.lstrip()[:1] == b"[":
        raise _unusable(path, "is a JSON array; write one object per line, as `jq -c '.[]'` does")
    if text.strip() == b"{":
        raise _unusable(path, "has objects over several lines; write each on one, as `jq -c` does")
    return text


def _unusable(path: Path | str, reason: str) -> DataError:
    return DataError(str(path), [DataProblem(0, reason)])


def _object(raw: bytes) -> dict[str, Any]:
    if len(raw) > MOST_LINE_BYTES:
        raise InputError(f"is longer than {MOST_LINE_BYTES // 2**20} MiB")
    try:
        found: Any = json.loads(
            raw.rstrip().decode(), object_pairs_hook=_unambiguous, parse_constant=_no_number
        )
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 at byte {error.start + 1}; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise InputError(f"is no JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise InputError("is nested too deeply") from None
    except InputError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"is no JSON that can be read: {error}") from None
    if not isinstance(found, dict):
        raise InputError("is JSON, but not an object in braces")
    return cast("dict[str, Any]", found)


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"has {twice!r} twice in one object")
    return found


def _no_number(name: str) -> Any:
    raise InputError(f"has {name}, which is no JSON value")


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


def render_all(
    renderer: Renderer,
    examples: Sequence[ChatExample | CompletionExample],
    *,
    max_tokens: int,
    source: str = "the data",
) -> list[Rendered]:
    """Every example as tokens; raises DataError that has every one that cannot be trained.

    `max_tokens` is the most an example may have; nothing is ever cut off.
    """

    def render(example: ChatExample | CompletionExample) -> Rendered:
        return _fitting(renderer.example(example), max_tokens)

    return _each(examples, render, source)


def render_pairs(
    renderer: Renderer,
    pairs: Sequence[PreferenceExample],
    *,
    max_tokens: int,
    source: str = "the data",
) -> list[tuple[Rendered, Rendered]]:
    """Every pair as tokens, the chosen answer first; raises as `render_all` does."""

    def render(pair: PreferenceExample) -> tuple[Rendered, Rendered]:
        chosen, rejected = renderer.pair(pair)
        return _fitting(chosen, max_tokens), _fitting(rejected, max_tokens)

    return _each(pairs, render, source)


def _each(examples: Sequence[E], render: Callable[[E], R], source: str) -> list[R]:
    done: list[R] = []
    problems: list[DataProblem] = []
    for number, example in enumerate(examples, 1):
        try:
            done.append(render(example))
        except (InputError, ChatTemplateError) as error:
            problems.append(DataProblem(example.line or number, str(error)))
    if problems:
        raise DataError(source, problems)
    return done


def _fitting(rendered: Rendered, max_tokens: int) -> Rendered:
    count = len(rendered.tokens)
    if count > max_tokens:
        raise InputError(
            f"has {count} tokens, more than {max_tokens}; shorten or split it, or allow more with "
            "max_tokens (--max-tokens)"
        )
    return rendered
