"""Public names that are imported when they are first used.

A package lists its public names once, as imports in its `__init__.pyi`. Type checkers and editors
read that file as any other stub; the package's `__getattr__` reads it to find a name's module:

    __getattr__, __dir__ = import_lazily(__name__)
"""

from __future__ import annotations

# Type checkers take this for true. Importing typing would cost more than all of `import tinkex`.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable


def import_lazily(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package with an `__init__.pyi`."""
    homes: dict[str, str] = {}

    def public_names() -> list[str]:
        if not homes:
            homes.update(_read_stub(package))
        return list(homes)

    def load(name: str) -> object:
        if name == "__all__":
            return public_names()
        if name not in public_names():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        import importlib

        home = homes[name]
        if home == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(home), name)
        # `__getattr__` is only called for names that the package does not have.
        setattr(importlib.import_module(package), name, value)
        return value

    return load, public_names


def _read_stub(package: str) -> dict[str, str]:
    """The names that a package's stub declares, each with the module that defines it."""
    import ast
    import pkgutil

    homes: dict[str, str] = {}
    for node in ast.parse(pkgutil.get_data(package, "__init__.pyi") or b"").body:
        if isinstance(node, ast.ImportFrom):
            homes.update({alias.name: node.module or package for alias in node.names})
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            homes[node.target.id] = package
    return homes
