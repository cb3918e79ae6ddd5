"""Tensors in the safetensors files of a Hugging Face folder: one file, or shards and an index.

Files are memory-mapped; a tensor is read from disk when it is asked for.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol, cast

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from tinkex.engine.models.hf_config import read_json
from tinkex.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Entry(msgspec.Struct):
    data_offsets: tuple[int, int]


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...


class _File(Protocol):
    """What we use of the library's open file, which has no types of its own."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str, /) -> _Slice: ...
    def get_tensor(self, name: str, /) -> Tensor: ...


def _open(path: Path) -> AbstractContextManager[_File]:
    return cast("AbstractContextManager[_File]", safe_open(path, framework="pt"))


class SafetensorsFolder:
    """The tensors of one folder, a context manager: files are open inside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, _File] = {}
        self._file_of: dict[str, str] = {}

    def __enter__(self) -> SafetensorsFolder:
        try:
            if (self._folder / INDEX).is_file():
                self._open_shards(read_json(self._folder / INDEX, _Index).weight_map)
            else:
                self._file_of = dict.fromkeys(self._open(SINGLE), SINGLE)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *outcome: object) -> None:
        self._stack.close()

    def names(self) -> frozenset[str]:
        """Every tensor there is."""
        return frozenset(self._file_of)

    def where(self, name: str) -> str:
        """Name the file that holds the tensor, or should."""
        return str(self._folder / self._file_of.get(name, INDEX if self._sharded else SINGLE))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the tensor's shape, or None when there is no such tensor."""
        file = self._file_of.get(name)
        return None if file is None else tuple(self._files[file].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Return the tensor on the CPU, mapped from its file."""
        tensor = self._files[self._file_of[name]].get_tensor(name)
        if tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{self.where(name)}: the tensor {name!r} holds {tensor.dtype}; "
                "supported are float32, float16 and bfloat16"
            )
        return tensor

    @property
    def _sharded(self) -> bool:
        return SINGLE not in self._files

    def _open_shards(self, file_of: Mapping[str, str]) -> None:
        held: dict[str, frozenset[str]] = {}
        for name, file in file_of.items():
            if "/" in file or "\\" in file:
                raise ModelError(f"{self._folder / INDEX}: {file!r} is not a plain file name")
            if file not in held:
                if not (self._folder / file).is_file():
                    raise ModelError(
                        f"{self._folder / file}: is missing; it holds the tensor {name!r}"
                    )
                held[file] = frozenset(self._open(file))
            if name not in held[file]:
                raise ModelError(f"{self._folder / file}: the tensor {name!r} is missing")
        self._file_of = dict(file_of)

    def _open(self, file: str) -> list[str]:
        path = self._folder / file
        try:
            opened = self._stack.enter_context(_open(path))
        except FileNotFoundError as error:
            raise ModelError(
                f"{self._folder}: there is neither {SINGLE} nor {INDEX} in this folder"
            ) from error
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: {_what_is_broken(path, error)}") from error
        self._files[file] = opened
        return opened.keys()


def _what_is_broken(path: Path, error: Exception) -> str:
    """Name the first tensor whose bytes a file no longer has; else what the library said."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > size_bytes:
                return "is truncated or is no safetensors file: its header is not whole"
            header = msgspec.json.decode(file.read(header_bytes), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return f"is no readable safetensors file: {error}"
    data_bytes = size_bytes - 8 - header_bytes
    cut = [name for name, entry in entries.items() if entry.data_offsets[1] > data_bytes]
    if cut:
        first = min(cut, key=lambda name: entries[name].data_offsets)
        return f"is truncated: it ends inside or before the tensor {first!r}"
    return f"is no readable safetensors file: {error}"
