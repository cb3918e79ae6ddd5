"""Results of samples that memory has no room for.

They lie among the results of the operations, under negative numbers, until they are dropped
with the others. Like all samples they are gone after a restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import bindparam, delete, select

from tinkex.errors import StorageError
from tinkex.server.store.records import changed
from tinkex.server.store.sql.schema import results

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Connection

    from tinkex.server.store.records import Operation, OperationOutcome
    from tinkex.server.store.sql.database import Database

ROOM_BYTES: Final = 32 << 20
"""How much of samples' results is kept in memory."""


# Results of samples that a node can number; what is left is enough for a million nodes.
_NODE_BITS: Final = 40


class Overflow:
    """Knows where the results of samples are that are not in memory."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # Mutable state: the numbers of the results by sample, and the last one given.
        self._numbers: dict[str, int] = {}
        self._last = 0

    def number_for(self, node: int) -> None:
        """Use the numbers of one node from now on."""
        self._last = -(node << _NODE_BITS)

    async def keep(
        self, sample: Operation, outcome: OperationOutcome, at: float
    ) -> OperationOutcome:
        """Store a sample's result; returns the outcome without it."""
        number = self._last = self._last - 1
        size = {"owner": sample.owner, "size_bytes": len(outcome.body or b"")}
        row = {"number": number, "finished_at": at, "body": outcome.body, **size}
        try:
            await self._database.write_lightly(lambda c: c.execute(results.insert(), row) and None)
        except StorageError:
            return outcome  # a full disk is no reason to lose what memory can still hold
        self._numbers[sample.op_id] = number
        return changed(outcome, body=None)

    async def restored(self, operation: Operation) -> Operation:
        """The sample with its result, wherever that is."""
        number = self._numbers.get(operation.op_id)
        if number is None or operation.outcome is None:
            return operation
        query = select(results.c.body).where(results.c.number == number)
        body = await self._database.read(lambda c: c.execute(query).scalar_one_or_none())
        return changed(operation, outcome=changed(operation.outcome, body=body))

    async def drop(self, op_ids: Iterable[str]) -> None:
        """Forget the results of these."""
        found = [self._numbers.pop(op_id, None) for op_id in op_ids]
        rows = [{"id": number} for number in found if number is not None]
        if rows:
            query = delete(results).where(results.c.number == bindparam("id"))
            await self._database.write_lightly(lambda c: c.execute(query, rows) and None)

    def forget(self, known: Iterable[str]) -> None:
        """Forget where results were, of all but the known samples."""
        keep = set(known)
        self._numbers = {op_id: n for op_id, n in self._numbers.items() if op_id in keep}


def forget_node(connection: Connection, node: int) -> None:
    """Forget what a node left."""
    highest, lowest = -(node << _NODE_BITS), -((node + 1) << _NODE_BITS)
    connection.execute(delete(results).where(results.c.number < highest, results.c.number > lowest))


def clear(connection: Connection) -> None:
    """Forget what an earlier process left."""
    connection.execute(delete(results).where(results.c.number < 0))
