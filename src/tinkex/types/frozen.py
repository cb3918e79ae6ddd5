"""Private copies of values, for calls that read them again after they have returned.

The lists, dicts and arrays inside a value stay the caller's to change, as in the official
client: `datum.loss_fn_inputs`, `model_input.chunks`, `chunk.tokens`, `params.stop`, and any
array that a tensor was made from. A call is sent later, and sometimes twice, so it takes a
copy when it is made. The copy is what is checked and what is sent.

Arrays are copied only where somebody could still write to their memory. Token ids are packed
here instead of when they are sent, so that their copy costs next to nothing.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar, cast

from msgspec.structs import replace

from tinkex.errors import InputError, InputTypeError
from tinkex.types.coercion import rebase
from tinkex.types.datum import Datum, checked_spans
from tinkex.types.inputs import (
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    packed_tokens,
)
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.types.tensors import TensorData

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.types.inputs import ModelInputChunk

    _Tokens = Callable[[Sequence[int], str, int], Sequence[int]]

V = TypeVar("V")


def frozen(value: V, path: str = "") -> V:
    """A copy of `value` that nobody else can change.

    Raises `InputError` when a list inside it was changed into something that cannot be sent;
    `path` is the name of `value` in that message, such as `data[3]`.
    """
    freeze = _FREEZERS.get(value.__class__)
    if freeze is None:
        return copy.deepcopy(value)
    return cast("V", freeze(value, path or type(value).__name__))


def _plain_tokens(tokens: Sequence[int], path: str, index: int) -> Sequence[int]:
    """For JSON, whose encoder wants Python numbers and whose reader checks them."""
    return tuple(tokens)


def _packed_tokens(tokens: Sequence[int], path: str, index: int) -> Sequence[int]:
    """For protobuf, which wants four bytes each."""
    return packed_tokens(tokens, f"{path}.chunks[{index}].tokens") or ()


def _datum(datum: Datum, path: str) -> Datum:
    inputs = {key: _input(path, key, tensor) for key, tensor in datum.loss_fn_inputs.items()}
    made = object.__new__(Datum)
    put = object.__setattr__
    model_input = _model_input(datum.model_input, f"{path}.model_input", _packed_tokens)
    put(made, "model_input", model_input)
    put(made, "loss_fn_inputs", inputs)
    for name in ("model_input_spans", "loss_fn_input_spans"):
        put(made, name, checked_spans(getattr(datum, name), f"{path}.{name}"))
    return made


def _input(path: str, key: str, tensor: TensorData) -> TensorData:
    if not isinstance(tensor, TensorData):  # pyright: ignore[reportUnnecessaryIsInstance] -- anything can be put into a dict
        return tensor  # check_datum refuses it
    try:
        return _tensor(tensor)
    except InputError as error:
        raise rebase(error, f'{path}.loss_fn_inputs["{key}"]') from None


def _model_input(value: ModelInput, path: str, tokens: _Tokens = _plain_tokens) -> ModelInput:
    chunks: list[ModelInputChunk] = []
    for i, chunk in enumerate(value.chunks):
        if isinstance(chunk, EncodedTextChunk):
            chunks.append(replace(chunk, tokens=tokens(chunk.tokens, path, i)))
        elif isinstance(chunk, ImageChunk | ImageAssetPointerChunk | DmelChunk):  # pyright: ignore[reportUnnecessaryIsInstance] -- anything can be put into a list
            chunks.append(chunk)
        else:
            kind = type(cast("Any", chunk)).__name__
            raise InputTypeError(f"expected a chunk, got {kind}", f"{path}.chunks[{i}]")
    return replace(value, chunks=chunks)


def _tensor(tensor: TensorData, path: str = "") -> TensorData:
    return tensor._private()  # pyright: ignore[reportPrivateUsage] -- same package


def _sampling_params(params: SamplingParams, path: str) -> SamplingParams:
    if params.stop is None or isinstance(params.stop, str):
        return params
    return params.model_copy()


def _sample_request(request: SampleRequest, path: str) -> SampleRequest:
    target = request.target_prompt_logprobs
    return replace(
        request,
        prompt=_model_input(request.prompt, f"{path}.prompt"),
        sampling_params=_sampling_params(request.sampling_params, path),
        target_prompt_logprobs=None if target is None else _tensor(target),
    )


_FREEZERS: dict[type, Callable[[Any, str], Any]] = {
    Datum: _datum,
    ModelInput: _model_input,
    TensorData: _tensor,
    SamplingParams: _sampling_params,
    SampleRequest: _sample_request,
}
