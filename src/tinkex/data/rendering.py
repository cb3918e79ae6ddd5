"""Examples as tokens; every example that cannot be rendered is reported with its line."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tinkex.errors import ChatTemplateError, DataError, DataProblem, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.chat.examples import ChatExample, CompletionExample, PreferenceExample, Rendered
    from tinkex.chat.renderer import Renderer

E = TypeVar("E", bound="ChatExample | CompletionExample | PreferenceExample")
R = TypeVar("R")


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
