"""Products with a frozen float32 weight, on as many threads as torch computes with.

The code runs on torch's own threads, which are awake already: its OpenMP library is asked to call
it on each of them.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch

from tinkex.engine.native import code

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_NEEDED: Final = "avx512f"
_OPENMP: Final = ("libgomp", "libiomp5", "libomp")
_Arguments: Final = ctypes.c_int64 * len(code.ARGUMENTS)


class _Code(NamedTuple):
    """Code in memory, and what runs it on several threads."""

    parallel: Callable[[int, int, int, int], object]
    """Takes where the code is, where its arguments are, and on how many threads; then nothing."""
    address: int
    owner: object
    """The memory is the code's as long as it lives."""


class NativeProduct:
    """`x @ W.T` for a copy of a weight in the order in which it is read."""

    row_step = 1

    def __init__(self, weight_OI: Tensor, found: _Code) -> None:
        self._outputs, self._inputs = weight_OI.shape
        self._slab_size = code.slab_size(self._inputs)
        self._weight = _in_slabs(weight_OI, self._slab_size)
        self._code = found

    @classmethod
    def of(cls, weight_OI: Tensor) -> Self | None:
        """The product with a float32 weight on the CPU; None where there is no code for it."""
        if any(size % code.LANES for size in weight_OI.shape):
            return None
        found = _compiled()
        return None if found is None else cls(weight_OI, found)

    def __call__(self, x_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """The product in fresh memory or in `out`."""
        x_TI = x_TI.contiguous()
        y_TO = x_TI.new_empty(len(x_TI), self._outputs) if out is None else out
        self.bound(x_TI, y_TO)()
        return y_TO

    def bound(self, x_TI: Tensor, y_TO: Tensor) -> Callable[[], None]:
        """What writes the product with whatever is in `x` to `y` when it is called."""
        rows, threads = len(x_TI), torch.get_num_threads()
        for tensor, width in ((x_TI, self._inputs), (y_TO, self._outputs)):
            assert tensor.dtype == torch.float32
            assert tensor.shape == (rows, width)
            assert tensor.is_contiguous()
        room_size = code.room_size(rows, self._inputs)
        rooms = torch.empty(threads * room_size)
        tensors = x_TI, self._weight, y_TO, rooms
        blocks = self._outputs // code.LANES
        counts = rows, self._inputs, blocks, self._slab_size, room_size
        arguments = _Arguments(*(tensor.data_ptr() for tensor in tensors), *counts)
        (parallel, address, _), at = self._code, ctypes.addressof(arguments)

        def product(_kept: object = (tensors, arguments)) -> None:
            parallel(address, at, min(threads, torch.get_num_threads()), 0)

        return product


def _in_slabs(weight_OI: Tensor, size: int) -> Tensor:
    """All numbers in the order in which they are read."""
    found = torch.empty(weight_OI.numel())
    outputs, inputs = weight_OI.shape
    for first in range(0, inputs, size):
        slab_OS = weight_OI[:, first : first + size]
        blocks = slab_OS.reshape(-1, code.LANES, slab_OS.shape[1]).transpose(1, 2)
        start = first * outputs
        found[start : start + slab_OS.numel()].view(blocks.shape).copy_(blocks)
    return found


@cache
def _compiled() -> _Code | None:
    """None where something is missing: the library, the processor's vectors, or OpenMP."""
    openmp = _openmp()
    if openmp is None or find_spec("llvmlite") is None:
        return None
    llvm: Any = import_module("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    if not features.get(_NEEDED):
        return None
    for name in code.CALLED:
        llvm.add_symbol(name, ctypes.cast(getattr(openmp, name), ctypes.c_void_p).value)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3
    )
    module = llvm.parse_assembly(code.text())
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    parallel = openmp.GOMP_parallel
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return _Code(parallel, engine.get_function_address(code.ENTRY), engine)


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch has loaded."""
    if not sys.platform.startswith("linux"):
        return None
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split()[-1] for line in maps if "/" in line}
    # Another package may have brought one, too.
    for path in sorted(loaded, key=lambda path: "torch" not in path):
        if Path(path).name.startswith(_OPENMP):
            library = ctypes.CDLL(path)
            if all(hasattr(library, name) for name in (*code.CALLED, "GOMP_parallel")):
                return library
    return None
