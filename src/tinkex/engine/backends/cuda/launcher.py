# pyright: basic
# Triton's compiled kernels and drivers carry no types.
"""A cache of compiled Triton kernels, which makes repeated launches faster.

For every launch Triton computes how its arguments specialise a kernel; for kernels of a few
microseconds that takes longer than the kernel. Here the binary is cached by everything that the
specialisation can depend on: types, alignment, and the constants.

A cached launch uses undocumented attributes of Triton. Where they are missing, or such a launch is
refused, every launch goes through Triton's public `kernel[grid](...)`.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from torch import Tensor
from triton.runtime import driver

_log = logging.getLogger(__name__)


class fast_launch:
    """A kernel, launched as `kernel[grid](*arguments, **constants_and_options)`.

    Arguments are positional and constants follow them in the kernel's own order.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        # Mutable state: binaries with the constants that their launchers expect, and whether
        # launching them directly works with this version of Triton.
        self._known: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
        self._direct = True

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        if not self._direct:
            self._kernel[grid](*args, **named)
            return
        key = (*(_kind(arg) for arg in args), *named.values())
        known = self._known.get(key)
        if known is None:
            self._first(key, grid, args, named)
            return
        try:
            _launch_binary(*known, grid, args)
        except (AttributeError, TypeError) as error:
            # Raised before the kernel started: the signature of the launch differs.
            self._direct = False
            _log.info(
                "cached launches are not used with this version of Triton: %s",
                error,
            )
            self._kernel[grid](*args, **named)

    def _first(
        self, key: Any, grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        binary = self._kernel[grid](*args, **named)
        try:
            names = self._kernel.arg_names[len(args) :]
            # The interpreter has no binaries, and other versions may not have these attributes.
            _ = binary.packed_metadata, binary.function, binary.run
        except AttributeError:
            self._direct = False
            return
        self._known[key] = binary, tuple(named[name] for name in names)


def _launch_binary(
    binary: Any, constants: tuple[Any, ...], grid: tuple[int, ...], args: tuple[Any, ...]
) -> None:
    width, height, depth = (*grid, 1, 1)[:3]
    active: Any = driver.active
    stream = active.get_current_stream(active.get_current_device())
    handle, metadata = binary.function, binary.packed_metadata
    # No hooks: they are for Triton's own profiler.
    binary.run(width, height, depth, stream, handle, metadata, None, None, None, *args, *constants)


def _kind(arg: Any) -> Any:
    """Everything that a specialisation can depend on."""
    kind = type(arg)
    if kind is int:
        return arg == 1, arg % 16 == 0, arg < 2**31
    if kind is Tensor:
        return arg.dtype, arg.data_ptr() % 16 == 0, arg.get_device()
    return kind
