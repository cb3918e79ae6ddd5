"""Checks a training operation and converts its data to arrays, before any reaches the device.

Every refusal is an `InputError` whose path names the bad value, such as
`data[3].loss_fn_inputs["weights"]`.

Shapes: N tokens of one sequence, K targets of a row, M targets of all data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from tinkex.engine.training.custom_loss import CompiledLoss, compile_loss
from tinkex.engine.training.losses import Loss, LossColumns, find_loss, loss_settings
from tinkex.errors import InputError
from tinkex.types.datum import KEY_DTYPES
from tinkex.types.inputs import EncodedTextChunk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from tinkex.engine.decoder import DecoderConfig
    from tinkex.engine.protocol import TrainOp
    from tinkex.types import Datum, TensorData

    Floats = npt.NDArray[np.float32]
    Ints = npt.NDArray[np.int64]
    MostTargets = Callable[[Sequence[int]], int | None]
    """How many targets an operation with sequences of these lengths may have."""

_MAY_BE_INFINITE: Final = frozenset({"clip_low_threshold", "clip_high_threshold"})


@dataclass(frozen=True, slots=True)
class Example:
    """One checked datum; `shape` is that of its targets, [N] or [N, K]."""

    tokens: Ints
    targets: Ints
    values: Mapping[str, Any]
    """The other inputs of its loss, as arrays."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.targets.shape

    @property
    def targets_per_token(self) -> int:
        return 1 if self.targets.ndim == 1 else self.targets.shape[1]


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A checked training operation. `loss` is a built-in one, or `custom` is set."""

    op: TrainOp
    examples: list[Example]
    loss: Loss | None
    settings: dict[str, float]
    custom: CompiledLoss | None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(example.tokens) for example in self.examples]

    def targets(self, first: int = 0, last: int | None = None) -> int:
        """How many targets some of the data have together."""
        return sum(example.targets.size for example in self.examples[first:last])

    def columns(self, first: int, last: int) -> LossColumns:
        """The inputs of a built-in loss for some of the data, one value per target."""
        examples = self.examples[first:last]
        names = examples[0].values
        sizes = [example.targets.size for example in examples]
        return LossColumns(
            {
                name: torch.from_numpy(  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
                    np.concatenate([example.values[name].ravel() for example in examples])
                ).double()
                for name in names
            },
            sizes,
        )


def no_limit(lengths: Sequence[int]) -> None:
    """A `MostTargets` without a limit."""
    del lengths


def check_op(
    op: TrainOp, config: DecoderConfig, most_targets: MostTargets = no_limit
) -> TrainingJob:
    """Turn an operation into a job, or say what is wrong with it.

    `most_targets` bounds the dense size of sparse inputs; it is called before any is filled.
    """
    if not op.data:
        raise InputError("is empty; give at least one datum", "data")
    if op.loss_fn == "custom":
        return _custom_job(op, config, most_targets)
    loss = find_loss(op.loss_fn)
    settings = loss_settings(op.loss_fn, loss, op.loss_fn_config)

    def read(datum: Datum, shape: tuple[int, ...], path: str) -> dict[str, Any]:
        return _loss_inputs(datum, loss, op.loss_fn, shape, path)

    examples = _examples(op.data, config, read, most_targets)
    return TrainingJob(op, _same_columns(examples, settings), loss, settings, None)


def _custom_job(op: TrainOp, config: DecoderConfig, most_targets: MostTargets) -> TrainingJob:
    if op.custom_loss is None:
        raise InputError("there is no uploaded loss of this id", 'loss_fn_config["loss_id"]')
    for key in op.loss_fn_config:
        if key != "loss_id":
            raise InputError("a custom loss has no settings", f'loss_fn_config["{key}"]')
    custom = compile_loss(op.custom_loss.inputs, op.custom_loss.graph)
    examples = _examples(op.data, config, custom.read, most_targets)
    return TrainingJob(op, examples, None, {}, custom)


def _examples(
    data: Sequence[Datum],
    config: DecoderConfig,
    read: Callable[[Datum, tuple[int, ...], str], dict[str, Any]],
    most_targets: MostTargets,
) -> list[Example]:
    sequences = [_tokens(datum, config, f"data[{index}]") for index, datum in enumerate(data)]
    lengths = [len(tokens) for tokens in sequences]
    most = most_targets(lengths)
    examples: list[Example] = []
    total = 0
    for index, (datum, tokens) in enumerate(zip(data, sequences, strict=True)):
        path = f"data[{index}]"
        given = _given_targets(datum, len(tokens), config, path)
        total = _count(datum, path, total, most, max(lengths))
        targets = _targets(given, config, path)
        examples.append(Example(tokens, targets, read(datum, targets.shape, path)))
    return examples


def _count(datum: Datum, path: str, before: int, most: int | None, longest: int) -> int:
    """The number of values so far, counting the largest dense input of each datum."""
    sizes = {key: math.prod(tensor.dims) for key, tensor in datum.loss_fn_inputs.items()}
    key = max(sizes, key=lambda key: sizes[key])
    total = before + sizes[key]
    if most is not None and total > most:
        joint = f" and, with the data before it, {total}" if before else ""
        raise InputError(
            f"has {sizes[key]} values{joint}; an operation whose longest sequence has {longest} "
            f"tokens has memory for {most}",
            f'{path}.loss_fn_inputs["{key}"]',
        )
    return total


def _tokens(datum: Datum, config: DecoderConfig, path: str) -> Ints:
    given: list[int] = []
    for index, chunk in enumerate(datum.model_input.chunks):
        if not isinstance(chunk, EncodedTextChunk):
            raise InputError(
                f"{config.name} reads text only, not {type(chunk).__name__}",
                f"{path}.model_input.chunks[{index}]",
            )
        given.extend(chunk.tokens)
    place = f"{path}.model_input"
    if not given:
        raise InputError("is empty; a sequence has at least one token", place)
    if len(given) > config.max_context:
        raise InputError(
            f"has {len(given)} tokens; {config.name} reads at most {config.max_context}", place
        )
    if max(given) >= config.vocab_size or min(given) < 0:
        bad = next(i for i, token in enumerate(given) if not 0 <= token < config.vocab_size)
        raise InputError(
            f"token {given[bad]} at position {bad} is outside 0..{config.vocab_size - 1}", place
        )
    return np.array(given, np.int64)


def _given_targets(datum: Datum, length: int, config: DecoderConfig, path: str) -> TensorData:
    place = f'{path}.loss_fn_inputs["target_tokens"]'
    given = datum.loss_fn_inputs.get("target_tokens")
    if given is None:
        raise InputError("is missing; every loss needs it", place)
    dims = given.dims
    if len(dims) not in (1, 2) or dims[0] != length or not math.prod(dims):
        raise InputError(
            f"has shape {list(dims)}; for {length} input tokens it must be "
            f"[{length}] or [{length}, K]",
            place,
        )
    if len(dims) == 2 and dims[1] > config.vocab_size:
        raise InputError(f"has {dims[1]} columns; at most {config.vocab_size} are read", place)
    return given


def _targets(given: TensorData, config: DecoderConfig, path: str) -> Ints:
    place = f'{path}.loss_fn_inputs["target_tokens"]'
    targets = _filled(given, place)
    bad = (targets < 0) | (targets >= config.vocab_size)
    if bad.any():
        where = [int(i) for i in np.argwhere(bad)[0]]
        raise InputError(
            f"token {targets[tuple(where)]} at {where} is outside 0..{config.vocab_size - 1}", place
        )
    return targets


def _filled(tensor: TensorData, path: str) -> Any:
    """The tensor as a dense array; a CSR matrix is filled with zeros."""
    try:
        return tensor.to_numpy()
    except InputError as error:
        raise InputError(error.reason, path) from error


def _loss_inputs(
    datum: Datum, loss: Loss, name: str, shape: tuple[int, ...], path: str
) -> dict[str, Any]:
    known = (*loss.inputs, *loss.optional)
    values: dict[str, Any] = {}
    for key, tensor in datum.loss_fn_inputs.items():
        place = f'{path}.loss_fn_inputs["{key}"]'
        if key in known:
            values[key] = _column(tensor, key, shape, place)
        elif key not in KEY_DTYPES:
            # Inputs of other losses may stay in the datum; an unknown name is a mistake.
            raise InputError(_no_such_input(name, key, known), place)
    if "weights" in loss.inputs and "weights" not in values:
        # Without weights every target counts once.
        values["weights"] = np.ones(shape, np.float32)
    for key in loss.inputs:
        if key not in values:
            raise InputError(f"is missing; {name} needs it", f'{path}.loss_fn_inputs["{key}"]')
    return values


def _column(tensor: TensorData, key: str, shape: tuple[int, ...], path: str) -> Any:
    if tensor.dims != shape:
        raise InputError(
            f"has shape {list(tensor.dims)}, target_tokens has {list(shape)}; they must be equal",
            path,
        )
    array = _filled(tensor, path)
    allowed = ~np.isnan(array) if key in _MAY_BE_INFINITE else np.isfinite(array)
    if not allowed.all():
        where = [int(i) for i in np.argwhere(~allowed)[0]]
        raise InputError(f"is {array[tuple(where)]} at {where}; give finite numbers", path)
    return array


def _no_such_input(loss: str, key: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(key, known, 1)
    return f"{loss} does not read it; " + (
        f"did you mean {near[0]}?" if near else f"it reads {', '.join(('target_tokens', *known))}"
    )


def _same_columns(examples: list[Example], settings: Mapping[str, float]) -> list[Example]:
    """Give every example the same inputs: defaults where only some examples have an input."""
    names = dict.fromkeys(name for example in examples for name in example.values)
    filled: list[Example] = []
    for index, example in enumerate(examples):
        # A datum without a mask has a mask of ones.
        values = {
            name: example.values[name]
            if name in example.values
            else np.full(example.shape, settings.get(name, 1.0))
            for name in names
        }
        _check_bounds(values, settings, f"data[{index}]")
        filled.append(Example(example.tokens, example.targets, values))
    return filled


def _check_bounds(values: Mapping[str, Any], settings: Mapping[str, float], path: str) -> None:
    low, high = "clip_low_threshold", "clip_high_threshold"
    if low not in values and high not in values:
        return
    if np.any(values.get(low, settings.get(low)) > values.get(high, settings.get(high))):
        raise InputError(f"is above {high} for a token", f'{path}.loss_fn_inputs["{low}"]')
