"""Named tensors in one safetensors file with a checksum over all of it.

Used for checkpoints, which must survive a crash, and for parked adapters, which need not.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] -- its own stub

from tinkex.errors import RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

_HEADER: Final = "tinkex"
_CHECKSUM: Final = "sha256"


def write_tensors(path: Path, header: str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and a text that describes them; neither atomic nor durable by itself."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {_HEADER: header, _CHECKSUM: _checksum(header, plain)}
    try:
        save_file(plain, path, metadata=metadata)
    except SafetensorError as error:
        # Its message is the system's own, such as a full disk.
        raise OSError(str(error)) from error


def read_tensors(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The text and the tensors, on the CPU; a file that has changed since is refused."""
    try:
        with cast("Any", safe_open)(path, framework="pt") as file:  # it has no types
            # A copy: the file may be replaced while its memory map is in use.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 -- no dict
            metadata: dict[str, str] = file.metadata() or {}
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError) as error:
        raise damaged(path, str(error)) from error
    header = metadata.get(_HEADER, "")
    if metadata.get(_CHECKSUM) != _checksum(header, tensors):
        raise damaged(path, "its checksum does not match its content")
    return header, tensors


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


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
