"""Offloading of adapters: those that do not fit on the device are parked in memory or on disk.

A `Parking` owns the memory of all values on its shelves. The least recently used is offloaded
first: from the device to host memory, from there to a file. It is loaded, bit for bit, on its next
use. Values are never modified, so a file stays valid while its value is on the shelf. A value that
is larger than the device budget is refused.

A spare value is dropped instead of parked, because its owner can recreate it.

Values that are used within `holding` stay on the device until it ends, even beyond the budget: a
running pass needs them. A `Parking` belongs to one thread; only `counts` may be called from others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import torch

from tinkex.engine.checkpoints.tensor_files import read_tensors, write_tensors
from tinkex.errors import RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    from torch import Tensor

    from tinkex.engine.checkpoints.scratch import ScratchFolder

    Tensors = dict[str, Tensor]

T = TypeVar("T")
Key = tuple[str, str]
"""A shelf, and a name on it."""


@dataclass(frozen=True, slots=True)
class Packed(Generic[T]):
    """A value as tensors, and a function that rebuilds it from equal ones."""

    tensors: Tensors
    rebuild: Callable[[Tensors], T]


@dataclass(slots=True)
class _Entry:
    """One value: on the device, or its tensors in host memory, or only in a file."""

    pack: Callable[[Any], Packed[Any]]
    size_bytes: int
    value: Any
    spare: bool = False
    rebuild: Callable[[Tensors], Any] | None = None
    host: Tensors | None = None
    file: Path | None = None

    @property
    def ready(self) -> bool:
        return self.rebuild is None


class ParkingCounts(NamedTuple):
    """Values on the device and parked, copies left out."""

    resident: int
    parked: int
    resident_bytes: int
    parked_bytes: int


class Parking:
    """Budgets in bytes for the device and for host memory; None is no limit.

    Where the device is the host, `host_bytes` is 0: values that do not fit go to disk directly.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        device_bytes: int | None = None,
        host_bytes: int | None = 0,
        folder: ScratchFolder | None = None,
    ) -> None:
        self.device_bytes = device_bytes
        self._device = torch.device(device)
        self._host_bytes = host_bytes
        self._folder = folder
        # Mutable state: every value, least recently used first; the shelves of copies; the keys
        # used since `holding` began; and a number for file names.
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._copies: set[str] = set()
        self._held: set[Key] | None = None
        self._files = 0

    def shelf(self, name: str, pack: Callable[[T], Packed[T]]) -> Shelf[T]:
        """A shelf for values of one kind."""
        return Shelf(self, name, pack)

    def copies(self, name: str, pack: Callable[[T], Packed[T]]) -> Shelf[T]:
        """A shelf for copies of other values: all of them spare, none counted as adapters."""
        self._copies.add(name)
        return Shelf(self, name, pack, spare=True)

    @contextmanager
    def holding(self) -> Generator[None]:
        """Keep the values that are used within the block on the device."""
        outer, self._held = self._held, set(self._held or ())
        try:
            yield
        finally:
            self._held = outer

    @property
    def on_device_bytes(self) -> int:
        """Bytes of values on the device."""
        return sum(entry.size_bytes for entry in self._entries.values() if entry.ready)

    @property
    def in_host_bytes(self) -> int:
        """Bytes of values parked in host memory."""
        return sum(entry.size_bytes for entry in self._entries.values() if entry.host is not None)

    def counts(self) -> ParkingCounts:
        """What is on the device and what is parked; for any thread."""
        # One atomic copy: the owning thread may modify the dict.
        entries = list(self._entries.items())
        found = [
            (entry.ready, entry.size_bytes)
            for (shelf, _), entry in entries
            if shelf not in self._copies
        ]
        resident = [size for ready, size in found if ready]
        parked = [size for ready, size in found if not ready]
        return ParkingCounts(len(resident), len(parked), sum(resident), sum(parked))

    def close(self) -> None:
        """Drop all values and remove the files."""
        self._entries.clear()
        if self._folder is not None:
            self._folder.close()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def names(self, shelf: str) -> list[str]:
        """The names on one shelf."""
        return [name for own, name in self._entries if own == shelf]

    def size_of(self, key: Key) -> int:
        """Bytes of one value."""
        return self._entries[key].size_bytes

    def check(self, name: str, size_bytes: int) -> None:
        """Refuse a value that is larger than the device budget."""
        if self.device_bytes is not None and size_bytes > self.device_bytes:
            raise RequestFailedError(
                f"{name!r} takes {size_bytes} bytes; {self.device_bytes} are set aside for "
                "adapters on the device (the engine's setting adapter_bytes)",
                None,
                "user",
            )

    def put(
        self, key: Key, value: T, pack: Callable[[T], Packed[T]], *, spare: bool = False
    ) -> None:
        """Add or replace a value; when it raises, the old value stays."""
        size = _size(pack(value).tensors)
        self.check(key[1], size)
        self._make_room(size, apart_from=key)
        before = self._entries.pop(key, None)
        self._use(key, _Entry(pack, size, value, spare))
        if before is not None:
            _remove_file(before)

    def get(self, key: Key) -> Any:
        """A value, loaded onto the device; raises `KeyError`."""
        entry = self._entries[key]
        if not entry.ready:
            self._make_room(entry.size_bytes, apart_from=key)
            self._bring_back(key, entry)
        self._use(key, entry)
        return entry.value

    def peek(self, key: Key) -> Any:
        """A value without loading it onto the device, to be copied."""
        entry = self._entries[key]
        if entry.rebuild is None:
            return entry.value
        return entry.rebuild(self._parked(key, entry))

    def set_spare(self, key: Key, *, spare: bool) -> None:
        """Set whether a value is dropped instead of parked."""
        entry = self._entries[key]
        entry.spare = spare
        if spare and not entry.ready and entry.host is None:
            self.drop(key)  # only its file is left, and a spare value needs none

    def drop(self, key: Key) -> None:
        """Drop a value and remove its file; unknown keys are ignored."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            _remove_file(entry)

    def _use(self, key: Key, entry: _Entry) -> None:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        if self._held is not None:
            self._held.add(key)

    def _make_room(self, size: int, *, apart_from: Key) -> None:
        if self.device_bytes is None:
            return
        used = self.on_device_bytes
        mine = self._entries.get(apart_from)
        if mine is not None and mine.ready:
            used -= mine.size_bytes
        for key, entry in list(self._entries.items()):
            if used + size <= self.device_bytes:
                return
            if entry.ready and key != apart_from and key not in (self._held or ()):
                self._park(key, entry)
                used -= entry.size_bytes

    def _park(self, key: Key, entry: _Entry) -> None:
        if entry.spare:
            self.drop(key)
            return
        packed = entry.pack(entry.value)
        if self._fits_host(entry.size_bytes):
            entry.host = {name: tensor.cpu() for name, tensor in packed.tensors.items()}
        else:
            self._write(key, entry, packed.tensors)
        entry.value, entry.rebuild = None, packed.rebuild

    def _fits_host(self, size: int) -> bool:
        """Make room in host memory; return whether the value fits."""
        if self._host_bytes is None:
            return True
        if size > self._host_bytes:
            return False
        used = self.in_host_bytes
        for key, entry in list(self._entries.items()):
            if used + size <= self._host_bytes:
                break
            if entry.host is not None:
                if entry.spare:
                    self.drop(key)
                else:
                    self._write(key, entry, entry.host)
                entry.host = None
                used -= entry.size_bytes
        return True

    def _write(self, key: Key, entry: _Entry, tensors: Tensors) -> None:
        if entry.file is not None:  # written before; the value has not changed
            return
        if self._folder is None:
            raise _failed(f"no folder was given to park {key[1]!r} in", None)
        path = None
        try:
            path = self._folder.path() / f"{self._files}.safetensors"
            write_tensors(path, "/".join(key), tensors)
        except OSError as error:
            if path is not None:
                path.unlink(missing_ok=True)
            raise _failed(f"{key[1]!r} cannot be parked on disk: {error}", error) from error
        self._files += 1
        entry.file = path

    def _parked(self, key: Key, entry: _Entry) -> Tensors:
        """The tensors of a value that is not on the device."""
        if entry.host is not None:
            return entry.host
        assert entry.file is not None
        try:
            header, tensors = read_tensors(entry.file)
        except FileNotFoundError as error:
            raise _failed(f"the file that {key[1]!r} was parked in is gone", error) from error
        assert header == "/".join(key)
        return tensors

    def _bring_back(self, key: Key, entry: _Entry) -> None:
        tensors = self._parked(key, entry)
        assert entry.rebuild is not None
        entry.value = entry.rebuild(
            {name: tensor.to(self._device) for name, tensor in tensors.items()}
        )
        entry.rebuild = entry.host = None


class Shelf(MutableMapping[str, T]):
    """Values of one kind by name; reading one loads it onto the device."""

    def __init__(
        self,
        parking: Parking,
        name: str,
        pack: Callable[[T], Packed[T]],
        *,
        spare: bool = False,
    ) -> None:
        self._parking = parking
        self._name = name
        self._pack = pack
        self._spare = spare

    def size_of(self, name: str) -> int:
        """Bytes of one value."""
        return self._parking.size_of((self._name, name))

    def peek(self, name: str) -> T:
        """A value without loading it onto the device, to be copied."""
        return cast("T", self._parking.peek((self._name, name)))

    def set_spare(self, name: str, *, spare: bool) -> None:
        """Set whether a value is dropped instead of parked."""
        self._parking.set_spare((self._name, name), spare=spare)

    def discard(self, name: str) -> None:
        """Drop a value; unknown names are ignored."""
        self._parking.drop((self._name, name))

    def __getitem__(self, name: str) -> T:
        return cast("T", self._parking.get((self._name, name)))

    def __setitem__(self, name: str, value: T) -> None:
        self._parking.put((self._name, name), value, self._pack, spare=self._spare)

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._parking.drop((self._name, name))

    def __contains__(self, name: object) -> bool:
        return (self._name, name) in self._parking

    def __iter__(self) -> Iterator[str]:
        return iter(self._parking.names(self._name))

    def __len__(self) -> int:
        return len(self._parking.names(self._name))


def _remove_file(entry: _Entry) -> None:
    if entry.file is not None:
        with suppress(OSError):  # removed with its folder at the latest
            entry.file.unlink()


def _size(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def _failed(message: str, cause: BaseException | None) -> RequestFailedError:
    error = RequestFailedError(message, None, "server")
    error.__cause__ = cause
    return error
