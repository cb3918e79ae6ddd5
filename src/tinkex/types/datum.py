"""One training example, and the provenance of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from tinkex.errors import InputError, InputTypeError, quoted
from tinkex.types.arrays import is_torch, plain_number, to_array
from tinkex.types.inputs import ModelInput, copy_input
from tinkex.types.tensors import TensorData
from tinkex.types.value import is_mapping

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinkex.types.arrays import TensorDtype

LossFnInputs = dict[str, TensorData]
"""The tensors a loss reads, by name."""

KEY_DTYPES: Final[dict[str, TensorDtype]] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
"""Element types of the loss inputs the protocol knows; others keep what they are given as."""

_SPARSE_KEYS: Final = frozenset({"target_tokens", "weights"})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.sequence_id, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may not type-check
            raise InputTypeError("expected str", f"{name}.sequence_id")
        if not self.sequence_id:
            raise InputError("must not be empty", f"{name}.sequence_id")
        for field_name in ("offset", "length"):
            number = plain_number(getattr(self, field_name))
            object.__setattr__(self, field_name, number)
            if isinstance(number, bool) or not isinstance(number, int):
                raise InputTypeError(
                    f"expected int, got {type(number).__name__}", f"{name}.{field_name}"
                )
            if not 0 <= number < 2**63:
                raise InputError(f"must be 0 or more, got {number}", f"{name}.{field_name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptProvenanceSpan(_Span):
    """A run of tokens taken from the prompt of the request that made `sequence_id`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledProvenanceSpan(_Span):
    """A run of tokens taken from the sampled sequence `sequence_id`."""


ProvenanceSpans = list[PromptProvenanceSpan | SampledProvenanceSpan]
"""Consecutive runs that together cover one field."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One training example: the input, and the tensors its loss reads.

    Values of `loss_fn_inputs` may be lists, tuples, numpy arrays, torch tensors or
    `TensorData`. Names the protocol knows have a fixed element type whatever they are given
    as; other names keep theirs (whole numbers int64, the rest float32).
    """

    model_input: ModelInput
    loss_fn_inputs: LossFnInputs = field(default_factory=dict[str, TensorData])
    model_input_spans: ProvenanceSpans | None = None
    loss_fn_input_spans: ProvenanceSpans | None = None

    if TYPE_CHECKING:
        # Anything array-like goes in; what is read back is always TensorData.
        def __init__(
            self,
            model_input: ModelInput,
            loss_fn_inputs: Mapping[str, Any] = ...,
            model_input_spans: Sequence[PromptProvenanceSpan | SampledProvenanceSpan] | None = None,
            loss_fn_input_spans: Sequence[PromptProvenanceSpan | SampledProvenanceSpan]
            | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        put = object.__setattr__
        if not isinstance(self.model_input, ModelInput):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may not type-check
            put(self, "model_input", _model_input(self.model_input))
        put(self, "loss_fn_inputs", _loss_fn_inputs(self.loss_fn_inputs))
        if (self.model_input_spans is None) != (self.loss_fn_input_spans is None):
            raise InputError("give both span lists, or neither", "Datum.loss_fn_input_spans")
        for name in ("model_input_spans", "loss_fn_input_spans"):
            put(self, name, _checked_spans(getattr(self, name), f"Datum.{name}"))

    def with_provenance(
        self,
        model_input: Sequence[PromptProvenanceSpan | SampledProvenanceSpan],
        loss_fn_inputs: Sequence[PromptProvenanceSpan | SampledProvenanceSpan],
    ) -> Datum:
        """A copy that says which sampled sequences its tokens came from."""
        made = Datum(self.model_input, self.loss_fn_inputs, model_input, loss_fn_inputs)
        _check_cover(made.model_input_spans, self.model_input.length, "model_input")
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is not None and targets.to_numpy().ndim == 1:
            _check_cover(made.loss_fn_input_spans, len(targets.to_numpy()), "loss_fn_inputs")
        return made


def _model_input(value: Any) -> ModelInput:
    if is_mapping(value):
        return ModelInput.model_validate(value)
    raise InputTypeError(
        f"expected ModelInput, got {type(value).__name__}; make one with ModelInput.from_ints(...)",
        "Datum.model_input",
    )


def _loss_fn_inputs(inputs: Any) -> LossFnInputs:
    if not is_mapping(inputs):
        raise InputTypeError(
            f"expected a dict of tensors, got {type(inputs).__name__}", "Datum.loss_fn_inputs"
        )
    tensors: LossFnInputs = {}
    for key, value in inputs.items():
        if not isinstance(key, str):
            raise InputTypeError(f"names are strings, got {quoted(key)}", "Datum.loss_fn_inputs")
        tensors[key] = _tensor(key, value)
    return tensors


def _tensor(key: str, value: Any) -> TensorData:
    dtype, path = KEY_DTYPES.get(key), f'loss_fn_inputs["{key}"]'
    if isinstance(value, TensorData):
        if dtype is None or value.dtype == dtype:
            return value
        array = to_array(value._numpy, dtype, path)  # pyright: ignore[reportPrivateUsage] -- same package
        return TensorData._make(array, value._shape, value._crow, value._col)  # pyright: ignore[reportPrivateUsage] -- same package
    array = to_array(value, dtype, path)
    if array.ndim == 0:
        raise InputTypeError("expected one value per position, got a single number", path)
    if key in _SPARSE_KEYS and is_torch(value):
        return TensorData._sparsified(array)  # pyright: ignore[reportPrivateUsage] -- same package
    return TensorData._dense(array, value)  # pyright: ignore[reportPrivateUsage] -- same package


def _checked_spans(spans: Any, path: str) -> ProvenanceSpans | None:
    """A new list of the spans, or an `InputTypeError` for something else."""
    if spans is None:
        return None
    if not isinstance(spans, list | tuple):
        raise InputTypeError(f"expected a list of spans, got {type(spans).__name__}", path)
    for i, span in enumerate(cast("list[Any]", spans)):
        if not isinstance(span, PromptProvenanceSpan | SampledProvenanceSpan):
            raise InputTypeError(
                "expected PromptProvenanceSpan or SampledProvenanceSpan, "
                f"got {type(span).__name__}",
                f"{path}[{i}]",
            )
    return list(cast("ProvenanceSpans", spans))


def copy_datum(datum: Datum, path: str) -> Datum:
    """A copy that does not change when the caller changes the lists and arrays inside `datum`.

    Arrays are copied only where other code could write to their memory. Raises `InputError` when
    a list was changed into something that cannot be sent; `path` is the datum's name in it.
    """
    made = object.__new__(Datum)
    put = object.__setattr__
    put(made, "model_input", copy_input(datum.model_input, f"{path}.model_input", pack=True))
    tensors = {key: _copy_tensor(path, key, each) for key, each in datum.loss_fn_inputs.items()}
    put(made, "loss_fn_inputs", tensors)
    for name in ("model_input_spans", "loss_fn_input_spans"):
        put(made, name, _checked_spans(getattr(datum, name), f"{path}.{name}"))
    return made


def _copy_tensor(path: str, key: str, tensor: TensorData) -> TensorData:
    if not isinstance(tensor, TensorData):  # pyright: ignore[reportUnnecessaryIsInstance] -- anything can be put into a dict
        return tensor  # check_datum refuses it
    try:
        return tensor._copy()  # pyright: ignore[reportPrivateUsage] -- same package
    except InputError as error:
        from tinkex.types.coercion import rebase

        raise rebase(error, f'{path}.loss_fn_inputs["{key}"]') from None


def _check_cover(spans: ProvenanceSpans | None, length: int, path: str) -> None:
    covered = sum(span.length for span in spans or ())
    if covered != length:
        raise InputError(f"the spans cover {covered} positions of {length}", path)
