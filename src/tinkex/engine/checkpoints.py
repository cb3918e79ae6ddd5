"""Adapters on disk: one safetensors file each, written whole or not at all.

A file holds the flat parameters and, for training to go on, the optimizer's moments and the
gradient accumulated so far. Its header describes the adapter and has a checksum of
everything else, so a damaged file is noticed before it is used.

Shapes: P all parameters of an adapter.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] -- its own stub

from tinkex.engine.base import SavedAdapter
from tinkex.engine.lora import check_lora, parameter_count, wrap
from tinkex.engine.optim import Moments
from tinkex.errors import InputError, RequestFailedError
from tinkex.types import LoraConfig
from tinkex.types.optimizers import optimizer_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.models.base import DecoderConfig
    from tinkex.types import OptimizerConfig

FORMAT: Final = 1
_HEADER: Final = "tinkex"
_CHECKSUM: Final = "sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a checkpoint holds; without moments it is weights alone."""

    base_model: str
    weights: LoraWeights
    optimizer: OptimizerConfig
    moments: Moments | None = None
    gradient_P: Tensor | None = None


class _Header(msgspec.Struct, kw_only=True):
    format: int
    base_model: str
    lora: dict[str, Any]
    optimizer: dict[str, Any]
    step: int


def save(state: State, path: Path) -> SavedAdapter:
    """Write a checkpoint; a file that is already there is replaced in one go."""
    tensors = {"weights": state.weights.flat_P}
    if state.moments is not None:
        tensors |= {"first": state.moments.first_P, "second": state.moments.second_P}
        if state.gradient_P is not None:
            tensors["gradient"] = state.gradient_P
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = msgspec.json.encode(
        _Header(
            format=FORMAT,
            base_model=state.base_model,
            lora=state.weights.lora.model_dump(),
            optimizer=state.optimizer.model_dump(),
            step=0 if state.moments is None else state.moments.step,
        )
    ).decode()
    metadata = {_HEADER: header, _CHECKSUM: _checksum(header, tensors)}
    write_atomically(path, partial(save_file, tensors, metadata=metadata))
    return SavedAdapter(size_bytes=path.stat().st_size, has_optimizer=state.moments is not None)


def load(path: Path, config: DecoderConfig) -> State:
    """Read a checkpoint onto the CPU; one that does not fit the base model is refused."""
    metadata, tensors = _read(path)
    text = metadata.get(_HEADER, "")
    if metadata.get(_CHECKSUM) != _checksum(text, tensors):
        raise _damaged(path, "its checksum does not match its content")
    try:
        header = msgspec.json.decode(text, type=_Header)
        lora = LoraConfig.model_validate(header.lora)
        check_lora(lora)
        optimizer = optimizer_config(header.optimizer, "optimizer")
    except (msgspec.MsgspecError, InputError) as error:
        raise _damaged(path, str(error)) from error
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


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with cast("Any", safe_open)(path, framework="pt") as file:  # it has no types
            # A copy: the file may be replaced while its memory map is in use.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 -- no dict
            return file.metadata() or {}, tensors
    except FileNotFoundError as error:
        raise _user("there is no checkpoint here; it may have been deleted") from error
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error


def _checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"/{name}/{tensor.dtype}/{list(tensor.shape)}/".encode())
        digest.update(memoryview(cast("Any", tensor.view(torch.uint8).numpy())))
    return digest.hexdigest()


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Have `write(temporary_path)` make a file, then put it in its place durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        _flush(temporary)
        temporary.replace(path)
        _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _user(message: str) -> RequestFailedError:
    return RequestFailedError(message, None, "user")


def _damaged(path: Path, reason: str) -> RequestFailedError:
    return RequestFailedError(f"the checkpoint {path.name} is damaged: {reason}", None, "server")
