"""Run code written for the official package `tinker` on tinkex, with no line changed.

`install()` makes `import tinker`, the submodules that user code imports, and
`importlib.metadata.version("tinker")` resolve to tinkex in this process;
`python -m tinkex.dropin script.py …` does the same for a script. It is an import hook: modules
named `tinker…` are made on demand, and their attributes come from tinkex.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex._version import PROTOCOL_VERSION
from tinkex.dropin import names
from tinkex.errors import TinkerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

__all__ = ["install", "installed", "uninstall"]

# Child processes that start afresh inherit `sys.path` but no import hook. This folder holds
# a `tinker` that installs the hook, so that they too find tinkex under that name.
CHILD_PATH = str(Path(__file__).parent / "path")
_ANY_DISTRIBUTION = importlib.metadata.DistributionFinder.Context()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and fills the modules of `names.MODULES`; holds no state of its own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in names.ABSENT:
            message = f"tinkex has no counterpart of {fullname}: {names.ABSENT[fullname]}"
            raise ModuleNotFoundError(message, name=fullname)
        if fullname not in names.MODULES:
            return None
        is_package = fullname in names.PACKAGES
        return importlib.util.spec_from_loader(
            fullname, self, origin="tinkex", is_package=is_package
        )

    def exec_module(self, module: ModuleType) -> None:
        fullname = module.__name__

        def lookup(name: str) -> Any:
            value = _lookup(fullname, name)
            # Remembered, so that only the first access pays for the search.
            setattr(module, name, value)
            return value

        module.__dict__["__getattr__"] = lookup
        module.__dict__["__dir__"] = lambda: sorted({*vars(module), *_known_names(fullname)})
        if fullname == names.OFFICIAL_NAME:
            module.__dict__["__all__"] = list(names.ALL)
        if fullname in (names.OFFICIAL_NAME, "tinker._version"):
            module.__dict__["__version__"] = PROTOCOL_VERSION
            module.__dict__["__title__"] = names.OFFICIAL_NAME

    def get_code(self, fullname: str) -> CodeType | None:
        """What `python -m` runs; other modules are filled without code."""
        program = names.PROGRAMS.get(fullname)
        spec = importlib.util.find_spec(program) if program is not None else None
        if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
            return None
        return spec.loader.get_code(spec.name)

    def find_distributions(
        self,
        context: importlib.metadata.DistributionFinder.Context = _ANY_DISTRIBUTION,
    ) -> Iterable[importlib.metadata.Distribution]:
        if context.name in (None, names.OFFICIAL_NAME):
            yield _Distribution()


class _Distribution(importlib.metadata.Distribution):
    """The metadata of the official package, for `importlib.metadata`."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return (
            f"Metadata-Version: 2.1\nName: {names.OFFICIAL_NAME}\n"
            f"Version: {PROTOCOL_VERSION}\nSummary: tinkex under the name of tinker\n"
        )

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


def _lookup(fullname: str, name: str) -> Any:
    submodule = f"{fullname}.{name}"
    if submodule in names.MODULES:
        return importlib.import_module(submodule)
    for source in names.MODULES[fullname]:
        if isinstance(source, str):
            found = getattr(importlib.import_module(source), name, _MISSING)
        elif name in source:
            module, _, attribute = source[name].partition(":")
            found = getattr(importlib.import_module(module), attribute)
        else:
            continue
        # A private name is an implementation detail of tinkex, not the official one.
        if found is not _MISSING and not name.startswith("_"):
            return found
    raise AttributeError(f"module {fullname!r} (provided by tinkex) has no attribute {name!r}")


_MISSING = object()


def _known_names(fullname: str) -> Iterator[str]:
    prefix = f"{fullname}."
    for module in names.MODULES:
        if module.startswith(prefix) and "." not in module[len(prefix) :]:
            yield module[len(prefix) :]
    for source in names.MODULES[fullname]:
        if isinstance(source, str):
            module = importlib.import_module(source)
            yield from getattr(module, "__all__", ())
        else:
            yield from source


def _is_ours(module: ModuleType) -> bool:
    return isinstance(getattr(module, "__loader__", None), Finder)


def _loaded() -> dict[str, ModuleType]:
    prefix = f"{names.OFFICIAL_NAME}."
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name == names.OFFICIAL_NAME or name.startswith(prefix)
    }


def installed() -> bool:
    """Whether `import tinker` gives tinkex in this process."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)


def install() -> None:
    """Make `import tinker`, its submodules and its version resolve to tinkex in this process.

    Processes started by `multiprocessing` inherit it. Installing twice does nothing more.
    Raises `TinkerError` when the official package is already imported, because objects of
    the two could then meet.
    """
    if installed():
        return
    foreign = [name for name, module in _loaded().items() if not _is_ours(module)]
    if foreign:
        where = getattr(sys.modules[foreign[0]], "__file__", None) or "an unknown place"
        raise TinkerError(
            f"the official package is already imported ({foreign[0]} from {where}): call "
            "tinkex.dropin.install() before anything imports tinker, or start the program "
            "with python -m tinkex.dropin"
        )
    sys.meta_path.insert(0, Finder())
    if CHILD_PATH not in sys.path:
        # Behind the script's own folder, before everything installed.
        sys.path.insert(1, CHILD_PATH)
    importlib.invalidate_caches()


def uninstall() -> None:
    """Undo `install()`: later imports of `tinker` find the official package, or nothing."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    sys.path[:] = [entry for entry in sys.path if entry != CHILD_PATH]
    for name, module in _loaded().items():
        if _is_ours(module):
            del sys.modules[name]
    importlib.invalidate_caches()
