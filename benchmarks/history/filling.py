"""Makes a store look as if much had ended in it, by plain SQL: the store's own calls take longer.

Everything belongs to one tenant, ended yesterday, and is still listed.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LORA = '{"rank":8,"seed":null,"train_unembed":true,"train_mlp":true,"train_attn":true}'
_OPTIMIZER = '{"type":"adam"}'
_CANCELLED = '{"type":"cancelled","detail":"no heartbeat for 301 s"}'
_DAY_S = 24 * 3600.0
_ROWS_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class Past:
    """How much has ended."""

    sessions: int = 100_000
    samplers: int = 10_000
    imports: int = 1_000

    @property
    def runs(self) -> int:
        """Training runs whose session is over."""
        return self.samplers


def fill(path: Path, past: Past, owner: str, base_model: str, now: float) -> None:
    """Add a past to the SQLite store at a path, which nobody has open."""
    with closing(sqlite3.connect(path)) as database, database:
        _insert(database, "sessions", _sessions(past, owner, now))
        _insert(database, "models", _runs(past, owner, base_model, now))
        _insert(database, "models", _imports(past, owner, base_model, now))
        _insert(database, "checkpoints", _checkpoints(past, owner, base_model, now))
        _insert(database, "samplers", _samplers(past, owner, base_model, now))
        _insert(database, "answers", _answers(past, owner, now))


def _insert(database: sqlite3.Connection, table: str, rows: Iterator[dict[str, Any]]) -> None:
    while some := list(islice(rows, _ROWS_AT_ONCE)):
        columns = list(some[0])
        marks = ", ".join(f":{column}" for column in columns)
        query = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"
        database.executemany(query, some)


def _sessions(past: Past, owner: str, now: float) -> Iterator[dict[str, Any]]:
    for number in range(past.sessions):
        at = now - _DAY_S - number
        yield {
            "session_id": f"old-{number}",
            "owner": owner,
            "created_at": at,
            "last_seen_at": at,
            "sdk_version": "0.36.0",
            "tags": "[]",
            "user_metadata": "{}",
            "heartbeats": 1,
            "status": _CANCELLED,
            "active": 0,
        }


def _model(name: str, owner: str, base_model: str, at: float) -> dict[str, Any]:
    return {
        "model_id": f"{name}:train:0",
        "session_id": name,
        "owner": owner,
        "base_model": base_model,
        "lora": _LORA,
        "optimizer": _OPTIMIZER,
        "created_at": at,
        "last_request_at": at,
        "user_metadata": "{}",
        "corrupted": 0,
        "snapshot_seq": 9,
    }


def _runs(past: Past, owner: str, base_model: str, now: float) -> Iterator[dict[str, Any]]:
    for number in range(past.runs):
        yield _model(f"old-{number}", owner, base_model, now - _DAY_S - number)


def _imports(past: Past, owner: str, base_model: str, now: float) -> Iterator[dict[str, Any]]:
    for number in range(past.imports):
        yield _model(f"import-{number}", owner, base_model, now - _DAY_S - number)


def _checkpoints(past: Past, owner: str, base_model: str, now: float) -> Iterator[dict[str, Any]]:
    for number in range(past.imports):
        run = f"import-{number}:train:0"
        yield {
            "path": f"tinker://{run}/weights/imported",
            "owner": owner,
            "model_id": run,
            "kind": "weights",
            "name": "imported",
            "location": f"tinker://{run}/weights/imported@import",
            "base_model": base_model,
            "lora": _LORA,
            "optimizer": _OPTIMIZER,
            "has_optimizer": 0,
            "created_at": now - _DAY_S - number,
            "size_bytes": 1,
            "public": 0,
        }


def _samplers(past: Past, owner: str, base_model: str, now: float) -> Iterator[dict[str, Any]]:
    for number in range(past.samplers):
        name = f"old-{number}:sample:0"
        yield {
            "sampler_id": name,
            "owner": owner,
            "session_id": f"old-{number}",
            "base_model": base_model,
            "created_at": now - _DAY_S - number,
            "snapshot": name,
            "model_id": f"old-{number}:train:0",
            "seq_id": 5,
            "copies": 0,
            "dropped": "its session is over",
        }


def _answers(past: Past, owner: str, now: float) -> Iterator[dict[str, Any]]:
    for number in range(past.samplers):
        yield {
            "owner": owner,
            "key": f"samples:old-{number}:sample:0:0",
            "answer": "0",
            "created_at": now - _DAY_S - number,
            "session_id": f"old-{number}",
        }
