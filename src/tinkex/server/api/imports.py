"""Adapters from elsewhere: `import_weights`, which is no part of the official protocol.

An upload becomes a checkpoint of a training run of its own. It is in the store, and its file where
the engine keeps such files, before the request is answered.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast, get_args

import anyio
import anyio.to_thread

from tinkex.errors import RequestFailedError
from tinkex.server.api.adapter_body import EXTRA_BYTES, Incoming, receive_adapter
from tinkex.server.api.call import reply
from tinkex.server.api.errors import refuse
from tinkex.server.scheduler.checkpoints import check_name
from tinkex.server.store.records import AuditEntry, Model, StoredCheckpoint
from tinkex.types import AdamOptimizerConfig
from tinkex.wire import routes
from tinkex.wire.bodies import ImportedKind, ImportWeightsResponse
from tinkex.wire.routes import MEDIA_TAR

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from starlette.responses import Response

    from tinkex.adapters.folder import AdapterInfo
    from tinkex.engine.protocol import ImportedAdapter
    from tinkex.server.api.call import Call, Handler

_AT_ONCE: Final = 2
# What the engine keeps is float32, whatever came.
_KEPT_ITEM_BYTES: Final = 4
_DEFAULT_NAME: Final = "imported"


class Imports:
    """Uploads under way: a tenant may have a few, since each takes room on the disk."""

    def __init__(self) -> None:
        # Mutable state: how many each owner has.
        self._open: Counter[str] = Counter()

    @contextmanager
    def one_of(self, owner: str) -> Generator[None]:
        """Count one while the block lasts; raises a 429 when there are too many."""
        if self._open[owner] >= _AT_ONCE:
            detail = f"You have {_AT_ONCE} imports under way; wait for one of them to end."
            raise refuse(429, detail, headers={"retry-after": "5"})
        self._open[owner] += 1
        try:
            yield
        finally:
            self._open[owner] -= 1
            if not self._open[owner]:
                del self._open[owner]


async def import_weights(call: Call) -> Response:
    """Keep an uploaded adapter; the same request sent again is answered by the first."""
    key = call.header("x-idempotency-key")
    if key and (known := await call.store.recall(call.owner, f"import:{key}")) is not None:
        return reply(ImportWeightsResponse(tinker_path=known))
    base_model = call.base_model(call.request.query_params.get("base_model", "")).name
    name = call.request.query_params.get("name", _DEFAULT_NAME)
    check_name(name)
    kind = _kind(call)
    _check_request(call)
    with call.parts.imports.one_of(call.owner):
        async with _folder() as folder:
            await _receive(call, folder)
            checkpoint = await _keep(call, folder, base_model, kind, name)
    if key:
        await call.store.remember(call.owner, f"import:{key}", checkpoint.path)
    return reply(ImportWeightsResponse(tinker_path=checkpoint.path))


def _kind(call: Call) -> ImportedKind:
    kind = call.request.query_params.get("kind", "weights")
    if kind not in get_args(ImportedKind):
        raise refuse(400, f"kind must be {' or '.join(get_args(ImportedKind))}, not {kind!r}.")
    return cast("ImportedKind", kind)


def _check_request(call: Call) -> None:
    """Refuse a body by what its headers say of it."""
    media = call.header("content-type").partition(";")[0].strip().lower()
    if media != MEDIA_TAR:
        raise refuse(415, f"Content-Type must be {MEDIA_TAR}, not {media or 'missing'}.")
    if call.header("content-encoding").strip().lower() not in ("", "identity"):
        raise refuse(415, "An adapter must not be compressed: its numbers are noise.")
    declared, most = call.header("content-length"), call.settings.max_import_bytes
    if declared.isascii() and declared.isdigit() and int(declared) > most + EXTRA_BYTES:
        raise refuse(413, f"An adapter may have {most} bytes here (max_import_bytes).")


@asynccontextmanager
async def _folder() -> AsyncGenerator[Path]:
    """A folder for one upload, gone at the end."""
    make = partial(tempfile.TemporaryDirectory[str], prefix="tinkex-import-")
    made = await anyio.to_thread.run_sync(make)
    try:
        yield Path(made.name)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(made.cleanup)


async def _receive(call: Call, folder: Path) -> None:
    async def welcome(adapter: AdapterInfo) -> None:
        await call.worker.checkpoints.make_room(call.owner, adapter.parameters * _KEPT_ITEM_BYTES)

    body = Incoming(call.request.stream(), call.parts.uploads)
    await receive_adapter(body, folder, call.settings.max_import_bytes, welcome)


async def _keep(
    call: Call, folder: Path, base_model: str, kind: ImportedKind, name: str
) -> StoredCheckpoint:
    session_id = f"import-{call.parts.new_id()}"
    path = f"tinker://{session_id}:train:0/{kind}/{name}"
    engine = call.parts.engine
    imported = await engine.import_saved(base_model, folder, f"{path}@import")
    try:
        # Again: matrices that the adapter leaves out are kept, too, and others save meanwhile.
        await call.worker.checkpoints.make_room(call.owner, imported.size_bytes)
    except RequestFailedError:
        await engine.delete_saved(f"{path}@import")
        raise
    return await _record(call, imported, session_id, base_model, kind, name)


async def _record(
    call: Call,
    imported: ImportedAdapter,
    session_id: str,
    base_model: str,
    kind: ImportedKind,
    name: str,
) -> StoredCheckpoint:
    now = call.now()
    run = await call.store.add_model(
        Model(
            model_id=f"{session_id}:train:0",
            owner=call.owner,
            session_id=session_id,
            base_model=base_model,
            lora=imported.lora,
            optimizer=AdamOptimizerConfig(),
            created_at=now,
            last_request_at=now,
            # Closed from the start: it is listed, and nothing ever runs in it.
            snapshot_seq=0,
        )
    )
    path = f"tinker://{run.model_id}/{kind}/{name}"
    checkpoint = StoredCheckpoint(
        path=path,
        owner=call.owner,
        model_id=run.model_id,
        kind=kind,
        name=name,
        location=f"{path}@import",
        base_model=base_model,
        lora=run.lora,
        optimizer=run.optimizer,
        has_optimizer=False,
        created_at=now,
        size_bytes=imported.size_bytes,
    )
    await call.store.put_checkpoint(checkpoint)
    details = {"model_id": run.model_id, "tinker_path": path}
    entry = AuditEntry(
        at=now, owner=call.owner, topic="checkpoints", event="checkpoint_created", details=details
    )
    await call.store.audit(entry)
    return checkpoint


HANDLERS: dict[str, Handler] = {routes.IMPORT_WEIGHTS.name: import_weights}
