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
from typing import TYPE_CHECKING, Final, Literal

import anyio
import anyio.to_thread

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import IO

    from tinkex.engine.base import Engine, Layout
    from tinkex.server.api.ranges import Source

ExportKind = Literal["file", "archive"]

FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
ARCHIVE: Final = "archive.tar"
# Archives are of older clients, which know the vendor's own names of tensors.
_LAYOUTS: dict[ExportKind, Layout] = {"file": "peft", "archive": "tinker"}

_IN_MEMORY_BYTES = 1 << 20
_ON_DISK_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class InMemory:
    """A `Source` that is small."""

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
    """A `Source` that is an open file of its own; readers do not move each other."""

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
        self._kept: OrderedDict[tuple[str, ExportKind], dict[str, IO[bytes]]] = OrderedDict()
        self._making: defaultdict[tuple[str, ExportKind], anyio.Lock] = defaultdict(anyio.Lock)

    async def open(self, location: str, kind: ExportKind, name: str) -> Source | None:
        """One file of an export, to be closed by the caller; None when there is none such."""
        key = (location, kind)
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

    async def _open(self, key: tuple[str, ExportKind], name: str) -> Source | None:
        if key not in self._kept:
            location, kind = key
            files = await self._engine.export_saved(location, layout=_LAYOUTS[kind])
            if sum(map(len, files.values())) <= self._in_memory_bytes:
                ready = {ARCHIVE: _tar(files)} if kind == "archive" else files
                return InMemory(ready[name]) if name in ready else None
            write = _write_tar if kind == "archive" else _write_files
            self._kept[key] = await anyio.to_thread.run_sync(write, files)
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


def _tar(files: Mapping[str, bytes]) -> bytes:
    target = io.BytesIO()
    _fill_tar(target, files)
    return target.getvalue()


def _fill_tar(target: IO[bytes], files: Mapping[str, bytes]) -> None:
    """A plain tar with the files side by side."""
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def _write_tar(files: Mapping[str, bytes]) -> dict[str, IO[bytes]]:
    target = tempfile.TemporaryFile()  # noqa: SIM115 - kept open by Exports
    _fill_tar(target, files)
    target.flush()
    return {ARCHIVE: target}


def _write_files(files: Mapping[str, bytes]) -> dict[str, IO[bytes]]:
    written: dict[str, IO[bytes]] = {}
    for name, data in files.items():
        written[name] = tempfile.TemporaryFile()  # noqa: SIM115 - kept open by Exports
        written[name].write(data)
        written[name].flush()
    return written
