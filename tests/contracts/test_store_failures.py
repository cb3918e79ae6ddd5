"""Stores on disks and servers that fail for real."""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from sqlalchemy import text

from tests.contracts.store_suite import DONE, session, step, used
from tinkex.errors import InputError, StorageError
from tinkex.server.store.sql import SqlStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.contracts.postgres import PostgresServer

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]


@contextmanager
def files_limited_to(size_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond a size: a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def without_permission(folder: Path) -> Iterator[None]:
    """Let nothing in a folder be written: permissions, and another user where root runs this."""
    root = os.geteuid() == 0
    paths = [*folder.iterdir(), folder]
    modes = [path.stat().st_mode for path in paths]
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for path, mode in zip(paths, modes, strict=True):
            path.chmod(mode)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that an ordinary user can look into, too."""
    with tempfile.TemporaryDirectory(prefix="tinkex-store-") as path:
        Path(path).chmod(0o755)
        yield Path(path)


async def test_a_full_disk_keeps_nothing_by_halves(tmp_path: Path) -> None:
    place = tmp_path / "store.db"
    body = b"x" * 10_000
    async with SqlStore.open(place) as store:
        with files_limited_to(600_000):
            wanted = [step(seq, body=body) for seq in range(100)]
            answers = await asyncio.gather(
                *(store.submit(op) for op in wanted), return_exceptions=True
            )
            refused = [a for a in answers if isinstance(a, BaseException)]
            assert all(isinstance(a, StorageError) for a in refused)
            assert 0 < len(refused) < 100
            assert str(place) in str(refused[0])
            assert "free" in str(refused[0])
            kept = [op.seq_id for op in await store.pending()]
            assert len(kept) == 100 - len(refused)
            with pytest.raises(StorageError):
                await store.finish(wanted[kept[0]].op_id, DONE, 1.0, used(1.0, trained_tokens=1))
        # With room again, everything goes on where it stopped.
        news = [(await store.submit(op))[1] for op in wanted]
        assert news == [op.seq_id not in kept for op in wanted]
        assert await store.finish(wanted[kept[0]].op_id, DONE, 1.0, used(1.0, trained_tokens=1))
    async with SqlStore.open(place) as store:
        assert {op.seq_id for op in await store.pending()} == set(range(100)) - {kept[0]}
        assert all(op.body == body for op in await store.pending())
        assert len(await store.usage("o", 0.0, 3600.0)) == 1


async def test_a_database_that_may_not_grow_says_that_it_is_full(tmp_path: Path) -> None:
    async with SqlStore.open(tmp_path / "store.db") as store:
        pages = "PRAGMA max_page_count = 60"
        await store._database.read(lambda c: c.exec_driver_sql(pages) and None)
        with pytest.raises(StorageError, match="the disk is full; free some space") as caught:
            await store.submit(step(1, body=b"x" * 1_000_000))
        assert caught.value.retryable
        assert await store.get_operation(step(1).op_id) is None


async def test_a_read_only_file_is_called_so_and_works_once_it_is_writable(folder: Path) -> None:
    place = folder / "store.db"
    async with SqlStore.open(place) as store:
        await store.put_session(session())
    place.chmod(0o644)  # readable for the other user, where root runs this
    with without_permission(folder), pytest.raises(StorageError, match=r"read-only; make the file"):
        async with SqlStore.open(place):
            pass
    async with SqlStore.open(place) as store:
        assert await store.get_session("s") == session()


async def test_what_could_not_be_written_later_is_written_once_it_can_be(tmp_path: Path) -> None:
    async with SqlStore.open(tmp_path / "store.db") as store:
        await store.put_session(session())
        await store.touch_session("s", 9.0)
        await store.add_usage(used(1.0, "sample", prompt_tokens=1))
        read_only = "PRAGMA query_only = ON"
        await store._database.read(lambda c: c.exec_driver_sql(read_only) and None)
        with pytest.raises(StorageError, match="read-only"):
            await store.usage("o", 0.0, 3600.0)
        await store.add_usage(used(2.0, "sample", prompt_tokens=10))
        (entry,) = await store.usage("o", 0.0, 3600.0)
        assert entry.usage.prompt_tokens == 11
    async with SqlStore.open(tmp_path / "store.db") as store:
        assert [s.last_seen_at for s in await store.sessions()] == [9.0]


async def test_a_folder_without_permission_is_called_so(folder: Path) -> None:
    with (
        without_permission(folder),
        pytest.raises(StorageError, match="its folder exists and is wri"),
    ):
        async with SqlStore.open(folder / "store.db"):
            pass
    with pytest.raises(StorageError, match="its folder exists"):
        async with SqlStore.open(folder / "missing" / "store.db"):
            pass
    assert os.listdir(folder) == []


async def test_a_lock_that_cannot_be_written_is_called_so(folder: Path) -> None:
    place = folder / "store.db"
    async with SqlStore.open(place) as store:
        with (
            without_permission(folder),
            pytest.raises(StorageError, match=r"The lock .* cannot be"),
        ):
            await store.lock()


async def test_a_database_that_another_program_holds_is_called_so(tmp_path: Path) -> None:
    place = tmp_path / "store.db"
    async with SqlStore.open(place) as store:
        impatient = "PRAGMA busy_timeout = 0"
        await store._database.read(lambda c: c.exec_driver_sql(impatient) and None)
        with closing(sqlite3.connect(place)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StorageError, match="another program holds it"):
                await store.put_session(session())
        await store.put_session(session())
        assert await store.sessions() == [session()]


async def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "store.db"
    place.write_bytes(b"my thesis " * 1000)
    with pytest.raises(StorageError, match="no SQLite database; move it away") as caught:
        async with SqlStore.open(place):
            pass
    assert not caught.value.retryable
    assert place.read_bytes() == b"my thesis " * 1000


async def test_a_damaged_database_is_called_so(tmp_path: Path) -> None:
    place = tmp_path / "store.db"
    async with SqlStore.open(place) as store:
        for seq in range(50):
            await store.submit(step(seq, body=b"x" * 10_000))
    with place.open("r+b") as file:
        file.seek(4096)  # behind the first page, which holds the schema
        file.write(b"\xff" * (place.stat().st_size - 4096))
    with pytest.raises(StorageError, match="damaged; restore it from a backup"):
        async with SqlStore.open(place) as store:
            await store.pending()


def accepted_before_the_kill(place: Path) -> list[int]:
    """What a program was told that it was accepted, which was then killed in the middle."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.contracts.submitting", str(place)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src"},
    ) as child:
        assert child.stdout is not None
        accepted = [int(child.stdout.readline()) for _ in range(333)]
        child.kill()
        return accepted + [int(line) for line in child.stdout if line.endswith(b"\n")]


async def test_what_was_accepted_survives_a_kill(tmp_path: Path) -> None:
    place = tmp_path / "store.db"
    accepted = await asyncio.to_thread(accepted_before_the_kill, place)
    async with SqlStore.open(place) as store:
        await store.lock()
        pending = {op.seq_id: op for op in await store.pending()}
        assert set(accepted) <= pending.keys()
        assert all(op.body == b"body %d" % seq for seq, op in pending.items())


@pytest.mark.parametrize("url", ["mysql://host/name", "sqlite://", "sqlite:///:memory:", "://"])
async def test_an_address_that_means_nothing_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="database"):
        async with SqlStore.open(url):
            pass


async def test_an_unreachable_server_is_named_without_its_password() -> None:
    url = "postgresql://me:secret@127.0.0.1:1/name?password=secret"
    with pytest.raises(StorageError, match=r"postgresql://me:\*\*\*@127.0.0.1:1/name") as caught:
        async with SqlStore.open(url):
            pass
    assert "running and reachable" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_a_servers_full_disk_keeps_nothing_by_halves(postgres: PostgresServer) -> None:
    place = postgres.new_place()
    async with SqlStore.open(place) as store:
        await store._database.write(lambda c: c.execute(text(_FULL)) and None)
        await store._database.write(lambda c: c.execute(text(_FULL_FOR_BODIES)) and None)
        answers = await asyncio.gather(
            store.submit(step(1, body=b"large")),
            store.submit(step(2)),
            store.submit(step(3, body=b"large")),
            return_exceptions=True,
        )
        assert [isinstance(a, StorageError) for a in answers] == [True, False, True]
        assert "the database server's disk is full" in str(answers[0])
        assert [op.seq_id for op in await store.pending()] == [2]
        assert await store.get_operation(step(1).op_id) is None


_FULL = """
    CREATE FUNCTION disk_full() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$
"""
_FULL_FOR_BODIES = """
    CREATE TRIGGER full_now BEFORE INSERT ON bodies FOR EACH ROW EXECUTE FUNCTION disk_full()
"""


async def test_a_read_only_server_is_called_so(postgres: PostgresServer) -> None:
    place = postgres.new_place()
    async with SqlStore.open(place) as store:
        await store.put_session(session())
    async with SqlStore.open(f"{place}%20-cdefault_transaction_read_only%3Don") as store:
        assert await store.get_session("s") == session()
        with pytest.raises(StorageError, match="read-only; connect to the primary"):
            await store.put_session(session("t"))


async def test_another_process_that_opens_and_closes_the_file_loses_nothing(tmp_path: Path) -> None:
    place = tmp_path / "store.db"
    program = (
        "import asyncio, sys\n"
        "from tinkex.server.store.sql import SqlStore\n"
        "async def run():\n"
        "    async with SqlStore.open(sys.argv[1]) as store:\n"
        "        await store.remember('o', sys.argv[2], 'x')\n"
        "asyncio.run(run())\n"
    )
    async with SqlStore.open(place) as store:
        await store.put_session(session("before"))
        assert await store.count_sessions() == 1  # by a second connection of this process
        for number in range(3):
            name = f"beside-{number}"
            await anyio.run_process([sys.executable, "-c", program, str(place), name])
            # It was not the last connection, so the log of this one is still there.
            assert "store.db-wal" in os.listdir(tmp_path)
            await store.put_session(session(f"after-{number}"))
            assert await store.recall("o", name) == "x"
    async with SqlStore.open(place) as store:
        assert await store.count_sessions() == 4
