"""Arguments of an uploaded loss's nodes: JSON in, functions of the earlier results out.

An argument is plain JSON, or an object with one member that names its kind. Only the kinds
below are understood, and each becomes a value that is known here; none is looked up by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import torch

from tinkex.engine.training.custom_loss_tables import DTYPES
from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_DEPTH: Final = 8
"""How deep lists, tuples and dicts may be nested in an argument."""

Values = dict[Any, Any]
"""Results of nodes by name; inputs under `("input", name)`."""


def decode_argument(
    value: Any, names: set[str], path: str, depth: int = 0
) -> Callable[[Values], Any]:
    """A function that gives the argument's value from the results so far; `names` are theirs."""
    if depth > MAX_DEPTH:
        raise InputError("is nested too deeply", path)
    if value is None or isinstance(value, bool | float | str):
        return lambda results: value
    if isinstance(value, int):
        if abs(value) >= 2**63:
            raise InputError("the number does not fit into 64 bits", path)
        return lambda results: value
    if isinstance(value, list):
        return _sequence(cast("list[Any]", value), list, names, path, depth)
    if isinstance(value, dict) and len(cast("dict[Any, Any]", value)) == 1:
        ((kind, content),) = cast("dict[str, Any]", value).items()
        return _wrapped(kind, content, names, path, depth)
    raise InputError("expected a JSON value or an object with one member", path)


def _wrapped(
    kind: str, content: Any, names: set[str], path: str, depth: int
) -> Callable[[Values], Any]:
    if kind == "ref":
        if not isinstance(content, str) or content not in names:
            raise InputError(f"refers to {str(content)[:80]!r}, which is no earlier node", path)
        return lambda results: results[content]
    if kind == "tuple" and isinstance(content, list):
        return _sequence(cast("list[Any]", content), tuple, names, path, depth)
    if kind == "slice" and isinstance(content, list) and len(cast("list[Any]", content)) == 3:
        edges = _sequence(cast("list[Any]", content), list, names, path, depth)
        return lambda results: slice(*edges(results))
    constant = _constant(kind, content)
    if constant is _UNKNOWN:
        raise InputError(f"an argument of kind {str(kind)[:80]!r} cannot be read", path)
    return lambda results: constant


_UNKNOWN: Final = object()


def _constant(kind: str, content: Any) -> Any:
    text = content if isinstance(content, str) else ""
    match kind:
        case "ellipsis":
            return ...
        case "float" if text in ("inf", "-inf", "nan"):
            return float(text)
        case "dtype":
            return DTYPES.get(text, _UNKNOWN)
        case "device":
            # Losses are evaluated in one place; a graph cannot choose another.
            return torch.device("cpu")
        case "layout" if text == "strided":
            return torch.strided
        case "memory_format" if text in ("contiguous_format", "preserve_format"):
            return torch.contiguous_format if text == "contiguous_format" else torch.preserve_format
        case _:
            return _UNKNOWN


def _sequence(
    items: list[Any],
    kind: type[list[Any] | tuple[Any, ...]],
    names: set[str],
    path: str,
    depth: int,
) -> Callable[[Values], Any]:
    parts = [decode_argument(item, names, path, depth + 1) for item in items]
    return lambda results: kind(part(results) for part in parts)
