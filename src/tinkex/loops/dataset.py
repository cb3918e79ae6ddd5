"""Training data from files: read and checked, some examples held out, then rendered to tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from tinkex.chat.examples import ChatExample, PreferenceExample
from tinkex.data import read_examples
from tinkex.errors import InputError
from tinkex.loops.schedule import held_out, steps_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tinkex.chat.renderer import Renderer
    from tinkex.data import Kind
    from tinkex.loops.run_settings import OnData, Settings

R = TypeVar("R")
S = TypeVar("S", bound="OnData")
T = TypeVar("T")


class FileJob(Generic[S, R]):
    """Examples to train on. The constructor reads the files and raises DataError for bad ones."""

    kind: ClassVar[Kind]
    epochs: ClassVar[int]
    render: ClassVar[Callable[..., list[Any]]]
    """`render_all` or `render_pairs`."""

    def __init__(self, settings: S, data: Path, eval_data: Path | None = None) -> None:
        if eval_data is not None and settings.eval_fraction is not None:
            raise InputError("cannot be combined with a file; give one of them", "eval_fraction")
        self.settings = settings
        self.files = {"data": data} | ({} if eval_data is None else {"eval": eval_data})
        examples: list[Any] = list(read_examples(data, self.kind))
        self._train, self._held_out = split(examples, settings.eval_fraction, settings.seed)
        if eval_data is not None:
            self._held_out = list(read_examples(eval_data, self.kind))
        self.steps = total_steps(settings, settings.epochs or self.epochs, len(self._train))
        self.chat = any(map(_has_messages, self._train))
        self.material = counted(len(self._train) + len(self._held_out), "example")

    def rendered(self, renderer: Renderer) -> tuple[list[R], list[R]]:
        """The training and the held-out examples as tokens.

        Raises DataError with every line that cannot be rendered.
        """
        return (
            self._rendered(renderer, self._train, self.files["data"]),
            self._rendered(renderer, self._held_out, self.files.get("eval", self.files["data"])),
        )

    def _rendered(self, renderer: Renderer, examples: list[Any], source: Path) -> list[R]:
        render, most = type(self).render, self.settings.max_tokens
        return render(renderer, examples, max_tokens=most, source=str(source))


def _has_messages(example: Any) -> bool:
    if isinstance(example, PreferenceExample):
        return not isinstance(example.prompt, str)
    return isinstance(example, ChatExample)


def split(examples: list[T], fraction: float | None, seed: int) -> tuple[list[T], list[T]]:
    """The training examples and the held-out ones."""
    if fraction is None:
        return examples, []
    if len(examples) < 2:
        raise InputError("needs at least two examples, one of them to train on", "eval_fraction")
    out = held_out(len(examples), fraction, seed)
    return (
        [one for number, one in enumerate(examples) if number not in out],
        [one for number, one in enumerate(examples) if number in out],
    )


def total_steps(settings: Settings, epochs: int, examples: int) -> int:
    """The number of steps of the run."""
    total = settings.steps or steps_of(epochs, settings.batch_size, examples)
    if settings.warmup >= total:
        raise InputError(f"must be fewer than the {total} steps of the run", "warmup")
    return total


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 example", "1,200 examples"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
