"""What a server keeps in its folder can be read by its own user only."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from tinkex.server.store.sql import SqlStore
from tinkex.serving.data_dir import DATABASE, claimed_folder, kept_secret

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def open_umask() -> Iterator[None]:
    old = os.umask(0o000)
    yield
    os.umask(old)


def others(folder: Path) -> dict[str, str]:
    """What other users could do with each file."""
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()}
    return {name: oct(mode) for name, mode in modes.items() if mode & 0o077}


@pytest.mark.usefixtures("open_umask")
async def test_new_files_in_a_folder_that_was_there_are_private(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    with claimed_folder(tmp_path):
        kept_secret(tmp_path)
        async with SqlStore.open(tmp_path / DATABASE) as store:
            await store.lock()
            await store.remember("o", "k", "v")
            names = set(os.listdir(tmp_path))
            assert {"tinkex.db", "tinkex.db-wal", "tinkex.db-shm", "secret", "lock"} <= names
            assert others(tmp_path) == {}


async def test_files_that_others_could_read_are_closed_to_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with SqlStore.open(tmp_path / DATABASE):
        pass
    kept_secret(tmp_path)
    for name in (DATABASE, "secret"):
        (tmp_path / name).chmod(0o644)
    with claimed_folder(tmp_path):
        assert others(tmp_path) == {}
    assert caplog.text.count("could be read by other users") == 2


async def test_a_database_outside_the_folder_is_private_too(tmp_path: Path) -> None:
    place = tmp_path / "elsewhere.db"
    async with SqlStore.open(place):
        place.chmod(0o664)
    async with SqlStore.open(place):
        assert others(tmp_path) == {}
