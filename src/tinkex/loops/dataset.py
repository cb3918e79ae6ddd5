"""The examples of a run over files: read and checked, some of them held out, then rendered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tinkex.chat.examples import ChatExample, PreferenceExample
from tinkex.data.jsonl import read_examples
from tinkex.errors import InputError
from tinkex.loops.batches import counted, split, total_steps

if TYPE_CHECKING:
    from pathlib import Path

    from tinkex.chat.renderer import Renderer
    from tinkex.data.example_objects import Kind
    from tinkex.loops.settings import OnData

R = TypeVar("R")


class Render(Protocol[R]):
    """`render_all` or `render_pairs`."""

    def __call__(
        self, renderer: Renderer, examples: Any, /, *, max_tokens: int, source: str
    ) -> list[R]: ...


class Source(Generic[R]):
    """Made, it has read its files. Raises DataError for bad ones."""

    def __init__(
        self,
        settings: OnData,
        kind: Kind,
        render: Render[R],
        data: Path,
        eval_data: Path | None,
        *,
        epochs: int,
    ) -> None:
        if eval_data is not None and settings.eval_fraction is not None:
            raise InputError("cannot be combined with a file; give one of them", "eval_fraction")
        self.files = {"data": data} | ({} if eval_data is None else {"eval": eval_data})
        self._render = render
        self._max_tokens = settings.max_tokens
        examples: list[Any] = list(read_examples(data, kind))
        self._train, self._eval = split(examples, settings.eval_fraction, settings.seed)
        if eval_data is not None:
            self._eval = list(read_examples(eval_data, kind))
        self.steps = total_steps(settings, settings.epochs or epochs, len(self._train))
        self.chat = any(map(_has_messages, self._train))
        self.material = counted(len(self._train) + len(self._eval), "example")

    def rendered(self, renderer: Renderer) -> tuple[list[R], list[R]]:
        """What is trained and what is held out; DataError has every line that cannot be."""
        held_out = self.files.get("eval", self.files["data"])
        return (
            self._rendered(renderer, self._train, self.files["data"]),
            self._rendered(renderer, self._eval, held_out),
        )

    def _rendered(self, renderer: Renderer, examples: list[Any], source: Path) -> list[R]:
        return self._render(renderer, examples, max_tokens=self._max_tokens, source=str(source))


def _has_messages(example: Any) -> bool:
    if isinstance(example, PreferenceExample):
        return not isinstance(example.prompt, str)
    return isinstance(example, ChatExample)
