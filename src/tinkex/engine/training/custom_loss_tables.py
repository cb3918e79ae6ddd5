"""What uploaded losses may call and pass: the allowlists of `custom_loss`.

Left out on purpose: anything random, in place, on other devices, or whose result can be much
larger than its arguments (factories, `repeat`, `outer`, matrix products), and everything that
leaves torch.

An argument is plain JSON, or an object with one member that names its kind; only the kinds in
`decode_argument` are accepted.
"""

from __future__ import annotations

import inspect
import math
import operator
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_BOTH: Final = _words(  # as torch.<name> and as a method of tensors
    "abs absolute add all amax amin any argmax argmin atan2 bitwise_and bitwise_not bitwise_or "
    "ceil clamp clamp_max clamp_min clip clone cos cosh count_nonzero cummax cummin "
    "cumprod cumsum detach diff div divide dot eq equal exp exp2 expm1 flatten flip floor "
    "floor_divide fmod gather ge greater greater_equal gt hypot index_select isfinite isinf isnan "
    "le lerp less less_equal lgamma log log10 log1p log2 log_softmax logaddexp logcumsumexp "
    "logical_and logical_not logical_or logical_xor logit logsumexp lt masked_fill masked_select "
    "max maximum mean median min minimum movedim mul multiply nan_to_num nanmean nansum narrow ne "
    "neg negative nonzero norm not_equal numel permute pow prod ravel reciprocal relu remainder "
    "reshape roll round rsqrt select sigmoid sign sin sinh softmax sort sqrt square "
    "squeeze std sub subtract sum swapaxes t take take_along_dim tan tanh topk transpose "
    "true_divide trunc unflatten unsqueeze var where xlogy"
)

_METHODS_ONLY: Final = _words(
    "bool contiguous dim double expand_as float int long ndimension new_tensor "
    "size to type_as view view_as"
)

_FUNCTIONS_ONLY: Final = _words(
    "broadcast_tensors cat concat empty_like full_like ones_like stack std_mean var_mean zeros_like"
)

_FUNCTIONAL: Final = _words(
    "binary_cross_entropy_with_logits elu gelu hardtanh huber_loss kl_div l1_loss leaky_relu "
    "log_softmax logsigmoid mse_loss normalize relu sigmoid silu smooth_l1_loss softmax softplus "
    "tanh"
)

_OPERATORS: Final = _words(
    "abs add and_ eq floordiv ge getitem gt inv invert le lt mod mul ne neg not_ or_ pos pow sub "
    "truediv xor"
)

_MATH: Final = _words(
    "atan ceil cos cosh erf erfc exp expm1 fabs floor isfinite isinf isnan log log10 log1p log2 "
    "pow sin sinh sqrt tan tanh trunc"
)


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Change the element type; a device or a flag changes nothing here."""
    for value in (*args, kwargs.get("dtype"), kwargs.get("other")):
        if isinstance(value, torch.dtype):
            return tensor.to(value)
        if isinstance(value, Tensor):
            return tensor.to(value.dtype)
    return tensor


def _empty_like(tensor: Tensor, **kwargs: Any) -> Tensor:
    """Zeros: uninitialised memory could contain data of others."""
    return torch.zeros_like(tensor, **kwargs)


def _div(tensor: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Without truncated integer division: dividing the smallest integer by -1 ends the process."""
    plain = [v for v in (tensor, other) if isinstance(v, Tensor)]
    if rounding_mode == "trunc" and not any(value.is_floating_point() for value in plain):
        raise InputError("rounding_mode='trunc' needs floats; make one of them .float() first")
    return torch.div(tensor, other, rounding_mode=rounding_mode)


def _diff(tensor: Tensor, n: int = 1, dim: int = -1, **ends: Any) -> Tensor:
    """With a bounded order, because every order is another pass."""
    if n > _MAX_DIFF:
        raise InputError(f"n may be {_MAX_DIFF} at most, not {n}")
    return torch.diff(tensor, n, dim, **ends)


_MAX_DIFF: Final = 8


def _norm(tensor: Tensor, p: Any = "fro", *args: Any, **kwargs: Any) -> Tensor:
    """Elementwise norms; the nuclear norm of a matrix takes minutes."""
    if isinstance(p, str) and p != "fro":
        raise InputError(f"the norm p={p[:80]!r} is not offered; give a number or 'fro'")
    return cast("Any", tensor).norm(p, *args, **kwargs)


def _never_in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C++, and without such an option
        return function
    if "inplace" not in signature.parameters:
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        if signature.bind(*args, **kwargs).arguments.get("inplace"):
            raise InputError("tensors cannot be changed in place; leave inplace out")
        return function(*args, **kwargs)

    return call


def _size(tensor: Tensor, dim: int | None = None) -> Any:
    return tensor.shape if dim is None else tensor.shape[dim]


# Instead of torch's functions, which accept arguments that are not allowed here.
_BOUNDED: Final[dict[str, Callable[..., Any]]] = {
    "div": _div,
    "divide": _div,
    "diff": _diff,
    "norm": _norm,
}
_OWN_METHODS: Final[dict[str, Callable[..., Any]]] = {**_BOUNDED, "to": _to, "size": _size}
_OWN_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    **{f"torch.{name}": function for name, function in _BOUNDED.items()},
    "torch.empty_like": _empty_like,
}

METHODS: Final[Mapping[str, Callable[..., Any]]] = {
    **{name: getattr(Tensor, name) for name in (*_BOTH, *_METHODS_ONLY) if hasattr(Tensor, name)},
    **_OWN_METHODS,
}
"""Methods of tensors, by name."""

FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    **{f"torch.{n}": getattr(torch, n) for n in (*_BOTH, *_FUNCTIONS_ONLY) if hasattr(torch, n)},
    **{f"torch.nn.functional.{name}": _never_in_place(getattr(F, name)) for name in _FUNCTIONAL},
    # Where a function is written in C++, tracing names the module it was made in.
    **{f"torch._C._nn.{name}": _never_in_place(getattr(F, name)) for name in _FUNCTIONAL},
    **_OWN_FUNCTIONS,
}
"""Functions of torch, by qualified name."""

OPERATORS: Final[Mapping[str, Callable[..., Any]]] = {
    f"operator.{name}": getattr(operator, name) for name in _OPERATORS
}
"""Python's operators."""

MATH: Final[Mapping[str, Callable[..., Any]]] = {
    f"math.{name}": getattr(math, name) for name in _MATH
}
"""Functions of numbers."""

DTYPES: Final[Mapping[str, torch.dtype]] = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool", "uint8")
}
"""Element types."""


def _of_tensor(name: str) -> Callable[[Any], Any]:
    read = operator.attrgetter(name)

    def get(value: Any) -> Any:
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is an attribute of tensors")
        return read(value)

    return get


def _of_pair(index: int, name: str) -> Callable[[Any], Any]:
    """`values` and `indices` of results such as those of `max` along a dimension."""

    def get(value: Any) -> Any:
        if not isinstance(value, tuple) or not hasattr(cast("object", value), name):
            raise TypeError(f"{name} is an attribute of results such as those of torch.max")
        return cast("tuple[Any, ...]", value)[index]

    return get


ATTRIBUTES: Final[Mapping[str, Callable[[Any], Any]]] = {
    **{name: _of_tensor(name) for name in ("shape", "ndim", "dtype", "device")},
    "values": _of_pair(0, "values"),
    "indices": _of_pair(1, "indices"),
}
"""Readable attributes."""

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
            # Losses are evaluated on the CPU; a graph cannot choose another device.
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
