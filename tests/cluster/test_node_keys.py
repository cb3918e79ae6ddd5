"""A node that other machines can reach needs a key in the cluster's database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from tests.contracts.conftest import postgres
from tests.e2e.serving import MODEL, refused

if TYPE_CHECKING:
    from pathlib import Path

    from tests.contracts.postgres import PostgresServer

__all__ = ["postgres"]


def test_a_node_without_a_key_names_the_database_to_make_one_in(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    database = postgres.new_place().replace("postgres:@", "postgres:secret@")
    assert "secret" in database
    code, said = refused(
        tmp_path / "data",
        *("--join", "lab", "--database", database, "--artifacts", f"file://{tmp_path}"),
        *("--base-model", MODEL, "--host", "0.0.0.0", "--port", "0"),
        *("--node-url", "http://127.0.0.1:1"),
    )
    assert code == 1
    assert "`tinkex key create --database postgresql://" in said
    assert "--data-dir" not in said
    assert "secret" not in said
    # It was refused before it joined.
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM nodes").fetchone() == (0,)
