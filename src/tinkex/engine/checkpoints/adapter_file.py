"""Adapters on disk: one safetensors file each.

A file holds the flat parameters and, for resuming training, the optimizer's moments and the
accumulated gradient. Its header describes the adapter and has a checksum of everything else, so a
damaged file is detected before it is used.

Shapes: P all parameters of an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tinkex.engine.backends.torch.adamw import Moments
from tinkex.engine.checkpoints.tensor_files import damaged, read_header, read_tensors, write_tensors
from tinkex.engine.lora import check_lora, parameter_count, wrap
from tinkex.errors import InputError, RequestFailedError
from tinkex.types import LoraConfig
from tinkex.types.optimizers import optimizer_config

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from tinkex.engine.decoder import DecoderConfig
    from tinkex.engine.lora import LoraWeights
    from tinkex.types import OptimizerConfig

FORMAT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a checkpoint holds; without moments it is weights alone."""

    base_model: str
    weights: LoraWeights
    optimizer: OptimizerConfig | None = None
    moments: Moments | None = None
    gradient_P: Tensor | None = None


class _Header(msgspec.Struct, kw_only=True):
    format: int
    base_model: str
    lora: dict[str, Any]
    optimizer: dict[str, Any] | None
    step: int


def size_bytes(state: State) -> int:
    """The size of its file, without the small header."""
    return sum(tensor.numel() * tensor.itemsize for tensor in _tensors(state).values())


def write(state: State, path: Path) -> None:
    """Write a checkpoint, neither atomically nor durably: the caller does both."""
    header = msgspec.json.encode(
        _Header(
            format=FORMAT,
            base_model=state.base_model,
            lora=state.weights.lora.model_dump(),
            optimizer=None if state.optimizer is None else state.optimizer.model_dump(),
            step=0 if state.moments is None else state.moments.step,
        )
    ).decode()
    write_tensors(path, header, _tensors(state))


def _tensors(state: State) -> dict[str, Tensor]:
    tensors = {"weights": state.weights.flat_P}
    if state.moments is not None:
        tensors |= {"first": state.moments.first_P, "second": state.moments.second_P}
        if state.gradient_P is not None:
            tensors["gradient"] = state.gradient_P
    return tensors


def base_model_of(path: Path) -> str:
    """The base model of a checkpoint, without reading the rest."""
    try:
        return msgspec.json.decode(read_header(path), type=_Header).base_model
    except msgspec.MsgspecError as error:
        raise damaged(path, str(error)) from error


def load(path: Path, config: DecoderConfig) -> State:
    """Read a checkpoint onto the CPU; one that does not fit the base model is refused."""
    try:
        text, tensors = read_tensors(path)
    except FileNotFoundError as error:
        raise _user("there is no checkpoint here; it may have been deleted") from error
    try:
        header = msgspec.json.decode(text, type=_Header)
        lora = LoraConfig.model_validate(header.lora)
        check_lora(lora)
        found = header.optimizer
        optimizer = None if found is None else optimizer_config(found, "optimizer")
    except (msgspec.MsgspecError, InputError) as error:
        raise damaged(path, str(error)) from error
    if header.format != FORMAT:
        raise _user(f"{path.name} has format {header.format}; this engine reads {FORMAT}")
    size = parameter_count(config, lora)
    sizes = {tuple(tensor.shape) for tensor in tensors.values()}
    if header.base_model != config.name or sizes != {(size,)}:
        raise _user(
            f"the checkpoint belongs to {header.base_model}; it cannot be loaded on {config.name}"
        )
    moments = None
    if "first" in tensors:
        moments = Moments(tensors["first"], tensors["second"], header.step)
    return State(
        base_model=header.base_model,
        weights=wrap(config, lora, tensors["weights"]),
        optimizer=optimizer,
        moments=moments,
        gradient_P=tensors.get("gradient"),
    )


def _user(message: str) -> RequestFailedError:
    return RequestFailedError(message, None, "user")
