"""Errors of a database as a `StorageError` with advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy.exc import DBAPIError

# By the name SQLite gives its result; the longest that fits decides.
_SQLITE: Mapping[str, str] = {
    "SQLITE_FULL": "the disk is full; free some space",
    "SQLITE_READONLY": "it is read-only; make the file and its folder writable for this user",
    "SQLITE_PERM": "permission was refused; make the file and its folder accessible to this user",
    "SQLITE_AUTH": "permission was refused; make the file and its folder accessible to this user",
    "SQLITE_CANTOPEN": "it cannot be opened; check that its folder exists and is writable",
    "SQLITE_IOERR": "the disk reported an error or is full; check its health and free space",
    "SQLITE_BUSY": "another program holds it; end that program",
    "SQLITE_CORRUPT": "the file is damaged; restore it from a backup, or move it away",
    "SQLITE_NOTADB": "the file is no SQLite database; move it away, or name another file",
    "SQLITE_TOOBIG": "the value is larger than the database takes",
    "SQLITE_NOMEM": "there is not enough memory",
}
# By SQLSTATE, or its class of two letters.
_POSTGRES: Mapping[str, str] = {
    "53100": "the database server's disk is full; free some space there",
    "53300": "the database server has no free connection; raise its max_connections",
    "53": "the database server lacks resources; look at its log",
    "25006": "it is read-only; connect to the primary server, or make the database writable",
    "42501": "permission was refused; grant this user the rights to the database and its schema",
    "28": "the user or the password was refused; correct them in the database URL",
    "3D": "there is no such database; create it",
    "3F": "there is no such schema; create it",
    "57": "the database server is shutting down or starting; wait until it is up",
    "58": "the database server reported a system error; look at its log",
    "XX": "the database server reports damaged data; look at its log",
    "40": "the database server undid the transaction; do it again",
    "08": "the connection was lost; check that the database server is running and reachable",
}
# Ends no retry will change.
_FOR_GOOD = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_TOOBIG", "28", "3D", "3F", "42501")


# A server that may be back, or replaced by another one, within a while.
_AWAY = ("08", "53300", "57", "25006")

# Rolled back because of other transactions at the same time. Of the same class, 40002 would happen
# again, and 40003 does not say whether it was rolled back.
_UNDONE = ("40000", "40001", "40P01")


def was_undone(error: DBAPIError) -> bool:
    """Whether the same transaction may succeed when it is run again."""
    return _code(error) in _UNDONE


def storage_error(error: DBAPIError, place: str) -> StorageError | None:
    """The error as a user should see it; None when it is a mistake in our own queries."""
    code = _code(error)
    known = {**_SQLITE, **_POSTGRES}
    reason = next((known[name] for name in _names(code) if name in known), None)
    if reason is None and error.connection_invalidated:
        reason = _POSTGRES["08"]
    if reason is None:
        return None
    translated = StorageError(
        f"The store at {place} cannot be used: {reason} ({error.orig}).", place
    )
    translated.retryable = not code.startswith(_FOR_GOOD)
    translated.out_of_reach = error.connection_invalidated or code.startswith(_AWAY)
    return translated


def unreachable(error: DBAPIError, place: str) -> StorageError:
    """Connecting has failed, for whatever reason."""
    found = storage_error(error, place)
    if found is not None:
        return found
    reason = "check that the database server is running and reachable"
    lost = StorageError(f"The store at {place} cannot be reached: {reason} ({error.orig}).", place)
    lost.out_of_reach = True
    return lost


def _code(error: DBAPIError) -> str:
    origin = error.orig
    code = getattr(origin, "sqlite_errorname", None) or getattr(origin, "sqlstate", None)
    return code if isinstance(code, str) else ""


def _names(code: str) -> tuple[str, ...]:
    """From the exact name to the family: SQLITE_IOERR_WRITE, SQLITE_IOERR; 53100, 53."""
    if code.startswith("SQLITE_"):
        return (code, "_".join(code.split("_")[:2]))
    return (code, code[:2]) if code else ()
