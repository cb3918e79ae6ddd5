"""Traces a loss written in torch into a graph, checks it, and encodes it as plain data.

What is traced must be able to run elsewhere: it reads its arguments and calls torch, `math` and
`operator`, nothing else. Every refusal is an `InputError` that says what to change.
"""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from tinkex.errors import InputError, InputTypeError, MissingPackageError
from tinkex.types import CustomLossGraph, CustomLossInput, CustomLossNode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    import torch.fx

_MAX_INPUTS = 16
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_MODULES = frozenset({"torch", "math", "operator", "_operator"})
_LEAVING_TORCH = frozenset({"item", "numpy", "tolist"})


@dataclass(frozen=True, slots=True)
class TracedLoss:
    """A loss that passed every check: as a runnable module, and as data."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    module: torch.fx.GraphModule
    graph: CustomLossGraph


def load_torch() -> ModuleType:
    """torch, imported when a custom loss is first used."""
    try:
        import torch
    except ImportError as error:
        raise MissingPackageError("custom losses need PyTorch", "torch") from error
    return torch


def trace(fn: Callable[..., Any], input_ranks: Mapping[str, Any]) -> TracedLoss:
    """Trace `fn(logprobs, ...)`; `input_ranks` gives a rank for each of its parameters."""
    load_torch()
    if not callable(fn):
        raise InputTypeError(f"must be a function, not {type(fn).__name__}", "fn")
    name = str(getattr(fn, "__name__", type(fn).__name__))
    inputs = _inputs(_parameters(fn), input_ranks)
    module = _trace(fn, name)
    for node in module.graph.nodes:
        _check_node(node)
    return TracedLoss(name, inputs, module, encode(module))


# -- the signature --------------------------------------------------------------------------------


def _parameters(fn: Callable[..., Any]) -> list[str]:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as error:
        raise InputError("its parameters cannot be read; give a plain function", "fn") from error
    if not parameters or parameters[0].name != "logprobs":
        raise InputError(
            "its first parameter must be `logprobs`; the others name what it reads from "
            "loss_fn_inputs, as in `def loss(logprobs, advantages)`",
            "fn",
        )
    if len(parameters) > _MAX_INPUTS:
        raise InputError(f"has {len(parameters)} parameters; {_MAX_INPUTS} are allowed", "fn")
    for parameter in parameters:
        _check_parameter(parameter)
    return [parameter.name for parameter in parameters]


def _check_parameter(parameter: inspect.Parameter) -> None:
    place = f"fn({parameter.name})"
    if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
        raise InputError("must be positional: no *args, **kwargs or keyword-only parameters", place)
    if parameter.default is not parameter.empty:
        raise InputError("must not have a default: every input comes from the datum", place)
    if not _INPUT_NAME.fullmatch(parameter.name):
        raise InputError(
            "must be up to 64 lower-case letters, digits and underscores, not beginning with a "
            "digit",
            place,
        )


def _inputs(names: list[str], ranks: Mapping[str, Any]) -> tuple[CustomLossInput, ...]:
    if set(ranks) != set(names):
        raise InputError(
            f"must have exactly the parameters as keys: {', '.join(names)}; "
            f"it has {', '.join(map(str, ranks)) or 'none'}",
            "input_ranks",
        )
    for name in names:
        rank, allowed = ranks[name], (1, 2) if name == "logprobs" else (0, 1, 2)
        if isinstance(rank, bool) or rank not in allowed:
            choices = " or ".join(map(str, allowed))
            raise InputError(f"must be {choices}, not {rank!r}", f'input_ranks["{name}"]')
    return tuple(CustomLossInput(name=name, rank=ranks[name]) for name in names)


# -- the graph ------------------------------------------------------------------------------------


def _trace(fn: Callable[..., Any], name: str) -> torch.fx.GraphModule:
    import torch.fx

    try:
        return torch.fx.symbolic_trace(fn)
    except Exception as error:
        # Tracing runs the user's code, so anything can come out of it.
        raise InputError(
            f"torch.fx cannot trace {name}: {error}. A custom loss must not branch or loop on "
            "values of its inputs; use torch.where and the like",
            "fn",
        ) from error


def _check_node(node: Any) -> None:
    match node.op:
        case "call_function":
            _check_function(node.target)
        case "call_method":
            _check_method(node.target)
        case "call_module":
            raise InputError(
                f"calls the module {node.target!r}; use torch.nn.functional instead", "fn"
            )
        case "get_attr":
            raise InputError(
                f"captures a tensor ({node.target}); pass it as an input, or write a constant as a "
                "plain number",
                "fn",
            )
        case "output":
            _check_output(node.args[0])
        case _:
            pass


def _check_function(function: Any) -> None:
    if function is getattr:
        return
    module = str(getattr(function, "__module__", None) or "")
    if module.partition(".")[0] not in _MODULES:
        called = getattr(function, "__qualname__", repr(function))
        raise InputError(
            f"calls {module}.{called}; only torch, math and operator can be called", "fn"
        )


def _check_method(name: str) -> None:
    import torch

    if name == "backward":
        raise InputError("calls backward(); return the loss, its gradient is taken for you", "fn")
    if name in _LEAVING_TORCH:
        raise InputError(f"calls {name}(), which leaves torch; keep values as tensors", "fn")
    if not hasattr(torch.Tensor, name):
        raise InputError(f"calls {name}(), which torch.Tensor does not have", "fn")


def _check_output(output: Any) -> None:
    import torch.fx

    if not isinstance(output, tuple | list) or len(cast("list[Any]", output)) != 2:
        raise InputError("must return a pair: the loss, and a dict of metrics", "fn")
    loss, metrics = cast("list[Any]", output)
    if not isinstance(loss, torch.fx.Node):
        raise InputError("must return a loss that is computed from its inputs", "fn")
    if not isinstance(metrics, dict):
        raise InputError("must return its metrics as a dict, which may be empty", "fn")
    for key, value in cast("dict[Any, Any]", metrics).items():
        place = f"fn metrics[{key!r}]"
        if not isinstance(key, str) or not _METRIC_NAME.fullmatch(key):
            raise InputError(
                "must be named custom/<name>:sum or custom/<name>:mean, with lower-case letters, "
                "digits and ._/- in <name>",
                place,
            )
        if not isinstance(value, torch.fx.Node):
            raise InputError("must be a tensor that is computed from the inputs", place)


# -- the graph as data ----------------------------------------------------------------------------


def encode(module: torch.fx.GraphModule) -> CustomLossGraph:
    """The graph node by node, in the order of execution."""
    return CustomLossGraph(
        nodes=[
            CustomLossNode(
                op=node.op,
                name=node.name,
                target=_target(node),
                args=[encode_argument(value) for value in node.args],
                kwargs={name: encode_argument(value) for name, value in node.kwargs.items()},
            )
            for node in module.graph.nodes
        ]
    )


def _target(node: Any) -> str:
    if node.op != "call_function":
        return str(node.target)
    from torch.fx.node import _get_qualified_name  # pyright: ignore[reportPrivateUsage] -- the protocol's names are torch's own

    name = _get_qualified_name(node.target)
    # Python's operators live in a private C module; on the wire they have their public name.
    return name.removeprefix("_") if name.startswith("_operator.") else name


def encode_argument(value: Any) -> Any:
    """One argument as JSON; what JSON does not have is wrapped in an object naming its kind."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list | tuple):
        items = [encode_argument(item) for item in cast("list[Any]", value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {"dict": _encode_dict(cast("dict[Any, Any]", value))}
    if isinstance(value, slice):
        edges = cast("slice[Any, Any, Any]", value)
        return {"slice": [encode_argument(edge) for edge in (edges.start, edges.stop, edges.step)]}
    return {"ellipsis": True} if value is ... else _encode_torch(value)


def _encode_dict(value: dict[Any, Any]) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise InputError(f"passes a dict with the key {key!r}; keys must be strings", "fn")
    return {key: encode_argument(item) for key, item in value.items()}


def _encode_torch(value: Any) -> dict[str, str]:
    import torch
    import torch.fx

    if isinstance(value, torch.fx.Node):
        return {"ref": value.name}
    kinds: dict[type, str] = {
        torch.dtype: "dtype",
        torch.device: "device",
        torch.layout: "layout",
        torch.memory_format: "memory_format",
    }
    kind = next((kind for torch_type, kind in kinds.items() if isinstance(value, torch_type)), None)
    if kind is None:
        raise InputError(
            f"passes a {type(value).__name__}, which cannot be sent; use numbers, strings, tensors "
            "and torch constants",
            "fn",
        )
    return {kind: str(value).removeprefix("torch.")}
