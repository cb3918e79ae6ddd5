"""Losses that clients upload as graphs: checked once, then evaluated node by node.

Nothing a graph says is ever looked up by name in a module or on an object: functions, methods and
attributes come from the tables of `custom_loss_tables`. Graphs cannot draw random numbers, modify
tensors in place, make tensors much larger than their inputs, or run without a limit; so they are
harmless and deterministic.

Work is counted rather than timed: a count is the same on every machine and in every repetition, so
a run that is replayed after a crash is refused exactly where it was refused before. One unit is
about a nanosecond of one core.

Shapes: N tokens of one sequence, K targets of a row.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.training.custom_loss_tables import (
    ATTRIBUTES,
    FUNCTIONS,
    MATH,
    METHODS,
    OPERATORS,
    Values,
    decode_argument,
)
from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tinkex.types import CustomLossGraph, CustomLossInput, CustomLossNode, Datum

MAX_NODES: Final = 1000
MAX_ELEMENTS: Final = 2**24
"""How large one value may become while a graph is evaluated."""
MAX_TOTAL: Final = 2**27
"""How many elements all values of one datum may have together."""
MAX_WORK: Final = 2**32
"""Units of work for all data of one operation, forward and backward pass together."""
STEP_WORK: Final = 2**14
"""The work of a node with small values: checking its size and calling torch."""
MAX_VALUES: Final = 20_000
"""How many JSON values the arguments of one graph may have."""

_SLOW: Final = {"sort": 16, "topk": 16, "median": 16, "cummax": 4, "cummin": 4, "lgamma": 16}
_MAX_INPUTS: Final = 16
_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC: Final = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")


class EvaluationCost:
    """Counts the work of the evaluations of one operation."""

    def __init__(self) -> None:
        # Mutable state: units spent.
        self.spent = 0

    def spend(self, target: str, values: Sequence[Any]) -> None:
        """Count one call by the size of what goes in or comes out."""
        weight = _SLOW.get(target.rpartition(".")[2], 1)
        self.spent += STEP_WORK + weight * sum(tensor.numel() for tensor in _tensors(values))
        if self.spent > MAX_WORK:
            raise InputError(
                f"is too much work: it passed {MAX_WORK} operations on single numbers; use fewer "
                "nodes or smaller values, or send less data per call"
            )


def _count_values(value: Any, before: int, path: str) -> int:
    """The number of JSON values so far, including a value and everything in it."""
    todo, count = [value], before
    while todo:
        item = todo.pop()
        count += 1
        if count > MAX_VALUES:
            raise InputError(f"a graph's arguments may have {MAX_VALUES} values", path)
        if isinstance(item, list):
            todo += cast("list[Any]", item)[: MAX_VALUES + 1]
        elif isinstance(item, dict):
            todo += cast("dict[str, Any]", item).values()
    return count


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """All tensors in values, lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(cast("list[Any]", value))
    return found


@dataclass(frozen=True, slots=True)
class _Step:
    """One checked node."""

    name: str
    run: Callable[[Values, EvaluationCost], Any]


@dataclass(frozen=True, slots=True)
class CompiledLoss:
    """A graph that passed every check; made for one operation, whose work it counts."""

    inputs: tuple[CustomLossInput, ...]
    steps: tuple[_Step, ...]
    loss: str
    metrics: Mapping[str, str]
    work: EvaluationCost = field(default_factory=EvaluationCost, compare=False)

    def read(self, datum: Datum, shape: tuple[int, ...], path: str) -> Values:
        """The declared inputs of one datum, as arrays; `shape` is that of its targets."""
        if len(shape) != self.inputs[0].rank:
            raise InputError(
                f"has {len(shape)} dimensions; this loss was made for logprobs of rank "
                f"{self.inputs[0].rank}",
                f'{path}.loss_fn_inputs["target_tokens"]',
            )
        return {declared.name: _read(datum, declared, shape, path) for declared in self.inputs[1:]}

    def evaluate(self, logprobs: Tensor, values: Values) -> tuple[Tensor, dict[str, float]]:
        """The loss of one datum, differentiable by `logprobs`, and its metrics."""
        results: Values = {
            ("input", name): torch.from_numpy(np.array(value))  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
            for name, value in values.items()
        }
        results["input", "logprobs"] = logprobs
        total = 0
        for step in self.steps:
            value = results[step.name] = step.run(results, self.work)
            total += _elements(step, value)
            if total > MAX_TOTAL:
                raise InputError(f"holds more than {MAX_TOTAL} numbers at {step.name}", "graph")
        loss = _number(results[self.loss], "the loss")
        metrics = {
            name: float(_number(results[ref], f"metric {name}").detach())
            for name, ref in self.metrics.items()
        }
        return loss, metrics


def compile_loss(inputs: Sequence[CustomLossInput], graph: CustomLossGraph) -> CompiledLoss:
    """Check an uploaded loss; errors name the node by its place in the graph."""
    _check_inputs(inputs)
    if len(graph.nodes) > MAX_NODES:
        raise InputError(f"has {len(graph.nodes)} nodes; {MAX_NODES} are allowed", "graph.nodes")
    if not graph.nodes or graph.nodes[-1].op != "output":
        raise InputError("must end with an output node", "graph.nodes")
    declared = {declared.name for declared in inputs}
    names: set[str] = set()
    values = 0
    steps: list[_Step] = []
    for index, node in enumerate(graph.nodes[:-1]):
        path = f"graph.nodes[{index}]"
        if not node.name or node.name in names:
            raise InputError(f"{node.name!r} is not a new name", f"{path}.name")
        values = _count_values([node.args, node.kwargs], values, path)
        steps.append(_Step(node.name, _compile(node, names, declared, path)))
        names.add(node.name)
    loss, metrics = _output(graph.nodes[-1], names, f"graph.nodes[{len(steps)}]")
    return CompiledLoss(tuple(inputs), tuple(steps), loss, metrics)


def _check_inputs(inputs: Sequence[CustomLossInput]) -> None:
    names = [declared.name for declared in inputs]
    if not names or names[0] != "logprobs" or inputs[0].rank not in (1, 2):
        raise InputError("the first must be logprobs, of rank 1 or 2", "inputs")
    if len(names) > _MAX_INPUTS or len(set(names)) != len(names):
        raise InputError(f"give at most {_MAX_INPUTS} different names", "inputs")
    for name in names:
        if not _NAME.fullmatch(name):
            raise InputError(f"{name[:80]!r} is not a name of an input", "inputs")


def _compile(
    node: CustomLossNode, names: set[str], declared: set[str], path: str
) -> Callable[[Values, EvaluationCost], Any]:
    if node.op == "placeholder":
        return _placeholder(node, declared, path)
    arguments = [decode_argument(value, names, f"{path}.args") for value in node.args]
    options = {key: decode_argument(v, names, f"{path}.kwargs") for key, v in node.kwargs.items()}
    if "out" in options:
        raise InputError("results cannot be written into a tensor", f'{path}.kwargs["out"]')
    function = _callee(node, path)

    def run(results: Values, work: EvaluationCost) -> Any:
        try:
            args = [argument(results) for argument in arguments]
            kwargs = {key: option(results) for key, option in options.items()}
            work.spend(node.target, [args, *kwargs.values()])
            value = function(*args, **kwargs)
            work.spend(node.target, [value])
            return value
        except InputError as error:
            raise InputError(error.reason, path) from error
        except Exception as error:  # torch raises many types
            raise InputError(f"{node.target} failed: {_first_line(error)}", path) from error

    return run


def _placeholder(
    node: CustomLossNode, declared: set[str], path: str
) -> Callable[[Values, EvaluationCost], Any]:
    target = node.target
    if target not in declared:
        raise InputError(f"{target[:80]!r} is not a declared input", f"{path}.target")
    if node.args or node.kwargs:
        raise InputError("an input has no default", path)
    return lambda results, work: results["input", target]


def _callee(node: CustomLossNode, path: str) -> Callable[..., Any]:
    target, shown = node.target, node.target[:80]
    if node.op == "call_method":
        method = METHODS.get(target)
        if method is None:
            raise InputError(f"the method {shown!r} {_NOT_OFFERED}", f"{path}.target")
        return _on_tensor(method, shown)
    if node.op != "call_function":
        raise InputError(f"{node.op} nodes are refused: a graph has only its inputs", f"{path}.op")
    if target == "getattr":
        return _attribute
    if target in OPERATORS:
        return _arithmetic(OPERATORS[target], shown)
    if target in MATH:
        return _on_numbers(MATH[target], shown)
    function = FUNCTIONS.get(target)
    if function is None:
        raise InputError(f"the function {shown!r} {_NOT_OFFERED}", f"{path}.target")
    return _sized(function)


_NOT_OFFERED: Final = "is not offered for uploaded losses; compute the loss on the client instead"


def _on_tensor(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    sized = _sized(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not args or not isinstance(args[0], Tensor):
            raise InputError(f"{name} is a method of tensors")
        return sized(*args, **kwargs)

    return call


def _on_numbers(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        for value in args:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"{name} takes numbers; use torch's own function for tensors")
        return function(*(float(value) for value in args))

    return call


def _arithmetic(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Operators work on tensors and numbers; only `getitem` also reads tuples and lists."""
    sized = _sized(function)
    picks = name == "operator.getitem"

    def call(*args: Any) -> Any:
        for value in args[:1] if picks else args:
            plain = isinstance(value, Tensor | int | float)
            if not plain and not (picks and isinstance(value, tuple | list)):
                raise InputError(f"{name} does not take a {type(value).__name__}")
        if picks:
            _check_index(args[1:])
        if name == "operator.pow" and not any(isinstance(value, Tensor) for value in args):
            return function(*(float(value) for value in args))
        return sized(*args)

    return call


def _check_index(index: tuple[Any, ...]) -> None:
    """A mask selects elements; with index tensors beside it, it could multiply them."""
    tensors = _tensors(index)
    if len(tensors) > 1 and any(tensor.dtype == torch.bool for tensor in tensors):
        raise InputError("indexing by a mask and another tensor at once is not offered")


def _attribute(value: Any, name: Any, *default: Any) -> Any:
    reader = ATTRIBUTES.get(name) if isinstance(name, str) else None
    if default or reader is None:
        raise InputError(f"the attribute {str(name)[:80]!r} {_NOT_OFFERED}")
    return reader(value)


def _sized(function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a call whose result would be too large, before it is made."""

    def call(*args: Any, **kwargs: Any) -> Any:
        elements = _result_elements(function, args, kwargs)
        if elements > MAX_ELEMENTS:
            raise InputError(f"would make {elements} numbers; {_TOO_LARGE}")
        return function(*args, **kwargs)

    return call


def _result_elements(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """The size of a result, found with tensors that have a shape and no memory."""
    try:
        with torch.no_grad():
            shadow = function(*_shadow(args), **{k: _shadow(v) for k, v in kwargs.items()})
        return sum(tensor.numel() for tensor in _tensors([shadow]))
    except Exception:  # noqa: BLE001 - the call itself will say what is wrong
        # Or its size depends on values: then it selects some of its arguments' elements, which
        # `_arithmetic` makes sure of for indexing, or gives the places of some.
        return _most_selected(_tensors([args, *kwargs.values()]))


def _most_selected(tensors: list[Tensor]) -> int:
    """As many as the arguments have after broadcasting, with one number per dimension for each."""
    columns = zip_longest(*(reversed(tensor.shape) for tensor in tensors), fillvalue=1)
    shape = [max(sizes) for sizes in columns]
    return math.prod(shape) * max(len(shape), 1)


def _shadow(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, list):
        return [_shadow(item) for item in cast("list[Any]", value)]
    if isinstance(value, tuple):
        return tuple(_shadow(item) for item in cast("tuple[Any, ...]", value))
    return value


def _elements(step: _Step, value: Any) -> int:
    """The size of a result; Python's own numbers must stay numbers of 64 bits."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise InputError(f"the number is too large at {step.name}", "graph")
    return sum(tensor.numel() for tensor in _tensors([value]))


_TOO_LARGE: Final = f"a value of a loss may have {MAX_ELEMENTS}"


def _output(node: CustomLossNode, names: set[str], path: str) -> tuple[str, dict[str, str]]:
    """The names of the loss and of each metric."""
    value = node.args[0] if len(node.args) == 1 else None
    pair = cast("dict[str, Any]", value).get("tuple", value) if isinstance(value, dict) else value
    if not isinstance(pair, list) or len(cast("list[Any]", pair)) != 2:
        raise InputError("must return a pair: the loss, and a dict of metrics", path)
    loss, metrics = cast("list[Any]", pair)
    if not isinstance(metrics, dict) or set(cast("dict[str, Any]", metrics)) != {"dict"}:
        raise InputError("the metrics must be a dict, which may be empty", path)
    named = cast("dict[str, Any]", metrics["dict"])
    if not isinstance(named, dict):  # pyright: ignore[reportUnnecessaryIsInstance] -- it came over the wire
        raise InputError("the metrics must be a dict, which may be empty", path)
    for key in named:
        if not _METRIC.fullmatch(key):
            raise InputError(
                f"metric {key[:80]!r} must be named custom/<name>:sum or custom/<name>:mean", path
            )
    refs = {key: _reference(item, names, path) for key, item in named.items()}
    return _reference(loss, names, path), refs


def _reference(value: Any, names: set[str], path: str) -> str:
    ref = cast("dict[str, Any]", value).get("ref") if isinstance(value, dict) else None
    if not isinstance(ref, str) or ref not in names:
        raise InputError("the loss and its metrics must be computed by the graph", path)
    return ref


def _read(datum: Datum, declared: CustomLossInput, shape: tuple[int, ...], path: str) -> Any:
    place = f'{path}.loss_fn_inputs["{declared.name}"]'
    tensor = datum.loss_fn_inputs.get(declared.name)
    if tensor is None:
        raise InputError("is missing; the custom loss reads it", place)
    dims = tensor.shape
    if dims is not None and math.prod(dims) > MAX_ELEMENTS:
        raise InputError(f"has shape {dims}; {_TOO_LARGE}", place)
    array = tensor.to_numpy()
    if declared.rank == 0:
        if array.size != 1:
            raise InputError(f"has shape {list(array.shape)}; expected a single number", place)
        array = array.reshape(())
    elif array.ndim != declared.rank or array.shape[0] != shape[0]:
        columns = ", K" if declared.rank == 2 else ""
        raise InputError(f"has shape {list(array.shape)}; expected [{shape[0]}{columns}]", place)
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise InputError("has NaN in it; give numbers", place)
    return array


def _number(value: Any, what: str) -> Tensor:
    if isinstance(value, int | float):
        value = torch.tensor(float(value))
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{what} must be one number, got {shape}; use .sum()", "graph")
    return value.reshape(())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
