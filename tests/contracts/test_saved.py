"""Every place for saved adapters against the one suite."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import fsspec
import pytest

from tests.contracts.saved_suite import SavedSuite
from tests.s3 import bucket, s3_environment, s3_url
from tinkex.engine.checkpoints.remote_files import open_saved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tinkex.engine.checkpoints.saved_files import SavedFiles

    Opened = Callable[[str], SavedFiles]

__all__ = ["bucket", "s3_environment", "s3_url"]

# None of the suite's files is larger, several of them are: reading brings them back.
CACHE_BYTES = 4000


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opener(stack: ExitStack, tmp_path: Path, url: str) -> Opened:
    def opened(machine: str) -> SavedFiles:
        files = open_saved(tmp_path / machine, url, CACHE_BYTES)
        return stack.enter_context(closing(files))

    return opened


def lister(url: str) -> Callable[[], dict[str, bytes]]:
    found: Any = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    files, root = found

    def everything() -> dict[str, bytes]:
        names = files.find(root) if files.exists(root) else []
        return {name.removeprefix(root).lstrip("/"): files.cat_file(name) for name in names}

    return everything


class TestFolder(SavedSuite):
    @pytest.fixture
    def opened(self, stack: ExitStack, tmp_path: Path) -> Opened:
        return opener(stack, tmp_path, f"file://{tmp_path}/shared%20disk")

    @pytest.fixture
    def everything(self, tmp_path: Path) -> Callable[[], dict[str, bytes]]:
        folder = tmp_path / "shared disk"

        def everything() -> dict[str, bytes]:
            files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
            return {str(path.relative_to(folder)): path.read_bytes() for path in files}

        return everything


class TestMemory(SavedSuite):
    @pytest.fixture
    def url(self) -> str:
        return f"memory://{uuid4().hex}/adapters"

    @pytest.fixture
    def opened(self, stack: ExitStack, tmp_path: Path, url: str) -> Opened:
        return opener(stack, tmp_path, url)

    @pytest.fixture
    def everything(self, url: str) -> Callable[[], dict[str, bytes]]:
        return lister(url)


class TestS3(TestMemory):
    """A real server that speaks S3, on loopback."""

    @pytest.fixture
    def url(self, bucket: str) -> str:
        return f"s3://{bucket}/some/{uuid4().hex}"
