"""Saved adapters as files to download: small ones from memory, large ones from disk.

The engine gives an export as a whole. What is too large to be held for every download is written
once to files without a name, which the system frees with the process however that ends.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast

import anyio
import anyio.to_thread

from tinkex.errors import StorageError
from tinkex.server import age

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import IO

    from tinkex.engine.protocol import Engine, Layout
    from tinkex.server.api.downloads import ByteSource

    Files = dict[str, IO[bytes]]
    NewFile = Callable[[], IO[bytes]]
    Recipients = tuple[str, ...] | None
    Key = tuple[str, "ExportKind", Recipients]

ExportKind = Literal["file", "archive"]

FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
ARCHIVE: Final = "archive.tar"
# Archives are of older clients, which know the vendor's own names of tensors.
_LAYOUTS: dict[ExportKind, Layout] = {"file": "peft", "archive": "tinker"}

_IN_MEMORY_BYTES = 1 << 20
_ON_DISK_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class InMemory:
    """A `ByteSource` that is small."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return len(self.data)

    async def read(self, start: int, count: int) -> bytes:
        """A part of it."""
        return self.data[start : start + count]

    def close(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A `ByteSource` that is an open file of its own; readers do not move each other."""

    descriptor: int
    size_bytes: int

    async def read(self, start: int, count: int) -> bytes:
        """A part of it."""
        return await anyio.to_thread.run_sync(os.pread, self.descriptor, count, start)

    def close(self) -> None:
        """Free it; the file itself stays while others have it open."""
        os.close(self.descriptor)


class Exports:
    """Exports by location, made when first asked for. Locations are never reused."""

    def __init__(
        self,
        engine: Engine,
        *,
        in_memory_bytes: int = _IN_MEMORY_BYTES,
        on_disk_bytes: int = _ON_DISK_BYTES,
    ) -> None:
        self._engine = engine
        self._in_memory_bytes = in_memory_bytes
        self._on_disk_bytes = on_disk_bytes
        # Mutable state: open files per export, longest unused first, and one lock for each that
        # is being made.
        self._kept: OrderedDict[Key, Files] = OrderedDict()
        self._making: defaultdict[Key, anyio.Lock] = defaultdict(anyio.Lock)

    async def open(
        self, location: str, kind: ExportKind, name: str, recipients: Recipients = None
    ) -> ByteSource | None:
        """One file of an export, to be closed by the caller; None when there is none such.

        With recipients the files are encrypted and their names end in `.age`.
        """
        key = (location, kind, recipients)
        lock = self._making[key]
        try:
            async with lock:
                return await self._open(key, name)
        finally:
            if not (lock.locked() or lock.statistics().tasks_waiting):
                self._making.pop(key, None)

    def close(self) -> None:
        """Free everything."""
        while self._kept:
            self._drop_oldest()

    async def _open(self, key: Key, name: str) -> ByteSource | None:
        if key not in self._kept:
            location, kind, recipients = key
            files = await self._engine.export_saved(location, layout=_LAYOUTS[kind])
            write = _tarred if kind == "archive" else _written
            if sum(map(len, files.values())) <= self._in_memory_bytes:
                ready = cast("dict[str, io.BytesIO]", write(files, recipients, io.BytesIO))
                return InMemory(ready[name].getvalue()) if name in ready else None
            try:
                self._kept[key] = await anyio.to_thread.run_sync(
                    write, files, recipients, tempfile.TemporaryFile
                )
            except OSError as error:
                # Not by its path: who downloads need not know where the server keeps its files.
                raise StorageError(
                    f"the server could not write a copy of the files: {error.strerror}"
                ) from error
            self._make_room()
        self._kept.move_to_end(key)
        file = self._kept[key].get(name)
        if file is None:
            return None
        descriptor = os.dup(file.fileno())
        return OnDisk(descriptor, os.fstat(descriptor).st_size)

    def _make_room(self) -> None:
        while len(self._kept) > 1 and self._size_bytes() > self._on_disk_bytes:
            self._drop_oldest()

    def _size_bytes(self) -> int:
        open_files = (file for files in self._kept.values() for file in files.values())
        return sum(os.fstat(file.fileno()).st_size for file in open_files)

    def _drop_oldest(self) -> None:
        _, files = self._kept.popitem(last=False)
        for file in files.values():
            file.close()


def _written(files: Mapping[str, bytes], recipients: Recipients, new: NewFile) -> Files:
    """Each file in one of its own, encrypted if there are recipients."""
    written: Files = {}
    for name, data in files.items():
        if recipients is None:
            target = written[name] = new()
            target.write(data)
        else:
            target = written[f"{name}{age.SUFFIX}"] = new()
            age.encrypt(io.BytesIO(data), target, recipients)
        target.flush()
    return written


def _tarred(files: Mapping[str, bytes], recipients: Recipients, new: NewFile) -> Files:
    """A plain tar with the files side by side."""
    target = new()
    if recipients is None:
        parts: Files = {name: io.BytesIO(data) for name, data in files.items()}
    else:
        parts = _written(files, recipients, new)
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name, part in parts.items():
            info = tarfile.TarInfo(name)
            info.size = part.seek(0, os.SEEK_END)
            part.seek(0)
            tar.addfile(info, part)
            part.close()
    target.flush()
    return {ARCHIVE: target}
