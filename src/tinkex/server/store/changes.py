"""Changing a stored record that others change too: one change at a time, none lost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import Model, StoredCheckpoint, StoredSession
    from tinkex.types import SessionStatus


class Changes:
    """Reads a record, changes some fields and stores it, under a lock."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # Held from the read to the write: a change in between would be lost.
        self._changing = anyio.Lock()

    async def change_model(self, model_id: str, **fields: Any) -> None:
        """Change some fields of a model; unknown ones stay unknown."""
        async with self._changing:
            model = await self._store.get_model(model_id)
            if model is not None:
                await self._store.put_model(replace(model, **fields))

    async def move_model(self, model: Model, session_id: str) -> bool:
        """Give a model to another session; False when it was moved, or its session has ended."""
        async with self._changing:
            known = await self._store.get_model(model.model_id)
            old = await self._store.get_session(model.session_id)
            if known is None or known.session_id != model.session_id:
                return False
            if old is None or not old.active:
                return False
            await self._store.put_model(replace(known, session_id=session_id))
            return True

    async def change_session(self, session_id: str, **fields: Any) -> None:
        """Change some fields of a session; its end is not one of them."""
        async with self._changing:
            session = await self._store.get_session(session_id)
            if session is not None:
                await self._store.put_session(replace(session, **fields))

    async def put_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        """Store a checkpoint, in place of one with the same path."""
        async with self._changing:
            await self._store.put_checkpoint(checkpoint)

    async def change_checkpoint(self, checkpoint: StoredCheckpoint, **fields: Any) -> bool:
        """Change some fields of a checkpoint; False when it is gone or was overwritten."""
        async with self._changing:
            known = await self._store.get_checkpoint(checkpoint.path)
            if known is None or known.location != checkpoint.location:
                return False
            await self._store.put_checkpoint(replace(known, **fields))
            return True

    async def delete_checkpoint(self, checkpoint: StoredCheckpoint) -> bool:
        """Forget a checkpoint; False when it is gone or was overwritten."""
        async with self._changing:
            known = await self._store.get_checkpoint(checkpoint.path)
            if known is None or known.location != checkpoint.location:
                return False
            return await self._store.delete_checkpoint(checkpoint.path)

    async def end_session(self, session: StoredSession, status: SessionStatus) -> bool:
        """Let a session be over; False when it was: the first reason wins."""
        async with self._changing:
            known = await self._store.get_session(session.session_id)
            if known is None or not known.active:
                return False
            await self._store.put_session(replace(known, status=status))
            return True
