"""Training passes: loss names, requests and results.

The batches are plain dataclasses because they travel as protobuf, not as JSON.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from tinkex.errors import InputError, InputTypeError
from tinkex.types.arrays import plain_number
from tinkex.types.base import Value, is_mapping
from tinkex.types.datum import Datum
from tinkex.types.tensors import TensorData
from tinkex.types.usage import Usage

LossFnType = Literal[
    "cross_entropy",
    "importance_sampling",
    "ppo",
    "cispo",
    "dro",
    "gspo",
    "stable_reinforce",
    "custom",
]
"""The losses the server knows by name."""

LossFnOutput = dict[str, TensorData]
"""What a loss returns for one datum."""

ModelID = str
"""A training run's id."""


@dataclass(frozen=True, slots=True)
class ForwardBackwardInput:
    """A batch, and the loss to compute on it."""

    data: list[Datum]
    loss_fn: LossFnType
    loss_fn_config: Mapping[str, float | str] | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "data", datum_list(self.data, "ForwardBackwardInput.data"))
        put(self, "loss_fn", loss_name(self.loss_fn, "ForwardBackwardInput.loss_fn"))
        config = loss_config(self.loss_fn_config, "ForwardBackwardInput.loss_fn_config")
        put(self, "loss_fn_config", config)


# These can be iterated over, but not for datums in an order.
_NO_LISTS: Final = (str, bytes, bytearray, set, frozenset, Mapping, Value)


def datum_list(data: Any, path: str) -> list[Datum]:
    """Datums out of a list, a generator, an object array or whatever else gives them in order."""
    if not isinstance(data, Iterable) or isinstance(data, _NO_LISTS):
        raise InputTypeError(
            f"expected a list of Datum, got {type(cast('Any', data)).__name__}", path
        )
    batch = list(cast("Iterable[Any]", data))
    for i, datum in enumerate(batch):
        if not isinstance(datum, Datum):
            raise InputTypeError(f"expected Datum, got {type(datum).__name__}", f"{path}[{i}]")
    return batch


def loss_name(name: Any, path: str) -> LossFnType:
    """`name` when it is a loss, else an `InputError` that lists them."""
    if not isinstance(name, str):
        raise InputTypeError(f"expected the name of a loss, got {type(name).__name__}", path)
    if name not in get_args(LossFnType):
        known = ", ".join(get_args(LossFnType))
        raise InputError(f"{name!r} is not a loss; there are {known}", path)
    return cast("LossFnType", name)


def loss_config(config: Any, path: str) -> dict[str, float | str] | None:
    """The settings of a loss: numbers become floats, text stays text."""
    if config is None:
        return None
    if not is_mapping(config):
        raise InputTypeError(f"expected a dict, got {type(config).__name__}", path)
    checked: dict[str, float | str] = {}
    for name, value in config.items():
        if not isinstance(name, str):
            raise InputTypeError(f"names are strings, got {name!r}", path)
        where = f'{path}["{name}"]'
        _check_text(name, where)
        checked[name] = _setting(value, where)
    return checked


def _check_text(text: str, path: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError("holds half of a surrogate pair, which is no text", path) from None


def _setting(value: Any, path: str) -> float | str:
    value = plain_number(value)
    if isinstance(value, str):
        _check_text(value, path)
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputTypeError(f"expected a number or text, got {type(value).__name__}", path)
    try:
        number = float(value)
    except OverflowError:
        raise InputError("too large for a float", path) from None
    if not math.isfinite(number):
        raise InputError(f"must be a finite number, got {number}", path)
    return number


@dataclass(frozen=True, slots=True)
class _PassRequest:
    def _check(self, batch_field: str) -> None:
        kind = type(self).__name__
        if not isinstance(getattr(self, batch_field), ForwardBackwardInput):
            raise InputTypeError("expected ForwardBackwardInput", f"{kind}.{batch_field}")
        if not isinstance(getattr(self, "model_id"), str):  # noqa: B009 -- declared by subclasses
            raise InputTypeError("expected str", f"{kind}.model_id")
        seq_id = getattr(self, "seq_id")  # noqa: B009 -- declared by subclasses
        if seq_id is not None and (isinstance(seq_id, bool) or not isinstance(seq_id, int)):
            raise InputTypeError("expected int or None", f"{kind}.seq_id")


@dataclass(frozen=True, slots=True)
class ForwardBackwardRequest(_PassRequest):
    """A forward and backward pass over a batch."""

    forward_backward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None

    def __post_init__(self) -> None:
        self._check("forward_backward_input")


@dataclass(frozen=True, slots=True)
class ForwardRequest(_PassRequest):
    """A forward pass over a batch."""

    forward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None

    def __post_init__(self) -> None:
        self._check("forward_input")


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """Result of a forward or forward-backward pass: one dict of tensors per datum, in order.

    There is no `loss` field: the loss is `metrics["loss:sum"]`.
    """

    loss_fn_output_type: str
    loss_fn_outputs: list[LossFnOutput]
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    usage: Usage | None = field(default=None, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        kind = "ForwardBackwardOutput"
        if not isinstance(self.loss_fn_output_type, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may not type-check
            raise InputTypeError("expected str", f"{kind}.loss_fn_output_type")
        if not isinstance(self.loss_fn_outputs, list):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may not type-check
            raise InputTypeError("expected a list of dicts", f"{kind}.loss_fn_outputs")
        for i, output in enumerate(self.loss_fn_outputs):
            if not isinstance(output, dict) or not all(  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may not type-check
                isinstance(tensor, TensorData)  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may not type-check
                for tensor in output.values()
            ):
                raise InputTypeError(
                    "expected a dict of TensorData", f"{kind}.loss_fn_outputs[{i}]"
                )
        if not isinstance(self.metrics, dict):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may not type-check
            raise InputTypeError("expected a dict of numbers", f"{kind}.metrics")

    if not TYPE_CHECKING:  # type checkers should keep reporting unknown attributes

        def __getattr__(self, name):
            if name == "loss":
                raise AttributeError(
                    "ForwardBackwardOutput has no 'loss': the loss of the batch is "
                    'metrics["loss:sum"]'
                )
            raise AttributeError(f"'ForwardBackwardOutput' object has no attribute {name!r}")
