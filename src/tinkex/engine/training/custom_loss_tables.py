"""What uploaded losses may call: the explicit tables behind `custom_loss`.

Left out on purpose: anything random, in place, on other devices, or whose result can be much
larger than its arguments (factories, `repeat`, `outer`, matrix products), and everything that
leaves torch.
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
    """Zeros: uninitialised memory is nobody's business."""
    return torch.zeros_like(tensor, **kwargs)


def _div(tensor: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Without truncating whole numbers: there the smallest one by -1 ends the process."""
    plain = [v for v in (tensor, other) if isinstance(v, Tensor)]
    if rounding_mode == "trunc" and not any(value.is_floating_point() for value in plain):
        raise InputError("rounding_mode='trunc' needs floats; make one of them .float() first")
    return torch.div(tensor, other, rounding_mode=rounding_mode)


def _diff(tensor: Tensor, n: int = 1, dim: int = -1, **ends: Any) -> Tensor:
    """Differences of differences are taken one by one; a few are enough."""
    if n > _MAX_DIFF:
        raise InputError(f"n may be {_MAX_DIFF} at most, not {n}")
    return torch.diff(tensor, n, dim, **ends)


_MAX_DIFF: Final = 8


def _norm(tensor: Tensor, p: Any = "fro", *args: Any, **kwargs: Any) -> Tensor:
    """Norms of the numbers; the nuclear norm of a matrix takes minutes."""
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


# In place of torch's own, which can do more than a stranger may ask for.
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
