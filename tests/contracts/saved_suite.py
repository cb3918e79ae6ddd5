"""What every `SavedFiles` must do; a subclass says how one is made.

`open_files(machine)` opens the same storage from a machine with an empty disk of its own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tinkex.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tinkex.engine.checkpoints.saved_files import SavedFiles

HOSTILE = [
    "",
    ".",
    "..",
    "/etc/passwd",
    "../up",
    "../../up",
    "up",
    "a/b",
    "a%2Fb",
    "a\\b",
    "a b?*[x]",
    "A/B",
    "snapshot/run:train:0@17",
    "ü/名",
    "x" * 180,
    "x" * 181,
    "x" * 5000,
    "x" * 5001,
    "\n\0",
]


def put(files: SavedFiles, location: str, content: bytes) -> int:
    return files.put(location, lambda path: path.write_bytes(content), len(content))


def get(files: SavedFiles, location: str) -> bytes:
    with files.open(location) as path:
        return path.read_bytes()


class SavedSuite:
    """Inherit this and define `opened` and `everything`."""

    @pytest.fixture
    def opened(self) -> Callable[[str], SavedFiles]:
        """The same storage, by the name of the machine that opens it."""
        raise NotImplementedError

    @pytest.fixture
    def everything(self) -> Callable[[], dict[str, bytes]]:
        """What the storage holds, half-written or not, by name."""
        raise NotImplementedError

    @pytest.fixture
    def files(self, opened: Callable[[str], SavedFiles]) -> SavedFiles:
        return opened("here")

    def test_what_was_put_is_there(self, files: SavedFiles) -> None:
        assert put(files, "a", b"12345") == 5
        assert get(files, "a") == b"12345"
        assert put(files, "a", b"") == 0
        assert get(files, "a") == b""

    def test_a_machine_with_an_empty_disk_finds_it(
        self, files: SavedFiles, opened: Callable[[str], SavedFiles]
    ) -> None:
        put(files, "a", b"first")
        other = opened("there")
        assert get(other, "a") == b"first"
        other.copy("a", "b")
        assert get(files, "b") == b"first"
        other.delete("a")
        with pytest.raises(FileNotFoundError):
            get(files, "a")

    def test_what_another_machine_replaced_is_read_anew(
        self, files: SavedFiles, opened: Callable[[str], SavedFiles]
    ) -> None:
        other = opened("there")
        for content in (b"first", b"other", b"third"):  # of one length
            put(files, "a", content)
            assert get(other, "a") == content

    def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(
        self, files: SavedFiles, everything: Callable[[], dict[str, bytes]]
    ) -> None:
        put(files, "a", b"first")
        before = everything()
        assert list(before.values()) == [b"first"]

        def full(path: Path) -> None:
            path.write_bytes(b"sec")
            raise OSError(28, "No space left on device")

        for location in ("a", "b"):
            with pytest.raises(StorageError, match=r"No space left on device \(6 bytes needed"):
                files.put(location, full, 6)
        assert everything() == before
        assert get(files, "a") == b"first"

    def test_an_error_of_the_writer_itself_stays_what_it_is(self, files: SavedFiles) -> None:
        def wrong(path: Path) -> None:
            raise MemoryError("no room")

        with pytest.raises(MemoryError, match="no room"):
            files.put("a", wrong, 1)

    def test_a_copy_is_whole_and_outlives_its_source(self, files: SavedFiles) -> None:
        put(files, "a", b"first")
        put(files, "b", b"replaced")
        files.copy("a", "b")
        files.delete("a")
        assert get(files, "b") == b"first"
        with pytest.raises(FileNotFoundError):
            files.copy("a", "c")
        with pytest.raises(FileNotFoundError):
            get(files, "c")

    def test_deleting_what_is_not_there_is_fine(
        self, files: SavedFiles, everything: Callable[[], dict[str, bytes]]
    ) -> None:
        files.delete("never")
        put(files, "a", b"first")
        files.delete("a")
        files.delete("a")
        assert everything() == {}

    def test_no_location_leaves_its_folder_or_is_taken_for_another(
        self, files: SavedFiles, everything: Callable[[], dict[str, bytes]]
    ) -> None:
        for number, location in enumerate(HOSTILE):
            put(files, location, str(number).encode())
        for number, location in enumerate(HOSTILE):
            assert get(files, location) == str(number).encode()
        found = everything()
        assert len(found) == len(HOSTILE)
        assert all("/" not in name and len(name) < 256 for name in found)

    def test_several_threads_write_and_read_at_once(self, files: SavedFiles) -> None:
        def both(number: int) -> bytes:
            put(files, str(number), bytes([number]) * 1000)
            return get(files, str(number))

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(partial(both), range(16)))
        assert found == [bytes([number]) * 1000 for number in range(16)]
