"""Named tensors in one safetensors file with a checksum over all of it.

Used for checkpoints, which must survive a crash, and for parked adapters, which need not.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] -- its own stub

from tinkex.errors import RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    from torch import Tensor

_ENTRY: Final = "tinkex"


def write_tensors(path: Path, header: str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and a text that describes them; neither atomic nor durable by itself."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # One entry: the library writes several in any order, and equal states must give equal files.
    metadata = {_ENTRY: f"{_checksum(header, plain)} {header}"}
    try:
        save_file(plain, path, metadata=metadata)
    except SafetensorError as error:
        # Its message is the system's own, such as a full disk.
        raise OSError(str(error)) from error


def read_tensors(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The text and the tensors, on the CPU; a file whose checksum differs is refused."""
    with _opened(path) as file:
        # A copy: the file may be replaced while its memory map is in use.
        tensors: dict[str, Tensor] = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 -- no dict
        checksum, header = _described(file)
    if checksum != _checksum(header, tensors):
        raise damaged(path, "its checksum does not match its content")
    return header, tensors


def read_header(path: Path) -> str:
    """The text only, without checking the checksum."""
    with _opened(path) as file:
        return _described(file)[1]


def _described(file: Any) -> tuple[str, str]:
    """The checksum and the text; empty if the file was not written by this module."""
    metadata: dict[str, str] = file.metadata() or {}
    checksum, _, header = metadata.get(_ENTRY, "").partition(" ")
    return checksum, header


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    try:
        with cast("Any", safe_open)(path, framework="pt") as file:  # it has no types
            yield file
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError) as error:
        raise damaged(path, str(error)) from error


def damaged(path: Path, reason: str) -> RequestFailedError:
    """The error for a file that cannot be used."""
    return RequestFailedError(f"the checkpoint {path.name} is damaged: {reason}", None, "server")


def _checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"/{name}/{tensor.dtype}/{list(tensor.shape)}/".encode())
        digest.update(memoryview(cast("Any", tensor.view(torch.uint8).numpy())))
    return digest.hexdigest()
