"""Half of a pass on each of two threads: the same answers in the same order, all or none."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.patience import PATIENCE_S
from tests.unit.engine.test_threads import needs_mkl
from tinkex.engine.abreast import compute_abreast

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True)
class Piece:
    number: int
    tokens: int
    weights: Any = field(default_factory=lambda: SimpleNamespace(flat_P=torch.zeros(1)))


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2, "the number of threads was not put back"
    torch.set_num_threads(before)


class Recorder:
    """Answers with the numbers; notes who asked for how much, and with how many threads."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[int, int]] = {}

    def __call__(self, parts: Sequence[Piece]) -> list[int]:
        tokens = sum(part.tokens for part in parts)
        self.calls[threading.get_ident()] = tokens, torch.get_num_threads()
        return [part.number for part in parts]


def _pieces(*tokens: int) -> list[Piece]:
    return [Piece(number, count) for number, count in enumerate(tokens)]


@needs_mkl
@pytest.mark.parametrize("tokens", [(5, 5), (1, 9, 4, 4), (64,) * 8, (7, 3, 2, 2, 1, 1)])
def test_two_threads_share_the_tokens_and_answers_keep_their_order(tokens: tuple[int, ...]) -> None:
    recorder = Recorder()
    assert compute_abreast(_pieces(*tokens), recorder) == list(range(len(tokens)))
    (first, one), (second, other) = recorder.calls.values()
    assert (one, other) == (1, 1)
    assert first + second == sum(tokens)
    assert max(first, second) <= 0.55 * sum(tokens)


@pytest.mark.parametrize("tokens", [(5,), (9, 1), (100, 40, 30)])
def test_what_cannot_be_shared_evenly_stays_together(tokens: tuple[int, ...]) -> None:
    recorder = Recorder()
    assert compute_abreast(_pieces(*tokens), recorder) == list(range(len(tokens)))
    assert recorder.calls == {threading.get_ident(): (sum(tokens), 2)}


@pytest.mark.parametrize("threads", [1, 3])
def test_with_other_numbers_of_threads_nothing_is_shared(threads: int) -> None:
    torch.set_num_threads(threads)
    recorder = Recorder()
    compute_abreast(_pieces(5, 5), recorder)
    assert recorder.calls == {threading.get_ident(): (10, threads)}
    torch.set_num_threads(2)


def test_without_mkl_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    recorder = Recorder()
    compute_abreast(_pieces(5, 5), recorder)
    assert recorder.calls == {threading.get_ident(): (10, 2)}


@needs_mkl
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_either_half_is_raised_when_both_have_ended(failing: int) -> None:
    ended: list[int] = []
    both = threading.Barrier(2)

    def compute(parts: Sequence[Piece]) -> list[int]:
        both.wait(PATIENCE_S)
        if parts[0].number == failing:
            raise MemoryError("no room")
        ended.append(parts[0].number)
        return [part.number for part in parts]

    with pytest.raises(MemoryError, match="no room"):
        compute_abreast(_pieces(5, 5), compute)
    assert ended == [1 - failing]
