"""Graphs of calls that exist, chosen by bytes: what a client that knows the tables could send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tinkex.engine.training.custom_loss import compile_loss
from tinkex.engine.training.custom_loss_tables import (
    ATTRIBUTES,
    FUNCTIONS,
    MATH,
    METHODS,
    OPERATORS,
)
from tinkex.errors import InputError
from tinkex.types import CustomLossGraph, CustomLossInput, CustomLossNode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_CALLS = [("call_method", name) for name in sorted(METHODS)]
_CALLS += [("call_function", name) for name in sorted({**FUNCTIONS, **OPERATORS, **MATH})]
_CALLS += [("call_function", "getattr")]
_NUMBERS = [0, 1, -1, 2, 3, 7, -7, 64, 2**31, 2**62, -(2**63) + 1, 0.5, -1.5, 1e30, True, None]
_WORDS = ["mean", "none", "sum", "floor", "trunc", "fro", "nuc", *sorted(ATTRIBUTES)]
_OPTIONS = ["dim", "keepdim", "n", "p", "rounding_mode", "dtype", "other", "reduction", "inplace"]
_DTYPES = ["float32", "float64", "int32", "int64", "bool", "uint8", "float16", "bfloat16"]
_MOST_BYTES = 150
_INPUTS = [
    CustomLossInput(name="logprobs", rank=1),
    CustomLossInput(name="whole", rank=1),
    CustomLossInput(name="rows", rank=2),
    CustomLossInput(name="one", rank=0),
]


def grow(data: bytes) -> int:
    """Add call after call as the bytes say, keeping those that work; says how many did.

    One bad call ends a graph, so without the sorting out hardly any would get past the first.
    """
    source = iter(data[:_MOST_BYTES])
    names = ["p", "whole", "rows", "one"]
    nodes = [
        CustomLossNode(op="placeholder", name=name, target=declared.name)
        for name, declared in zip(names, _INPUTS, strict=True)
    ]
    for first in source:
        node = _call(first, source, names)
        try:
            run(_INPUTS, _finished([*nodes, node]))
        except InputError as error:
            if "must be one number" not in str(error):
                continue
        nodes.append(node)
        names.append(node.name)
    return len(nodes) - len(_INPUTS)


def _call(first: int, source: Iterator[int], names: Sequence[str]) -> CustomLossNode:
    kind, target = _CALLS[(first * 256 + _next(source)) % len(_CALLS)]
    args = [_argument(source, names) for _ in range(1 + _next(source) % 3)]
    if kind == "call_method" or target == "getattr":
        args[0] = {"ref": names[-1 - _next(source) % len(names)]}
    count = max(_next(source) - 200, 0) % 3
    kwargs = {
        _OPTIONS[_next(source) % len(_OPTIONS)]: _argument(source, names) for _ in range(count)
    }
    return CustomLossNode(op=kind, name=f"n{len(names)}", target=target, args=args, kwargs=kwargs)


def _finished(nodes: Sequence[CustomLossNode]) -> CustomLossGraph:
    last = {"ref": nodes[-1].name}
    result = {"tuple": [last, {"dict": {"custom/x:sum": last}}]}
    out = CustomLossNode(op="output", name="out", target="output", args=[result])
    return CustomLossGraph(nodes=[*nodes, out])


def _next(source: Iterator[int]) -> int:
    return next(source, 0)


def _argument(source: Iterator[int], names: Sequence[str], depth: int = 0) -> Any:
    choice, value = _next(source), _next(source)
    match choice % 10:
        case 0 | 1 | 2 | 3:
            return {"ref": names[-1 - value % len(names)]}
        case 4 | 5:
            return _NUMBERS[value % len(_NUMBERS)]
        case 6:
            return _WORDS[value % len(_WORDS)]
        case 7:
            return {"dtype": _DTYPES[value % len(_DTYPES)]}
        case 8 if depth < 3:
            return {"slice": [_argument(source, names, depth + 1) for _ in range(3)]}
        case _ if depth < 3:
            items = [_argument(source, names, depth + 1) for _ in range(value % 4)]
            return {"tuple": items} if value > 127 else items
        case _:
            return value


def run(inputs: Sequence[CustomLossInput], graph: CustomLossGraph) -> None:
    """Compile a graph and evaluate it once, with its gradient."""
    compiled = compile_loss(inputs, graph)
    values = {
        "whole": np.array([0, 1, -(2**63), 2**62, 3]),
        "rows": np.arange(15, dtype=np.float32).reshape(5, 3),
        "one": np.array(0.5, np.float32),
    }
    known = {declared.name for declared in inputs}
    p = torch.linspace(-3, 0, 5, requires_grad=True)
    loss, _ = compiled.evaluate(p, {k: v for k, v in values.items() if k in known})
    if loss.requires_grad:
        from tinkex.engine.training.loss_evaluation import _derivative

        _derivative(loss, p)
