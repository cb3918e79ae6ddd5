"""Messages to text, by the template that a model brings.

Templates are Jinja as Hugging Face writes it. They come with a model's files, so they run in a
sandbox with limits on time and size: a bad one is an error and never blocks. Needs only jinja2.
"""

from __future__ import annotations

import json
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from tinkex.errors import ChatTemplateError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2.parser import Parser

    from tinkex.clock import Clock

_MOST_CHARACTERS = 16_000_000
_MOST_S = 5.0
_MOST_TURNS = 100_000
# What a template can run into with messages that it was not written for.
_RAISED = (
    jinja2.TemplateError,
    ArithmeticError,
    LookupError,
    NameError,  # jinja2 writes 1e999 as `inf`
    RecursionError,
    TypeError,
    ValueError,
)
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is only text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's template; made once, used for every chat.

    A template that cannot be read raises when it is used, so that its model can be used without.
    """

    def __init__(self, source: str, bos_token: str | None, eos_token: str | None) -> None:
        self.source = source
        self._markers = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._template: jinja2.Template | None = None
        self._broken = ""
        try:
            self._template = _sandbox().from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            self._broken = str(error)  # the last two: nested too deeply

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        clock: Clock,
        options: Mapping[str, Any] = _NO_OPTIONS,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation; `add_generation_prompt` adds the beginning of an answer.

        `options` are variables of this template's own. Raises ChatTemplateError with what the
        template says, and InputError for options that are not the caller's to set.
        """
        if self._template is None:
            raise ChatTemplateError(f"this model's chat template is broken: {self._broken}")
        own = {
            **self._markers,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "raise_exception": _raise_exception,
            "range": _Ranges().range,
            "strftime_now": _strftime(clock),
        }
        taken = sorted(own.keys() & options.keys())
        if taken:
            raise InputError(f"{', '.join(taken)} cannot be set", "options")
        try:
            return _within_bounds(self._template, {**options, **own}, clock)
        except _RAISED as error:
            reason = f"this model's chat template refuses these messages: {error}"
            raise ChatTemplateError(reason) from error


def _sandbox() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    sandbox.filters["tojson"] = _tojson
    return sandbox


class _Ranges:
    """Counts how often the loops of one rendering go round, nested ones too."""

    def __init__(self) -> None:
        self._left = _MOST_TURNS

    def range(self, *bounds: int) -> range:
        found = range(*bounds)
        self._left -= len(found)
        if self._left < 0:
            raise jinja2.TemplateError(f"its loops go round more than {_MOST_TURNS} times")
        return found


def _within_bounds(template: jinja2.Template, variables: dict[str, Any], clock: Clock) -> str:
    # Looked at between the pieces that a template writes; loops that write nothing are bounded
    # by `_Ranges`, and by the number of messages.
    parts: list[str] = []
    size, until = 0, clock.now() + _MOST_S
    for part in template.generate(variables):
        parts.append(part)
        size += len(part)
        if size > _MOST_CHARACTERS or clock.now() > until:
            raise jinja2.TemplateError("the prompt gets too long")
    return "".join(parts)


def _tojson(value: Any, **options: Any) -> str:
    """Jinja's own escapes characters that mean something in HTML."""
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime(clock: Clock) -> Callable[[str], str]:
    return lambda form: datetime.fromtimestamp(clock.wall()).astimezone().strftime(form)
