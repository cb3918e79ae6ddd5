"""Checks of training data before it is sent.

A datum that the server could only fail on is refused here, with the name of the bad value and
what to do about it. What the protocol allows passes: negative or all-zero weights, several
targets per position, inputs no built-in loss knows, images of unknown length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tinkex.errors import InputError, InputTypeError
from tinkex.types.datum import KEY_DTYPES, Datum
from tinkex.types.frozen import frozen
from tinkex.types.inputs import DmelChunk, EncodedTextChunk
from tinkex.types.tensors import TensorData
from tinkex.types.training import datum_list, loss_name

if TYPE_CHECKING:
    from tinkex.types.arrays import Array

_RL_INPUTS: Final = ("target_tokens", "logprobs", "advantages")
# stable_reinforce and custom losses declare their inputs elsewhere.
_REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    "cross_entropy": ("target_tokens",),
    "importance_sampling": _RL_INPUTS,
    "ppo": _RL_INPUTS,
    "cispo": _RL_INPUTS,
    "dro": _RL_INPUTS,
    "gspo": _RL_INPUTS,
}
_PER_POSITION: Final = ("target_tokens", "weights", "advantages", "logprobs", "sequence_ratio_mask")


def batch_to_send(data: Any, loss_fn: Any, vocab_size: int | None = None) -> list[Datum]:
    """The datums in `data`, or an `InputError` that names the first bad one.

    They are still the caller's, who may change them: encode or copy them before the call returns.
    """
    loss_name(loss_fn, "loss_fn")
    # With a known vocabulary the ids are read twice, so a copy that has them packed is cheaper.
    batch = [
        datum if vocab_size is None and _is_plain(datum) else frozen(datum, f"data[{i}]")
        for i, datum in enumerate(datum_list(data, "data"))
    ]
    if not batch:
        raise InputError("No data provided; give at least one Datum", "data")
    for index, datum in enumerate(batch):
        check_datum(datum, index, loss_fn, vocab_size)
    return batch


def check_datum(datum: Any, index: int, loss_fn: str, vocab_size: int | None = None) -> None:
    """Raise `InputError` when `datum` could not be trained on; `index` is its place in the batch.

    Token ids are compared with `vocab_size` when that is known.
    """
    path = f"data[{index}]"
    if not isinstance(datum, Datum):
        raise InputTypeError(f"expected Datum, got {type(datum).__name__}", path)
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
        raise InputTypeError(f"names are strings, got {key!r}", f"{path}.loss_fn_inputs")
    if not isinstance(tensor, TensorData):
        raise InputTypeError(f"expected TensorData, got {type(tensor).__name__}", _at(path, key))
    dtype = KEY_DTYPES.get(key)
    if dtype is None:
        return
    if tensor.dtype != dtype:
        raise InputTypeError(f"expected {dtype}, got {tensor.dtype}", _at(path, key))
    values = tensor._numpy  # pyright: ignore[reportPrivateUsage] -- same package
    problem = _bad_target(values, vocab_size) if key == "target_tokens" else _not_finite(values)
    if problem is not None:
        raise InputError(problem, _at(path, key))


def _bad_target(ids: Array, vocab_size: int | None) -> str | None:
    import numpy as np

    if not ids.size:
        return None
    limit = 2**31 if vocab_size is None else vocab_size
    # Read without a sign, a negative id is a huge one. argmax is numpy's fastest way through.
    unsigned = ids.view(np.uint64)
    if unsigned.item(unsigned.argmax()) < limit:
        return None
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
