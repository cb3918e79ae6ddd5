"""The code in memory, run on torch's own threads, which are awake already.

Its OpenMP library is asked to call the code on each of them.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tinkex.config import cpu_isa
from tinkex.engine.native import optimizer_code, passing_code, product_code
from tinkex.engine.native.kernels import DECLARED, kernels

if TYPE_CHECKING:
    from collections.abc import Callable

_MACHINES: Final = ("x86_64", "AMD64")
_NEEDED: Final = "avx512f"
_OPENMP: Final = ("libgomp", "libiomp5", "libomp")
_CALLED: Final = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
_STARTS: Final = "GOMP_parallel"


class Library:
    """The functions, by their names."""

    def __init__(self, engine: Any, openmp: ctypes.CDLL) -> None:
        self._engine = engine  # the memory is the code's as long as it lives
        self._parallel = getattr(openmp, _STARTS)
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None

    def function(self, name: str) -> Callable[[bytes, int], None]:
        """Takes arguments, eight bytes each, and on how many threads it shall run."""
        parallel, address = self._parallel, self._engine.get_function_address(name)
        return lambda arguments, threads: parallel(address, arguments, threads, 0)


@cache
def library() -> Library | None:
    """None where something is missing: llvmlite, OpenMP, or a processor with AVX-512."""
    if cpu_isa() != "avx512" or platform.machine() not in _MACHINES:
        return None
    openmp = _openmp()
    if openmp is None or find_spec("llvmlite") is None:
        return None
    llvm: Any = import_module("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    if not features.get(_NEEDED):
        return None
    for name in _CALLED:
        llvm.add_symbol(name, ctypes.cast(getattr(openmp, name), ctypes.c_void_p).value)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3
    )
    text = "\n".join(
        (DECLARED, kernels(), product_code.code(), passing_code.code(), optimizer_code.code())
    )
    module = llvm.parse_assembly(text)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return Library(engine, openmp)


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch has loaded."""
    if not sys.platform.startswith("linux"):
        return None
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split()[-1] for line in maps if "/" in line}
    # Another package may have brought one, too.
    for path in sorted(loaded, key=lambda path: "torch" not in path):
        if Path(path).name.startswith(_OPENMP):
            found = ctypes.CDLL(path)
            if all(hasattr(found, name) for name in (*_CALLED, _STARTS)):
                return found
    return None
