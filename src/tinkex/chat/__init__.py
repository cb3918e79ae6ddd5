"""Conversations as tokens: a model's own chat template, and which tokens are trained.

Names are loaded when they are first used: a server needs the template and none of the clients.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in the package itself: nothing is imported that is not used
if TYPE_CHECKING:
    from tinkex.chat.examples import ChatExample, CompletionExample, PreferenceExample
    from tinkex.chat.rendered import Rendered
    from tinkex.chat.renderer import Renderer
    from tinkex.chat.tokenizers import tokenizer_for, tokenizer_for_async

_HOMES = {
    "ChatExample": "examples",
    "CompletionExample": "examples",
    "PreferenceExample": "examples",
    "Rendered": "rendered",
    "Renderer": "renderer",
    "tokenizer_for": "tokenizers",
    "tokenizer_for_async": "tokenizers",
}

__all__ = [
    "ChatExample",
    "CompletionExample",
    "PreferenceExample",
    "Rendered",
    "Renderer",
    "tokenizer_for",
    "tokenizer_for_async",
]


if not TYPE_CHECKING:  # a module __getattr__ would make checkers accept any name

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'tinkex.chat' has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(f"tinkex.chat.{home}"), name)


def __dir__() -> list[str]:
    return __all__
