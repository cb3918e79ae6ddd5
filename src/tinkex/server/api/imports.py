"""Uploaded adapters: `import_weights`, which is no part of the official protocol.

The body is a tar, read as it arrives. Names, shapes and sizes are checked before the weights
arrive; names in the archive are compared, never used as paths. An upload becomes a checkpoint of a
training run of its own, which is stored before the request is answered.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast, get_args

import anyio
import anyio.to_thread

from tinkex.adapters.archive import FILES
from tinkex.adapters.folder import MAX_CONFIG_BYTES, check_adapter
from tinkex.adapters.peft_layout import CONFIG_FILE, WEIGHTS_FILE, read_config
from tinkex.adapters.tensor_header import LENGTH, head_length, parse_head
from tinkex.errors import APIStatusError, RequestFailedError, quoted
from tinkex.server.api.call import declares_more, reply
from tinkex.server.api.checkpoints import audit
from tinkex.server.api.errors import refuse
from tinkex.server.api.submit import new_run
from tinkex.server.scheduler.checkpoints import check_name
from tinkex.server.store.records import StoredCheckpoint
from tinkex.wire.bodies import ImportedKind, ImportWeightsResponse
from tinkex.wire.routes import MEDIA_TAR

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator

    from starlette.responses import Response

    from tinkex.adapters.folder import AdapterInfo
    from tinkex.adapters.peft_layout import AdapterConfig
    from tinkex.engine.protocol import ImportedAdapter
    from tinkex.server.api.call import Call, Uploads
    from tinkex.server.scheduler.room import Reservation

    AdapterCheck = Callable[[AdapterInfo], Awaitable[None]]

_AT_ONCE: Final = 2
# What the engine keeps is float32, whatever came.
_KEPT_ITEM_BYTES: Final = 4
_DEFAULT_NAME: Final = "imported"

BLOCK_BYTES: Final = 8 << 20
"""How much must arrive within each `upload_timeout_s`."""
_TAR: Final = tarfile.BLOCKSIZE
_MOST_PADDING: Final = 64 * _TAR
EXTRA_BYTES: Final = MAX_CONFIG_BYTES + _MOST_PADDING
"""What an archive may have besides the weights."""


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
    """Store an uploaded adapter; a repeated request gets the first one's reply."""
    key = call.idempotency_key()
    if key and (known := await call.store.recall(call.owner, f"import:{key}")) is not None:
        return reply(ImportWeightsResponse(tinker_path=known))
    base_model = (await call.base_model(call.request.query_params.get("base_model", ""))).name
    await call.at_engine(base_model)
    name = call.request.query_params.get("name", _DEFAULT_NAME)
    check_name(name)
    kind = _kind(call)
    _check_request(call)
    with call.parts.imports.one_of(call.owner):
        async with _folder() as folder, AsyncExitStack() as held:
            room = await _receive(call, folder, held)
            checkpoint = await _keep(call, folder, room, base_model, kind, name)
    if key:
        await call.store.remember(call.owner, f"import:{key}", checkpoint.path)
    return reply(ImportWeightsResponse(tinker_path=checkpoint.path))


def _kind(call: Call) -> ImportedKind:
    kind = call.request.query_params.get("kind", "weights")
    if kind not in get_args(ImportedKind):
        raise refuse(
            400, f"kind must be {' or '.join(get_args(ImportedKind))}, not {quoted(kind)}."
        )
    return cast("ImportedKind", kind)


def _check_request(call: Call) -> None:
    """Refuse a body by its headers."""
    media = call.header("content-type").partition(";")[0].strip().lower()
    if media != MEDIA_TAR:
        raise refuse(415, f"Content-Type must be {MEDIA_TAR}, not {media or 'missing'}.")
    if call.header("content-encoding").strip().lower() not in ("", "identity"):
        raise refuse(415, "An adapter must not be compressed: its numbers are noise.")
    most = call.settings.max_import_bytes
    if declares_more(call.request, most + EXTRA_BYTES):
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


async def _receive(call: Call, folder: Path, held: AsyncExitStack) -> Reservation:
    """Read the body; the room for it is reserved before its weights arrive."""
    room: list[Reservation] = []

    async def check(adapter: AdapterInfo) -> None:
        size_bytes = adapter.parameters * _KEPT_ITEM_BYTES
        reserved = call.worker.room.reserved(call.owner, size_bytes, checkpoints=1)
        room.append(await held.enter_async_context(reserved))

    body = Incoming(call.request.stream(), call.parts.uploads)
    await receive_adapter(body, folder, call.settings.max_import_bytes, check)
    return room[0]


async def _keep(
    call: Call, folder: Path, room: Reservation, base_model: str, kind: ImportedKind, name: str
) -> StoredCheckpoint:
    session_id = f"import-{call.parts.new_id()}"
    path = f"tinker://{session_id}:train:0/{kind}/{name}"
    engine = call.parts.engine
    imported = await engine.import_saved(base_model, folder, f"{path}@import")
    try:
        # Checked again: matrices that the adapter leaves out are stored, too.
        async with room.spent(imported.size_bytes):
            return await _record(call, imported, session_id, base_model, kind, name)
    except (RequestFailedError, APIStatusError):
        await engine.delete_saved(f"{path}@import")
        raise


async def _record(
    call: Call,
    imported: ImportedAdapter,
    session_id: str,
    base_model: str,
    kind: ImportedKind,
    name: str,
) -> StoredCheckpoint:
    run = new_run(call, session_id, 0, base_model, imported.lora)
    # Closed from the start (`snapshot_seq`): it is listed, and nothing ever runs in it.
    run = replace(run, snapshot_seq=0, project_id=call.access.project_id)
    run = await call.parts.limits.add_model(run)
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
        created_at=run.created_at,
        size_bytes=imported.size_bytes,
        project_id=run.project_id,
    )
    await call.store.put_checkpoint(checkpoint)
    await audit(call, "checkpoint_imported", checkpoint)
    return checkpoint


class Incoming:
    """A body that is read piece by piece; each piece has the time that other bodies have."""

    def __init__(self, stream: AsyncIterator[bytes], uploads: Uploads) -> None:
        self._stream = stream
        self._uploads = uploads
        # Mutable state: what has arrived and was not taken yet.
        self._held = bytearray()

    async def take(self, count: int) -> bytes:
        """The next bytes; fewer only at the end of the body."""
        if len(self._held) < count:
            await self._uploads.within_limit(self._fill(count))
        taken = bytes(memoryview(self._held)[:count])
        del self._held[:count]
        return taken

    async def exactly(self, count: int, what: str) -> bytes:
        """The next bytes, all of them."""
        taken = await self.take(count)
        if len(taken) < count:
            raise refuse(400, f"The body ends within {what}; send it again.")
        return taken

    async def _fill(self, count: int) -> bytes:
        while len(self._held) < count:
            piece = await anext(self._stream, None)
            if piece is None:
                break
            self._held += piece
        return b""


async def receive_adapter(
    body: Incoming, folder: Path, most: int, check: AdapterCheck
) -> AdapterInfo:
    """Write the adapter in a body to a folder.

    `check` gets its description before its weights are read, and raises to refuse it.
    """
    size = await _begin(body, CONFIG_FILE, MAX_CONFIG_BYTES)
    content = await body.exactly(size, CONFIG_FILE)
    await _pad(body, size)
    config = read_config(content)
    size = await _begin(body, WEIGHTS_FILE, most)
    first = await body.exactly(min(size, LENGTH.size), WEIGHTS_FILE)
    length = head_length(first, size)
    head = await body.exactly(length, WEIGHTS_FILE)
    left = size - LENGTH.size - length
    # In a thread: there may be thousands of tensors, and other requests must not wait.
    adapter = await anyio.to_thread.run_sync(_described, config, head, left)
    await check(adapter)
    await _write(folder / CONFIG_FILE, content)
    await _write(folder / WEIGHTS_FILE, first + head)
    await _copy(body, folder / WEIGHTS_FILE, left)
    await _pad(body, size)
    await _end(body)
    return adapter


def _described(config: AdapterConfig, head: bytes, data_bytes: int) -> AdapterInfo:
    return check_adapter(config, parse_head(head, data_bytes))


async def _begin(body: Incoming, name: str, most: int) -> int:
    """The size of the file that comes next, which must be this one."""
    head = await body.exactly(_TAR, "the archive")
    try:
        info = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise refuse(400, f"The body is no tar with {' and '.join(FILES)}: {error}.") from None
    if info.name != name or info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise refuse(
            400,
            f"The archive must hold the files {' and '.join(FILES)}, in this order and nothing "
            f"else; {name} was expected and {quoted(info.name)} is there.",
        )
    if info.size > most:
        raise refuse(413, f"{name} has {info.size} bytes; it may have {most} here.")
    return max(info.size, 0)


async def _pad(body: Incoming, size: int) -> None:
    await body.exactly(-size % _TAR, "the archive")


async def _end(body: Incoming) -> None:
    """The end of an archive is empty blocks; programs write different numbers of them."""
    rest = await body.take(_MOST_PADDING + 1)
    if len(rest) > _MOST_PADDING or rest.strip(b"\0"):
        raise refuse(400, f"The archive must hold {' and '.join(FILES)} and nothing else.")


async def _copy(body: Incoming, path: Path, left: int) -> None:
    while left:
        piece = await body.exactly(min(left, BLOCK_BYTES), WEIGHTS_FILE)
        await _write(path, piece)
        left -= len(piece)


async def _write(path: Path, content: bytes) -> None:
    def append() -> None:
        with path.open("ab") as file:
            file.write(content)

    try:
        await anyio.to_thread.run_sync(append)
    except OSError as error:
        detail = f"The server has no room for the upload ({error.strerror}); try again later."
        raise refuse(507, detail) from error
