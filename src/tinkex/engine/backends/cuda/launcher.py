# pyright: basic
# Triton's compiled kernels and drivers carry no types.
"""Launches of kernels that were launched before, without asking again which binary fits.

Triton works out for every launch how its arguments specialise a kernel; for kernels of a few
microseconds that takes longer than they do. Here the answer is remembered under everything
it can depend on: types, alignment, and the constants.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from triton.runtime import driver


class quick:
    """A kernel, launched as `kernel[grid](*arguments, **constants_and_options)`.

    Arguments are positional and constants follow them in the kernel's own order.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        # Mutable state: binaries, and the constants that their launchers expect.
        self._known: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        kinds = [_kind(arg) for arg in args]
        key = (*kinds, *named.values())
        known = self._known.get(key)
        if known is None:
            self._first(key, grid, args, named)
            return
        kernel, constants = known
        width, height, depth = (*grid, 1, 1)[:3]
        active: Any = driver.active
        stream = active.get_current_stream(active.get_current_device())
        handle, metadata = kernel.function, kernel.packed_metadata
        # No hooks: they are for Triton's own profiler.
        kernel.run(
            width, height, depth, stream, handle, metadata, None, None, None, *args, *constants
        )

    def _first(
        self, key: Any, grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        kernel = self._kernel[grid](*args, **named)
        if hasattr(kernel, "packed_metadata"):  # the interpreter has no binaries
            names = self._kernel.arg_names[len(args) :]
            self._known[key] = kernel, tuple(named[name] for name in names)


def _kind(arg: Any) -> Any:
    """All that a specialisation can depend on."""
    kind = type(arg)
    if kind is int:
        return arg == 1, arg % 16 == 0, arg < 2**31
    if kind is Tensor:
        return arg.dtype, arg.data_ptr() % 16 == 0, arg.get_device()
    return kind
