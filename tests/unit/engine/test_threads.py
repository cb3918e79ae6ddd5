"""Little work takes one thread, and the number of threads comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.engine.native.processor import needs_mkl
from tests.unit.engine.training.kit import CONFIG
from tinkex.engine.threads import multiplications, on_threads, threads_for, threads_in_turn

if TYPE_CHECKING:
    from collections.abc import Generator

LITTLE, MUCH = 1000, 2**40


@pytest.fixture(autouse=True)
def as_before() -> Generator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@needs_mkl
@pytest.mark.parametrize(
    ("threads", "work", "inside"), [(2, LITTLE, 1), (2, MUCH, 2), (3, LITTLE, 3)]
)
def test_two_threads_become_one_for_little_work(threads: int, work: int, inside: int) -> None:
    torch.set_num_threads(threads)
    with threads_for(work, 2**20):
        assert torch.get_num_threads() == inside
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("mkl", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_work_runs_on_a_number_of_threads_that_gives_the_same_results(
    threads: int, mkl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    with on_threads(threads):
        assert threads in threads_in_turn()
        assert mkl or threads_in_turn() == (threads,)
        for work in (LITTLE, MUCH):
            with threads_for(work, 2**20):
                assert torch.get_num_threads() in threads_in_turn()
                assert mkl or torch.get_num_threads() == threads


def test_the_number_of_threads_comes_back_after_a_failure() -> None:
    torch.set_num_threads(2)
    with pytest.raises(KeyError), threads_for(LITTLE, 2**20):
        raise KeyError
    assert torch.get_num_threads() == 2


def test_a_token_takes_a_multiplication_for_every_weight_but_those_of_norms() -> None:
    hidden, middle = CONFIG.hidden_size, CONFIG.intermediate_size
    heads, kv_heads = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    block = hidden * (2 * heads + 2 * kv_heads + 3 * middle)
    head = CONFIG.vocab_size * hidden
    assert multiplications(CONFIG) == CONFIG.num_layers * block + head
