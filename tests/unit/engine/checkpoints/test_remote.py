"""Files at a URL: what goes wrong there, and places without atomic uploads."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from tests.contracts.saved_suite import get, put
from tests.s3 import bucket, s3_environment, s3_url
from tinkex.engine.checkpoints.remote_files import open_saved
from tinkex.engine.checkpoints.saved_files import FolderFiles
from tinkex.errors import InputError, MissingPackageError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinkex.engine.checkpoints.saved_files import SavedFiles

__all__ = ["bucket", "s3_environment", "s3_url"]


@pytest.fixture
def files(tmp_path) -> Iterator[SavedFiles]:
    with closing(open_saved(tmp_path, f"memory://{uuid4().hex}", 1000)) as files:
        yield files


def test_a_second_read_is_of_the_copy(files, monkeypatch):
    put(files, "a", b"first")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", lambda *_: pytest.fail("fetched"))
        assert get(files, "a") == b"first"


@pytest.mark.parametrize(
    ("method", "doing", "call"),
    [
        ("put_file", "write", lambda files: put(files, "a", b"other")),
        ("info", "read", lambda files: get(files, "a")),
        ("get_file", "read", lambda files: get(files, "far")),
        ("cp_file", "copy", lambda files: files.copy("a", "b")),
        ("rm_file", "delete", lambda files: files.delete("a")),
    ],
)
def test_an_error_of_the_other_side_names_the_url_and_changes_nothing(
    files, tmp_path, monkeypatch, method, doing, call
):
    put(files, "a", b"first")
    put(files, "far", b"away")
    for path in (tmp_path / "cache").glob("far@*"):
        path.unlink()

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("the other side is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, method, refused)
        with pytest.raises(StorageError, match="the other side is on fire") as caught:
            call(files)
    assert f"cannot {doing} memory:///" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert get(files, "a") == b"first"
    assert get(files, "far") == b"away"


def test_an_upload_that_came_in_part_is_an_error(files, monkeypatch):
    def half(self: Any, source: str, target: str, **_: Any) -> None:
        self.pipe_file(target, b"fi")

    monkeypatch.setattr(MemoryFileSystem, "put_file", half)
    with pytest.raises(StorageError, match="5 bytes were sent and 2 are there"):
        put(files, "a", b"first")


def test_where_uploads_are_not_atomic_a_file_gets_its_name_when_it_is_whole(tmp_path, monkeypatch):
    class Slow(MemoryFileSystem):
        protocol = "slow"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(path.removeprefix("slow://"))

    monkeypatch.setitem(_registry, "slow", Slow)
    with closing(open_saved(tmp_path, "slow://somewhere/deep", 1000)) as files:
        put(files, "a", b"first")
        broken = Slow.put_file

        def half(self: Any, source: str, target: str, **options: Any) -> None:
            broken(self, source, target, **options)
            raise ConnectionError("the line went dead")

        with monkeypatch.context() as patch:
            patch.setattr(Slow, "put_file", half)
            with pytest.raises(StorageError, match="the line went dead"):
                put(files, "a", b"other")
        assert get(files, "a") == b"first"
        put(files, "a", b"third")
        files.copy("a", "b")
        assert get(files, "b") == b"third"
        assert [path.rpartition("/")[2] for path in Slow.store] == [
            "a.safetensors",
            "b.safetensors",
        ]


def test_a_bucket_that_does_not_exist_is_a_storage_error(tmp_path, s3_environment):
    with closing(open_saved(tmp_path, "s3://no-such-bucket/x", 1000)) as files:
        with pytest.raises(StorageError, match=r"cannot write s3://no-such-bucket/x/a\.safe"):
            put(files, "a", b"first")
        with pytest.raises(FileNotFoundError):
            get(files, "a")


def test_a_server_that_cannot_be_reached_is_a_storage_error(tmp_path, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with (
        closing(open_saved(tmp_path, f"s3://{bucket}", 1000)) as files,
        pytest.raises(StorageError, match="Could not connect"),
    ):
        put(files, "a", b"first")


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("nowhere://user:secret@host/x", InputError, "artifacts: 'nowhere' cannot be used"),
        ("relative/path", InputError, "must be an absolute path or a URL"),
        ("file://host/path", InputError, "must be an absolute path or a URL"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_at_once(tmp_path, url, error, said):
    with pytest.raises(error, match=said) as caught:
        open_saved(tmp_path, url, 1000)
    assert "secret" not in str(caught.value)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(_registry, "gs", raising=False)
    with pytest.raises(MissingPackageError, match=r"gs:// cannot.*pip install 'fsspec\[gs\]'"):
        open_saved(tmp_path, "gs://bucket/x", 1000)


def test_a_path_is_a_folder(tmp_path):
    for url in (str(tmp_path / "a b"), f"file://{tmp_path}/a%20b", f"local://{tmp_path}/a%20b"):
        with closing(open_saved(tmp_path / "machine", url, 1000)) as files:
            assert isinstance(files, FolderFiles)
            put(files, url, b"x")
    assert len(list((tmp_path / "a b").iterdir())) == 3
    assert not (tmp_path / "machine").exists()
