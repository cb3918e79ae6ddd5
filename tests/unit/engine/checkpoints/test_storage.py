"""What storage failures say: the place, the sizes where they are known, and what to do."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tinkex.engine.checkpoints.saved_files import FolderFiles
from tinkex.engine.checkpoints.storage import storage_error, write_atomically
from tinkex.engine.checkpoints.tensor_files import write_tensors
from tinkex.errors import StorageError


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "(70 bytes needed, {free} free); free some space there"),
        (errno.EDQUOT, "(70 bytes needed, {free} free); free some space there, have the quota"),
        (errno.EROFS, "Read-only file system; it is mounted read-only; mount it for writing"),
        (errno.EACCES, "Permission denied; this user may not use it; change its owner or mode"),
        (errno.EIO, "Input/output error; see whether it can be reached"),
    ],
)
def test_the_message_names_the_place_and_says_what_to_do(tmp_path, monkeypatch, number, said):
    class Usage:
        free = 64

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    place = tmp_path / "not made yet" / "x"
    error = storage_error(OSError(number, os.strerror(number)), "write", place, 70)
    assert str(error).startswith(f"cannot write {place}: {os.strerror(number)}")
    assert said.format(free=64) in str(error)
    assert (error.code, error.retryable, error.path) == ("storage", True, str(place))


def test_an_error_without_a_number_keeps_its_words():
    error = storage_error(ConnectionError("nobody answers"), "read", "s3://bucket/x")
    assert str(error).startswith("cannot read s3://bucket/x: ConnectionError: nobody answers; see")
    assert "Permission denied" in str(storage_error(PermissionError("no"), "read", "s3://b/x"))
    named = OSError(errno.EINVAL, "The specified bucket is not valid.")
    assert "The specified bucket is not valid." in str(storage_error(named, "read", "s3://b/x"))


@pytest.fixture
def small_files():
    """No file may become larger than this many bytes: the real thing, for this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield 4096
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_half_of_a_file_leaves_nothing_of_it(tmp_path, small_files):
    tensors = {"x": torch.zeros(small_files)}
    with closing(FolderFiles(tmp_path)) as files:
        with pytest.raises(StorageError, match=rf"File too large \({4 * small_files} bytes needed"):
            files.put("a", lambda path: write_tensors(path, "", tensors), 4 * small_files)
        with pytest.raises(FileNotFoundError), files.open("a"):
            pass
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lock"]
    assert list(tmp_path.iterdir()) == []


def test_a_full_device_is_said_as_such(tmp_path):
    def to_a_full_device(path: Path) -> None:
        Path("/dev/full").write_bytes(b"x")

    with pytest.raises(StorageError, match="No space left on device"):
        write_atomically(tmp_path / "x", to_a_full_device)
    assert list(tmp_path.iterdir()) == []


def test_what_the_server_keeps_is_for_its_owner_alone(tmp_path):
    write_atomically(tmp_path / "x", lambda path: write_tensors(path, "", {"x": torch.zeros(1)}))
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_made_is_said_as_such(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with (
            closing(FolderFiles(folder)) as files,
            pytest.raises(StorageError, match="a part of the path is a file"),
        ):
            files.put("a", lambda path: path.write_bytes(b"x"), 1)
    with pytest.raises(StorageError, match="a part of the path is a file"):
        write_atomically(tmp_path / "file" / "x", lambda path: None)


@pytest.mark.parametrize(
    ("method", "doing", "call"),
    [
        ("open", "read", lambda files: files.open("a").__enter__()),
        ("unlink", "delete", lambda files: files.delete("a")),
    ],
)
def test_what_may_not_be_read_or_deleted_is_said_as_such(
    tmp_path, monkeypatch, method, doing, call
):
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with closing(FolderFiles(tmp_path)) as files:
        files.put("a", lambda path: path.write_bytes(b"x"), 1)
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, refused)
            with pytest.raises(StorageError, match=f"cannot {doing} .*a.safetensors: Permission"):
                call(files)


def test_what_a_killed_process_had_half_written_goes_with_the_next_write(tmp_path):
    left = tmp_path / ".writing-gone"
    left.mkdir()
    (left / "lock").touch()  # held by no process
    (left / "1").write_bytes(b"half")
    with closing(FolderFiles(tmp_path)) as files:
        files.put("a", lambda path: path.write_bytes(b"x"), 1)
        assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
