"""Training passes: losses and their inputs, checks of the data, requests and results.

A datum that the server could only fail on is refused here, with the name of the bad value and
what to do about it. What the protocol allows passes: negative or all-zero weights, several
targets per position, inputs no built-in loss knows, images of unknown length.

The batches are plain dataclasses because they travel as protobuf, not as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from tinkex.errors import InputError, InputTypeError, quoted, whole_text
from tinkex.types.arrays import plain_number
from tinkex.types.datum import KEY_DTYPES, Datum, copy_datum
from tinkex.types.inputs import DmelChunk, EncodedTextChunk
from tinkex.types.tensors import TensorData
from tinkex.types.value import Usage, Value, is_mapping

if TYPE_CHECKING:
    from tinkex.types.arrays import Array

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

_RL_INPUTS: Final = ("target_tokens", "logprobs", "advantages")
_REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    "cross_entropy": ("target_tokens",),
    "importance_sampling": _RL_INPUTS,
    "ppo": _RL_INPUTS,
    "cispo": _RL_INPUTS,
    "dro": _RL_INPUTS,
    "gspo": _RL_INPUTS,
    # These declare their inputs elsewhere.
    "stable_reinforce": (),
    "custom": (),
}
_PER_POSITION: Final = ("target_tokens", "weights", "advantages", "logprobs", "sequence_ratio_mask")


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
        raise InputError(f"{quoted(name)} is not a loss; there are {known}", path)
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
            raise InputTypeError(f"names are strings, got {quoted(name)}", path)
        where = f'{path}["{name}"]'
        whole_text(name, where)
        checked[name] = _setting(value, where)
    return checked


def _setting(value: Any, path: str) -> float | str:
    value = plain_number(value)
    if isinstance(value, str):
        return whole_text(value, path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputTypeError(f"expected a number or text, got {type(value).__name__}", path)
    try:
        number = float(value)
    except OverflowError:
        raise InputError("too large for a float", path) from None
    if not math.isfinite(number):
        raise InputError(f"must be a finite number, got {number}", path)
    return number


def batch_to_send(data: Any, loss_fn: Any, vocab_size: int | None = None) -> list[Datum]:
    """The datums in `data`, or an `InputError` that names the first bad one.

    The caller may still change them: encode or copy them before the call returns.
    """
    if loss_fn.__class__ is not str or loss_fn not in _REQUIRED:
        loss_name(loss_fn, "loss_fn")
    batch = datum_list(data, "data")
    if not batch:
        raise InputError("No data provided; give at least one Datum", "data")
    for index, datum in enumerate(batch):
        # With a known vocabulary the ids are read twice, so a copy that has them packed is cheaper.
        if vocab_size is not None or not _is_plain(datum):
            datum = batch[index] = copy_datum(datum, f"data[{index}]")
        check_datum(datum, index, loss_fn, vocab_size)
    return batch


def check_datum(datum: Datum, index: int, loss_fn: str, vocab_size: int | None = None) -> None:
    """Raise `InputError` when `datum` could not be trained on; `index` is its place in the batch.

    Token ids are compared with `vocab_size` when that is known.
    """
    path = f"data[{index}]"
    length = _input_length(datum, path)
    if vocab_size is not None:
        _check_input_ids(datum, vocab_size, path)
    for key in _REQUIRED.get(loss_fn, ()):
        if key not in datum.loss_fn_inputs:
            raise InputError(f"{loss_fn} needs it", _at(path, key))
    for key, tensor in datum.loss_fn_inputs.items():
        _check_tensor(tensor, key, path, vocab_size)
    if loss_fn != "custom":
        _check_shapes(datum, length, path)


def _is_plain(datum: Datum) -> bool:
    """Whether a datum has only text and dense tensors, all of which are as they were made."""
    if datum.model_input_spans is not None or datum.loss_fn_input_spans is not None:
        return False
    for chunk in datum.model_input.chunks:
        if chunk.__class__ is not EncodedTextChunk:
            return False
    for tensor in datum.loss_fn_inputs.values():
        if tensor.__class__ is not TensorData or not tensor._is_intact():  # pyright: ignore[reportPrivateUsage] -- same package
            return False
    return True


def _at(path: str, key: str) -> str:
    """The place of a loss input; only asked for when something is wrong with it."""
    return f'{path}.loss_fn_inputs["{key}"]'


def _input_length(datum: Datum, path: str) -> int | None:
    """Length in positions, or None when only the server can know it."""
    length = 0
    for chunk in datum.model_input.chunks:
        if isinstance(chunk, EncodedTextChunk):
            length += len(chunk.tokens)
        elif isinstance(chunk, DmelChunk) or chunk.expected_tokens is not None:
            length += chunk.length
        else:
            return None
    if length == 0:
        raise InputError("is empty; a datum needs at least one token", f"{path}.model_input")
    return length


def _check_input_ids(datum: Datum, vocab_size: int, path: str) -> None:
    import numpy as np

    for i, chunk in enumerate(datum.model_input.chunks):
        if not isinstance(chunk, EncodedTextChunk) or not chunk.tokens:
            continue
        ids = np.frombuffer(chunk.packed(), "<i4")
        if ids.item(ids.argmax()) >= vocab_size:
            where = int((ids >= vocab_size).argmax())
            raise InputError(
                f"token id {chunk.tokens[where]} is outside the vocabulary of {vocab_size}; "
                "was it made with another model's tokenizer?",
                f"{path}.model_input.chunks[{i}].tokens[{where}]",
            )


def _check_tensor(tensor: Any, key: str, path: str, vocab_size: int | None) -> None:
    if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- anything can be put into a dict
        raise InputTypeError(f"names are strings, got {quoted(key)}", f"{path}.loss_fn_inputs")
    if not isinstance(tensor, TensorData):
        raise InputTypeError(f"expected TensorData, got {type(tensor).__name__}", _at(path, key))
    dtype = KEY_DTYPES.get(key)
    if dtype is None:
        return
    if tensor.dtype != dtype:
        raise InputTypeError(f"expected {dtype}, got {tensor.dtype}", _at(path, key))
    values = tensor._numpy  # pyright: ignore[reportPrivateUsage] -- same package
    if key != "target_tokens":
        problem = _not_finite(values)
    else:
        # Read without a sign, a negative id is a huge one. argmax is numpy's fastest way through.
        unsigned = values.view("u8")
        limit = 2**31 if vocab_size is None else vocab_size
        if not unsigned.size or unsigned.item(unsigned.argmax()) < limit:
            return
        problem = _bad_target(values, vocab_size)
    if problem is not None:
        raise InputError(problem, _at(path, key))


def _bad_target(ids: Array, vocab_size: int | None) -> str:
    low, high = int(ids.min()), int(ids.max())
    if low < 0:
        return f"{low} is not a token id; to ignore a position use any id there and weight 0"
    outside = "32 bits" if vocab_size is None else f"the vocabulary of {vocab_size}"
    return f"token id {high} is outside {outside}"


def _not_finite(values: Array) -> str | None:
    import numpy as np

    if not values.size:
        return None
    finite = np.isfinite(values)
    where = int(finite.argmin())  # the first that is not, if there is one
    if finite.item(where):
        return None
    return (
        f"{values.reshape(-1)[where]} at position {where}; use finite numbers, "
        "and weight or advantage 0 for positions that do not count"
    )


def _check_shapes(datum: Datum, length: int | None, path: str) -> None:
    inputs = datum.loss_fn_inputs
    for key in _PER_POSITION:
        if key not in inputs:
            continue
        shape = inputs[key].dims
        if not shape:
            raise InputError("expected one value per position, got a single number", _at(path, key))
        if length is not None and shape[0] != length:
            raise InputError(
                f"has {shape[0]} positions but model_input has {length}; row i belongs to the "
                "prediction after input position i, so both have the same length",
                _at(path, key),
            )
    if "weights" in inputs and "target_tokens" in inputs:
        weights, targets = inputs["weights"].dims, inputs["target_tokens"].dims
        if weights != targets:
            raise InputError(
                f"has shape {list(weights)} but target_tokens has {list(targets)}; give one weight "
                "per target",
                _at(path, "weights"),
            )


@dataclass(frozen=True, slots=True)
class ForwardBackwardRequest:
    """A forward and backward pass over a batch."""

    forward_backward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None

    def __post_init__(self) -> None:
        _check_request(self, "forward_backward_input")


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A forward pass over a batch."""

    forward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None

    def __post_init__(self) -> None:
        _check_request(self, "forward_input")


def _check_request(request: Any, batch_field: str) -> None:
    kind = type(request).__name__
    if not isinstance(getattr(request, batch_field), ForwardBackwardInput):
        raise InputTypeError("expected ForwardBackwardInput", f"{kind}.{batch_field}")
    if not isinstance(request.model_id, str):
        raise InputTypeError("expected str", f"{kind}.model_id")
    seq_id = request.seq_id
    if seq_id is not None and (isinstance(seq_id, bool) or not isinstance(seq_id, int)):
        raise InputTypeError("expected int or None", f"{kind}.seq_id")


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
            tensors = output.values() if isinstance(output, dict) else (None,)  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may not type-check
            for tensor in tensors:
                if not isinstance(tensor, TensorData):
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
