"""Local copies: within their budget, the longest unused goes first, what is read stays."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tinkex.engine.checkpoints.cache import FileCache
from tinkex.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[FileCache]:
    with closing(FileCache(tmp_path, 300)) as cache:
        yield cache


class Remote:
    """Counts what is fetched."""

    def __init__(self) -> None:
        self.fetched: list[str] = []

    def read(self, cache: FileCache, name: str, version: str = "1", size: int = 100) -> bytes:
        def fetch(path: Path) -> None:
            self.fetched.append(f"{name}{version}")
            path.write_bytes(version.encode() * size)

        with cache.reading(f"{name}.safetensors", version, size, fetch) as path:
            return path.read_bytes()


def age(folder: Path) -> None:
    """Make every copy older, so that the next use is later whatever the clock's tick is."""
    for path in folder.glob("*.safetensors"):
        stat = path.stat()
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns - 10**9))


def used_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_a_copy_is_fetched_once_and_the_longest_unused_goes_first(cache, tmp_path):
    remote = Remote()
    for name in "abcabad":
        assert remote.read(cache, name) == b"1" * 100
        assert used_bytes(tmp_path) <= 300
        age(tmp_path)
    assert remote.fetched == ["a1", "b1", "c1", "d1"]
    remote.read(cache, "b")
    age(tmp_path)
    remote.read(cache, "c")  # which had gone for d
    assert remote.fetched == ["a1", "b1", "c1", "d1", "c1"]


def test_another_version_is_fetched_and_takes_the_place_of_the_older(cache, tmp_path):
    remote = Remote()
    assert remote.read(cache, "a", "1") == b"1" * 100
    assert remote.read(cache, "a", "2") == b"2" * 100
    assert remote.read(cache, "ab", "3") == b"3" * 100
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    cache.forget("a.safetensors")
    assert [path.name[:3] for path in tmp_path.glob("*.safetensors")] == ["ab@"]


def test_copies_outlive_the_process(cache, tmp_path):
    remote = Remote()
    remote.read(cache, "a")
    with closing(FileCache(tmp_path, 300)) as again:
        remote.read(again, "a")
    assert remote.fetched == ["a1"]


def test_a_copy_cut_short_by_a_crash_is_fetched_again(cache, tmp_path):
    remote = Remote()
    remote.read(cache, "a")
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(b"1" * 40)
    assert remote.read(cache, "a") == b"1" * 100
    assert remote.fetched == ["a1", "a1"]


def test_what_is_being_read_stays_even_beyond_the_budget(cache, tmp_path):
    remote = Remote()
    with cache.reading(
        "big.safetensors", "1", 1000, lambda path: path.write_bytes(b"x" * 1000)
    ) as path:
        remote.read(cache, "a")
        assert path.stat().st_size == 1000
    assert not path.exists()
    assert used_bytes(tmp_path) <= 300


def test_a_fetch_that_fails_leaves_nothing(cache, tmp_path):
    def gone(path: Path) -> None:
        path.write_bytes(b"half")
        raise FileNotFoundError(path)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(FileNotFoundError), cache.reading("a.safetensors", "1", 9, gone):
        pass
    with (
        pytest.raises(StorageError, match=r"cannot write .*: No space left .*\(9 bytes needed"),
        cache.reading("a.safetensors", "1", 9, full),
    ):
        pass
    assert used_bytes(tmp_path) == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
