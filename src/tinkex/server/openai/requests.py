"""What a caller asks for, and what it must not ask for.

A parameter that would change the result and that this server cannot honour is refused by name.
One that changes nothing, such as `user`, is accepted and ignored, and so is any other that is
null or says what happens anyway.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from tinkex.errors import shortened
from tinkex.server.openai.errors import problem

MOST_LOGPROBS = 20
_MOST_STOPS = 64

_HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Parameters that are known and not supported, with the values that ask for nothing."""

_PATH = re.compile(r" - at `\$\.?(.*)`$")

Stop = Annotated[str, Meta(max_length=1024)]
Whole = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Logprobs = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]


class StreamOptions(Struct):
    """How a stream ends."""

    include_usage: bool = False
    include_obfuscation: bool = False


class CommonParameters(Struct, kw_only=True):
    """What both endpoints take."""

    model: str
    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=_MOST_STOPS)] = ""
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings; empty ones ask for nothing."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop
        return [string for string in found if string]

    @property
    def include_usage(self) -> bool:
        """Whether a stream is to end with what it used."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(CommonParameters, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Any
    max_tokens: Whole = 16
    logprobs: Logprobs | None = None
    echo: bool = False


class ChatRequest(CommonParameters, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    logprobs: bool = False
    top_logprobs: Logprobs = 0
    chat_template_kwargs: dict[str, Any] = {}


R = TypeVar("R", bound=CommonParameters)


def read(kind: type[R], body: bytes) -> R:
    """A body as a request; raises a 400 that names the parameter."""
    try:
        raw = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise problem(400, f"The body is not a JSON object: {shortened(str(error))}") from error
    except RecursionError as error:
        raise problem(400, "The body is nested too deeply.") from error
    known = set(kind.__struct_fields__)
    given = {name: value for name, value in raw.items() if value is not None}
    for name in given.keys() - known:
        _check_other(name, given)
    try:
        return msgspec.convert({name: given[name] for name in given.keys() & known}, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error


def _check_other(name: str, given: dict[str, Any]) -> None:
    """Refuse a parameter that is none of the endpoint's own, unless it asks for nothing."""
    value = given[name]
    if name in _HARMLESS or (name == "best_of" and value == given.get("n", 1)):
        return
    if name not in _NEUTRAL:
        raise problem(
            400,
            f"Unknown parameter: '{shortened(name)}'. Leave it out.",
            param=shortened(name),
            code="unknown_parameter",
        )
    if value not in _NEUTRAL[name]:
        raise problem(
            400,
            f"'{name}' is not supported here with this value. Leave it out.",
            param=name,
            code="unsupported_parameter",
        )


def _invalid(text: str) -> Exception:
    path = _PATH.search(text)
    missing = re.search(r"missing required field `(\w+)`", text)
    param = path[1] if path and path[1] else missing[1] if missing else None
    what = shortened(_PATH.sub("", text))
    param = None if param is None else shortened(param)
    return problem(
        400, f"{param}: {what}." if path else f"{what}.", param=param, code="invalid_value"
    )
