"""Tokens as text that shows which of them are trained: in colour, or in [[brackets]]."""

from __future__ import annotations

import sys
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinkex.chat.examples import Rendered
    from tinkex.tokenizers import Tokenizer

_TRAINED, _CONTEXT = "bold green", "dim"


class Page:
    """Standard output, with colours where there is a terminal that shows them."""

    def __init__(self) -> None:
        self._console = _colour_console()

    def heading(self, text: str) -> None:
        """A line above an example."""
        if self._console is None:
            print(f"--- {text}")
        else:
            self._console.print(f"--- {text}", style="cyan", soft_wrap=True)

    def example(self, rendered: Rendered, tokenizer: Tokenizer) -> None:
        """One example, its text as it is but for characters that would steer a terminal."""
        runs = _runs(rendered, tokenizer)
        if self._console is None:
            print("".join(f"[[{text}]]" if trained else text for text, trained in runs))
            return
        from rich.text import Text

        pieces = [(text, _TRAINED if trained else _CONTEXT) for text, trained in runs]
        self._console.print(Text.assemble(*pieces), soft_wrap=True)

    def line(self, text: str = "") -> None:
        """A line of ours."""
        print(text)


def pieces(rendered: Rendered, tokenizer: Tokenizer) -> list[str]:
    """The text of each token by itself; part of a character is U+FFFD."""
    return [tokenizer.decode([token]) for token in rendered.tokens]


def _runs(rendered: Rendered, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    pairs = zip(rendered.tokens, rendered.weights, strict=True)
    for trained, run in groupby(pairs, lambda pair: bool(pair[1])):
        yield _safe(tokenizer.decode([token for token, _ in run])), trained


def _safe(text: str) -> str:
    return "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def _colour_console() -> Any:
    """A console that shows colours, or None: no terminal, NO_COLOR, or no rich."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(emoji=False, markup=False, highlight=False)
    return None if console.no_color or console.color_system is None else console
