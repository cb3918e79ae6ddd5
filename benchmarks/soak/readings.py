"""What is read of a server at one moment: processes, database, files, metrics."""

from __future__ import annotations

import os
import re
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlalchemy import func, select, text

from tinkex.server.store.sql.schema import METADATA
from tinkex.serving.data_dir import DATABASE

if TYPE_CHECKING:
    from benchmarks.soak.supervised import Supervised

# Kept for ever by contract: the runs that a tenant can list, what was used, what was changed.
LEDGER = ("models", "usage", "audit", "api_keys", "schema_version")
_MIB = 1 << 20


@dataclass(frozen=True)
class Process:
    """One process as the kernel sees it; `memory_mib` is resident."""

    pid: int
    memory_mib: float
    threads: int
    descriptors: int


@dataclass(frozen=True)
class Reading:
    """Everything of one moment; a process that is being started again is None."""

    at: float
    server: Process | None
    engine: Process | None
    rows: dict[str, int] = field(default_factory=dict[str, int])
    database_mib: float = 0.0
    ledger_mib: float | None = None
    """None where the database cannot say which table takes how much."""
    unfinished: int = 0
    files: int = 0
    files_mib: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class Reader:
    """Reads a server from outside; only /metrics is a request to it."""

    def __init__(self, server: Supervised, database: str | None) -> None:
        self._server = server
        self._sqlite = database is None
        place = f"sqlite:///file:{server.data / DATABASE}?mode=ro&uri=true"
        if database is not None:
            place = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", database)
        self._database = sqlalchemy.create_engine(place)

    def read(self, at: float) -> Reading:
        """One reading; `at` is seconds since the start."""
        rows, unfinished, size, ledger = self._rows()
        files = list(_files(self._server.data))
        engines = self._server.engine_pids
        return Reading(
            at,
            _process(self._server.pid),
            _process(engines[0]) if engines else None,
            rows,
            size,
            ledger,
            unfinished,
            len(files),
            sum(files) / _MIB,
            self._metrics(),
        )

    def _rows(self) -> tuple[dict[str, int], int, float, float | None]:
        operations = METADATA.tables["operations"]
        with self._database.connect() as connection:
            rows = {
                table.name: int(
                    connection.execute(select(func.count()).select_from(table)).scalar_one()
                )
                for table in METADATA.sorted_tables
            }
            waiting = select(func.count()).where(operations.c.state != "done")
            unfinished = int(connection.execute(waiting).scalar_one())
            size, ledger = (self._sqlite_size if self._sqlite else _postgres_size)(connection)
        return rows, unfinished, size, ledger

    def _sqlite_size(self, connection: Any) -> tuple[float, float | None]:
        """Pages in use; those of deleted rows are used again before the file grows."""
        one = lambda query: connection.execute(text(query)).scalar_one()  # noqa: E731
        page = one("PRAGMA page_size")
        used = (one("PRAGMA page_count") - one("PRAGMA freelist_count")) * page / _MIB
        try:
            tables = ", ".join(f"'{name}'" for name in LEDGER)
            ledger = f"SELECT name FROM sqlite_master WHERE tbl_name IN ({tables})"
            size = one(f"SELECT sum(pgsize) FROM dbstat WHERE name IN ({ledger})")
            return used, (size or 0) / _MIB
        except sqlalchemy.exc.OperationalError:  # built without it
            return used, None

    def _metrics(self) -> dict[str, float]:
        try:
            key = {"x-api-key": self._server.keys["rest"]}
            request = urllib.request.Request(f"{self._server.url}/metrics", headers=key)
            with urllib.request.urlopen(request, timeout=30) as reply:
                lines = reply.read().decode().splitlines()
        except OSError:
            return {}  # being started again
        found: dict[str, float] = {}
        for line in lines:
            if not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0]
                value = float(line.rpartition(" ")[2])
                most = name.endswith("longest_cpu_seconds")
                found[name] = (
                    max(found.get(name, 0.0), value) if most else found.get(name, 0.0) + value
                )
        return found


def _postgres_size(connection: Any) -> tuple[float, float]:
    query = "SELECT sum(pg_total_relation_size(to_regclass(name))) FROM unnest(:names) AS name"

    def size(names: list[str]) -> float:
        return float(connection.execute(text(query), {"names": names}).scalar_one() or 0) / _MIB

    return size(list(METADATA.tables)), size(list(LEDGER))


def _process(pid: int) -> Process | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    found = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
    if "VmRSS" not in found:  # ended, and not waited for yet
        return None
    memory_mib = int(found["VmRSS"]) / 1024
    return Process(pid, memory_mib, int(found["Threads"]), descriptors)


def _files(folder: Path) -> list[int]:
    """The sizes of the files below a folder."""
    sizes: list[int] = []
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except OSError:  # just deleted
                continue
    return sizes
