"""Where a store lives: a URL or a path, and what of it may be shown."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from tinkex.errors import InputError

_DRIVERS = {
    "sqlite": "sqlite+pysqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
}


def parse(url: str | Path) -> URL:
    """The database's address; a plain path is a SQLite file."""
    text = str(url)
    if "://" not in text:
        return URL.create(_DRIVERS["sqlite"], database=str(Path(text).absolute()))
    try:
        parsed = make_url(text)
    except ArgumentError:
        raise InputError("not a database URL", "database") from None
    driver = _DRIVERS.get(parsed.drivername.partition("+")[0])
    if driver is None:
        raise InputError(
            f"{parsed.drivername!r} is no database we know; use sqlite:///PATH or "
            "postgresql://USER:PASSWORD@HOST/NAME",
            "database",
        )
    if driver == _DRIVERS["sqlite"] and parsed.database in (None, "", ":memory:"):
        raise InputError("sqlite:///PATH needs the path of a file", "database")
    if driver == _DRIVERS["sqlite"]:
        parsed = parsed.set(database=str(Path(str(parsed.database)).absolute()))
    return parsed.set(drivername=driver)


def shown(url: URL) -> str:
    """The address as it may be printed: a path, or a URL without its password."""
    if url.drivername == _DRIVERS["sqlite"]:
        return str(url.database)
    return url.set(drivername="postgresql", query={}).render_as_string(hide_password=True)
