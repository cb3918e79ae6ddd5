"""Any number of adapters on a device that holds a few: the others wait in memory or on disk.

A `Parking` owns the bytes of everything put on its shelves. What was not used for longest goes
first: from the device to host memory, from there to a file. It comes back, bit for bit, when
somebody asks for it. Values are never written to, so a file stays good as long as its value
is the one on the shelf. A value that is larger than the whole device is refused.

A spare value is dropped instead of parked: its owner can make it again.

What is asked for within `holding` stays until that ends, even beyond the budget: a pass that
runs is never parked. It belongs to one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

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
    """A value taken apart: its tensors, and how to put it together from equal ones."""

    tensors: Tensors
    rebuild: Callable[[Tensors], T]


@dataclass(slots=True)
class _Entry:
    """One value: ready on the device, or its tensors in host memory, or only in a file."""

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


class Parking:
    """Budgets in bytes for the device and for host memory; None is no limit.

    Where the device is the host, `host_bytes` is 0: what does not fit goes to disk at once.
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
        # Mutable state: every value, least recently used first; the shelves of copies; what was
        # asked for since `holding` began; and a number for file names.
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._copies: set[str] = set()
        self._held: set[Key] | None = None
        self._files = 0

    def shelf(self, name: str, pack: Callable[[T], Packed[T]]) -> Shelf[T]:
        """Room for values of one kind under names of their own."""
        return Shelf(self, name, pack)

    def copies(self, name: str, pack: Callable[[T], Packed[T]]) -> Shelf[T]:
        """Room for copies of other shelves' values: all of them spare, none counted as adapters."""
        self._copies.add(name)
        return Shelf(self, name, pack, spare=True)

    @contextmanager
    def holding(self) -> Generator[None]:
        """Keep whatever is asked for within the block."""
        outer, self._held = self._held, set(self._held or ())
        try:
            yield
        finally:
            self._held = outer

    @property
    def on_device_bytes(self) -> int:
        """What lies ready on the device."""
        return sum(entry.size_bytes for entry in self._entries.values() if entry.ready)

    @property
    def in_host_bytes(self) -> int:
        """What is parked in host memory."""
        return sum(entry.size_bytes for entry in self._entries.values() if entry.host is not None)

    def counts(self) -> tuple[int, int]:
        """How many values lie ready on the device, and how many are parked; for any thread."""
        entries = list(self._entries.items())  # in one go, as its owner may be at work
        found = [entry.ready for (shelf, _), entry in entries if shelf not in self._copies]
        return sum(found), len(found) - sum(found)

    def close(self) -> None:
        """Let go of everything, and of the files."""
        self._entries.clear()
        if self._folder is not None:
            self._folder.close()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def names(self, shelf: str) -> list[str]:
        """What is on one shelf."""
        return [name for own, name in self._entries if own == shelf]

    def size_of(self, key: Key) -> int:
        """Bytes of one value."""
        return self._entries[key].size_bytes

    def check(self, name: str, size_bytes: int) -> None:
        """Refuse what would not fit if nothing else were on the device."""
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
        """Put a value in; when it raises, what was there before still is."""
        size = _size(pack(value).tensors)
        self.check(key[1], size)
        self._make_room(size, apart_from=key)
        before = self._entries.pop(key, None)
        self._use(key, _Entry(pack, size, value, spare))
        if before is not None:
            _remove_file(before)

    def get(self, key: Key) -> Any:
        """A value, ready on the device; raises `KeyError` when there is none."""
        entry = self._entries[key]
        if not entry.ready:
            self._make_room(entry.size_bytes, apart_from=key)
            self._bring_back(key, entry)
        self._use(key, entry)
        return entry.value

    def peek(self, key: Key) -> Any:
        """A value where it lies, on the device or not; for whoever makes a copy of it."""
        entry = self._entries[key]
        if entry.rebuild is None:
            return entry.value
        return entry.rebuild(self._parked(key, entry))

    def set_spare(self, key: Key, *, spare: bool) -> None:
        """Say whether a value may be dropped instead of parked."""
        entry = self._entries[key]
        entry.spare = spare
        if spare and not entry.ready and entry.host is None:
            self.drop(key)  # all that is left of it is a file, which is what nobody needs now

    def drop(self, key: Key) -> None:
        """Forget a value and remove its file; unknown keys are fine."""
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
        """Make room in host memory; says whether there is any."""
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
        if entry.file is not None:  # written before, and the value is still the same
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
    """Values of one kind by name; asking for one brings it back to the device."""

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

    @property
    def parking(self) -> Parking:
        """Where the values are."""
        return self._parking

    def size_of(self, name: str) -> int:
        """Bytes of one value, wherever it is."""
        return self._parking.size_of((self._name, name))

    def peek(self, name: str) -> T:
        """A value where it lies, on the device or not; for whoever makes a copy of it."""
        return cast("T", self._parking.peek((self._name, name)))

    def set_spare(self, name: str, *, spare: bool) -> None:
        """Say whether a value may be dropped instead of parked."""
        self._parking.set_spare((self._name, name), spare=spare)

    def discard(self, name: str) -> None:
        """Forget a value; unknown names are fine."""
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
        with suppress(OSError):  # what cannot be removed now goes with its folder
            entry.file.unlink()


def _size(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def _failed(message: str, cause: BaseException | None) -> RequestFailedError:
    error = RequestFailedError(message, None, "server")
    error.__cause__ = cause
    return error
