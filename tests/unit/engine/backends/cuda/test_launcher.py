"""Remembered launches, and Triton's own where they do not work. No device: kernels are doubles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tinkex.engine.backends.cuda import launcher
from tinkex.engine.backends.cuda.launcher import fast_launch


class Kernel:
    """What `triton.jit` returns, as far as the launcher uses it."""

    arg_names = ("x", "rows", "WIDTH")

    def __init__(self, binary: Any) -> None:
        self.binary = binary
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **named: Any) -> Any:
            self.launches.append((grid, args, named))
            return self.binary

        return launch


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _device: 7)
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=active))


def binary(run: Any) -> SimpleNamespace:
    return SimpleNamespace(packed_metadata="metadata", function="function", run=run)


def test_a_launch_like_an_earlier_one_goes_to_its_binary(driver: None) -> None:
    runs: list[tuple[Any, ...]] = []
    kernel = Kernel(binary(lambda *given: runs.append(given)))
    launch = fast_launch(kernel)
    for rows in (3, 5):
        launch[(4,)](0.5, rows, WIDTH=8, num_warps=4)
    assert [args for _, args, _ in kernel.launches] == [(0.5, 3)]
    # After the grid come the stream, the binary, its metadata, no hooks, arguments and constants.
    assert runs == [(4, 1, 1, 7, "function", "metadata", None, None, None, 0.5, 5, 8)]


def test_arguments_that_specialise_otherwise_go_to_triton(driver: None) -> None:
    kernel = Kernel(binary(lambda *given: None))
    launch = fast_launch(kernel)
    for rows in (3, 16, 1):
        launch[(4,)](0.5, rows, WIDTH=8)
    launch[(4,)](0.5, 3, WIDTH=16)
    assert len(kernel.launches) == 4


def test_a_triton_without_these_attributes_launches_everything_itself(driver: None) -> None:
    kernel = Kernel(SimpleNamespace(asm={}))
    launch = fast_launch(kernel)
    for _ in range(3):
        launch[(2, 3)](0.5, 7, WIDTH=8)
    assert kernel.launches == [((2, 3), (0.5, 7), {"WIDTH": 8})] * 3


@pytest.mark.parametrize("error", [TypeError("13 arguments"), AttributeError("run")])
def test_a_refused_launch_is_repeated_by_triton_and_not_tried_again(
    driver: None, error: Exception
) -> None:
    tries: list[int] = []

    def refuse(*given: Any) -> None:
        tries.append(1)
        raise error

    kernel = Kernel(binary(refuse))
    launch = fast_launch(kernel)
    for _ in range(4):
        launch[(2,)](0.5, 7, WIDTH=8)
    assert len(kernel.launches) == 4
    assert len(tries) == 1
