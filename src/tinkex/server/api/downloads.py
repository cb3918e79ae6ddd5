"""Downloads: signed links to the files of a checkpoint or to a trace, and the replies, in ranges.

A link needs no key, so it is signed and expires; a link to a checkpoint ends with the checkpoint.
The engine returns an export as a whole. One that is too large to be held in memory for every
download is written once to unnamed files, which the system deletes when the process exits.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import tarfile
import tempfile
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast

import anyio
import anyio.to_thread
from starlette.responses import RedirectResponse, Response, StreamingResponse

from tinkex.errors import InputError, StorageError
from tinkex.server import age
from tinkex.server.api.call import no_node, reply
from tinkex.server.api.checkpoints import audit, named
from tinkex.server.api.errors import refuse
from tinkex.server.api.sessions import when
from tinkex.server.api.trace import merged, trace
from tinkex.server.cluster.hop import received_hop, target_of
from tinkex.server.cluster.peers import BrokenOffError, NodeUnreachable
from tinkex.server.cluster.roster import NoNodeError
from tinkex.server.scheduler.checkpoints import is_live
from tinkex.types import ExternalWeightsUrlsResponse
from tinkex.wire import routes
from tinkex.wire.bodies import ArchiveUrlResponse

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from typing import IO

    from starlette.datastructures import Headers
    from starlette.requests import Request

    from tinkex.engine.protocol import Engine, Layout
    from tinkex.server.api.call import Call, Parts
    from tinkex.server.cluster.member import Member
    from tinkex.server.store.records import StoredCheckpoint

    Files = dict[str, IO[bytes]]
    NewFile = Callable[[], IO[bytes]]
    Recipients = tuple[str, ...] | None
    Key = tuple[str, "ExportKind", Recipients]

_log = logging.getLogger(__name__)
_HEAD_BYTES = 1 << 12

_PIECE_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
ExportKind = Literal["file", "archive"]
FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
ARCHIVE: Final = "archive.tar"
# Archives are of older clients, which know the vendor's own names of tensors.
_LAYOUTS: dict[ExportKind, Layout] = {"file": "peft", "archive": "tinker"}
_IN_MEMORY_BYTES = 1 << 20
_ON_DISK_BYTES = 8 << 30


async def get_external_weights_urls(call: Call) -> Response:
    """A signed link per file of an export."""
    checkpoint = await named(call)
    if checkpoint.kind != "external_weights":
        raise refuse(
            400, f"{checkpoint.path} is no export; make one with save_weights_external first."
        )
    token, expires = _token(call, checkpoint, "file")
    await audit(call, "checkpoint_link_made", checkpoint)
    names = FILES if checkpoint.age_recipients is None else [f"{n}{age.SUFFIX}" for n in FILES]
    urls = {name: call.link(f"{routes.PREFIX}/files/{token}/{name}") for name in names}
    return reply(ExternalWeightsUrlsResponse(urls=urls, expires=when(expires)))


async def get_checkpoint_archive(call: Call) -> Response:
    """One tar of a checkpoint: a redirect for old clients, a link in JSON for newer ones."""
    checkpoint = await named(call)
    token, expires = _token(call, checkpoint, "archive")
    await audit(call, "checkpoint_link_made", checkpoint)
    url = call.link(f"{routes.PREFIX}/files/{token}/{ARCHIVE}")
    # The clients that want a redirect add a second Accept header, for gzip.
    if not any("gzip" in accepted for accepted in call.request.headers.getlist("accept")):
        return reply(ArchiveUrlResponse(url=url, expires=when(expires)))
    stamp = when(expires).strftime("%a, %d %b %Y %H:%M:%S GMT")
    return RedirectResponse(url, status_code=302, headers={"expires": stamp})


def _token(call: Call, checkpoint: StoredCheckpoint, kind: ExportKind) -> tuple[str, float]:
    return call.parts.identity.make_link(
        {"kind": kind, "path": checkpoint.path, "location": checkpoint.location},
        call.access.key_id,
    )


async def send_export(
    parts: Parts, request: Request, claims: dict[str, str], name: str
) -> Response:
    """The file or archive of a link, while its checkpoint exists."""
    checkpoint = await parts.store.get_checkpoint(claims["path"])
    gone = refuse(404, "There is nothing to download here.")
    if checkpoint is None or checkpoint.location != claims["location"]:
        raise gone
    if not is_live(checkpoint, parts.clock.wall()):
        raise gone
    kind = cast("ExportKind", claims["kind"])
    recipients = checkpoint.age_recipients
    source = await parts.exports.open(checkpoint.location, kind, name, recipients)
    if source is None:
        raise gone
    # Encryption draws a new key each time it is done, which the beginning of a file shows.
    identity = f"{kind} {checkpoint.location} {name}".encode() + await source.read(0, _HEAD_BYTES)
    etag = hashlib.sha256(identity).hexdigest()[:32]
    media = "application/x-tar" if kind == "archive" else "application/octet-stream"
    return send(request.headers, source, media, etag, stable=recipients is None)


class ByteSource(Protocol):
    """Bytes that do not change."""

    @property
    def size_bytes(self) -> int: ...
    async def read(self, start: int, count: int) -> bytes: ...
    def close(self) -> None: ...


def send(
    headers: Headers, source: ByteSource, media_type: str, etag: str, *, stable: bool = True
) -> Response:
    """The reply to a GET; the source is closed when it was sent.

    A range that is not understood, or of something that has changed, is answered by the whole, as
    the standard says. What is not `stable` is another file each time it is made: a part of it is
    sent only to a client that says which one it has (If-Range).
    """
    size = source.size_bytes
    reply_headers = {
        "accept-ranges": "bytes",
        "etag": f'"{etag}"',
        "content-disposition": "attachment",
    }
    wanted = headers.get("range")
    known = headers.get("if-range", f'"{etag}"' if stable else None)
    if wanted is None or known != f'"{etag}"':
        part: range | None = range(size)
    else:
        part = _part(wanted, size)
    if part is None:
        source.close()
        reply_headers["content-range"] = f"bytes */{size}"
        return Response(status_code=416, headers=reply_headers)
    reply_headers["content-length"] = str(len(part))
    partial = len(part) < size
    if partial:
        reply_headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
    return StreamingResponse(
        _pieces(source, part), 206 if partial else 200, reply_headers, media_type=media_type
    )


def _part(wanted: str, size: int) -> range | None:
    """The bytes a Range header means; None when there are none such."""
    found = _RANGE.fullmatch(wanted.strip().replace(" ", ""))
    if found is None or not any(found.groups()):
        return range(size)
    first, last = found.groups()
    if not first:
        start, stop = max(size - int(last), 0), size
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
    return range(start, stop) if start < stop else None


async def _pieces(source: ByteSource, part: range) -> AsyncGenerator[bytes]:
    try:
        for start in range(part.start, part.stop, _PIECE_BYTES):
            yield await source.read(start, min(_PIECE_BYTES, part.stop - start))
    finally:
        source.close()


async def download(parts: Parts, request: Request, token: str, name: str) -> Response:
    """The export or trace of a signed link."""
    claims = await parts.identity.open_link(token)
    if claims["kind"] == "trace":
        return await _trace(parts, request, claims["session"])
    await _at_engine(parts, claims["path"])
    return await send_export(parts, request, claims, name)


async def _at_engine(parts: Parts, path: str) -> None:
    """Go on only at a node with the base model of a checkpoint; others cannot export it."""
    checkpoint = None if parts.member is None else await parts.store.get_checkpoint(path)
    if parts.member is not None and checkpoint is not None:
        roster = parts.member.roster
        try:
            await parts.member.when(lambda: roster.at_engine(checkpoint.base_model))
        except NoNodeError as error:
            raise no_node(error) from error


async def _trace(parts: Parts, request: Request, session_id: str) -> Response:
    operations = await parts.store.operations(session_id)
    body = trace(operations, parts.polls.of(session_id))
    if parts.member is not None and received_hop(request.scope) is None:
        others = await _traces_elsewhere(parts.member, request, session_id)
        body = await anyio.to_thread.run_sync(merged, [body, *others]) if others else body
    return Response(body, media_type="application/json")


async def _traces_elsewhere(member: Member, request: Request, session_id: str) -> list[bytes]:
    """What the other nodes know that own something of a session: its samples and polls there."""
    found: list[bytes] = []
    for node in await member.owners_of_session(session_id):
        try:
            found.append(await member.forwarder.ask(node, "GET", target_of(request.scope)))
        except (NodeUnreachable, BrokenOffError, InputError) as error:
            _log.warning("a trace lacks what node %s knows: %s", node.name, error)
    return found


@dataclass(frozen=True, slots=True)
class InMemory:
    """A `ByteSource` that is small."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return len(self.data)

    async def read(self, start: int, count: int) -> bytes:
        """A part of it."""
        return self.data[start : start + count]

    def close(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A `ByteSource` that is an open file of its own; readers do not move each other."""

    descriptor: int
    size_bytes: int

    async def read(self, start: int, count: int) -> bytes:
        """A part of it."""
        return await anyio.to_thread.run_sync(os.pread, self.descriptor, count, start)

    def close(self) -> None:
        """Free it; the file itself stays while others have it open."""
        os.close(self.descriptor)


class Exports:
    """Exports by location, made when first asked for. Locations are never reused."""

    def __init__(
        self,
        engine: Engine,
        *,
        in_memory_bytes: int = _IN_MEMORY_BYTES,
        on_disk_bytes: int = _ON_DISK_BYTES,
    ) -> None:
        self._engine = engine
        self._in_memory_bytes = in_memory_bytes
        self._on_disk_bytes = on_disk_bytes
        # Mutable state: open files per export, longest unused first, and one lock for each that
        # is being made.
        self._kept: OrderedDict[Key, Files] = OrderedDict()
        self._making: defaultdict[Key, anyio.Lock] = defaultdict(anyio.Lock)

    async def open(
        self, location: str, kind: ExportKind, name: str, recipients: Recipients = None
    ) -> ByteSource | None:
        """One file of an export, to be closed by the caller; None when there is none such.

        With recipients the files are encrypted and their names end in `.age`.
        """
        key = (location, kind, recipients)
        lock = self._making[key]
        try:
            async with lock:
                return await self._open(key, name)
        finally:
            if not (lock.locked() or lock.statistics().tasks_waiting):
                self._making.pop(key, None)

    def close(self) -> None:
        """Free everything."""
        while self._kept:
            self._drop_oldest()

    async def _open(self, key: Key, name: str) -> ByteSource | None:
        if key not in self._kept:
            location, kind, recipients = key
            files = await self._engine.export_saved(location, layout=_LAYOUTS[kind])
            write = _tarred if kind == "archive" else _written
            if sum(map(len, files.values())) <= self._in_memory_bytes:
                ready = cast("dict[str, io.BytesIO]", write(files, recipients, io.BytesIO))
                return InMemory(ready[name].getvalue()) if name in ready else None
            try:
                self._kept[key] = await anyio.to_thread.run_sync(
                    write, files, recipients, tempfile.TemporaryFile
                )
            except OSError as error:
                # Not by its path: who downloads need not know where the server keeps its files.
                raise StorageError(
                    f"the server could not write a copy of the files: {error.strerror}"
                ) from error
            self._make_room()
        self._kept.move_to_end(key)
        file = self._kept[key].get(name)
        if file is None:
            return None
        descriptor = os.dup(file.fileno())
        return OnDisk(descriptor, os.fstat(descriptor).st_size)

    def _make_room(self) -> None:
        while len(self._kept) > 1 and self._size_bytes() > self._on_disk_bytes:
            self._drop_oldest()

    def _size_bytes(self) -> int:
        open_files = (file for files in self._kept.values() for file in files.values())
        return sum(os.fstat(file.fileno()).st_size for file in open_files)

    def _drop_oldest(self) -> None:
        _, files = self._kept.popitem(last=False)
        for file in files.values():
            file.close()


def _written(files: Mapping[str, bytes], recipients: Recipients, new: NewFile) -> Files:
    """Each file in one of its own, encrypted if there are recipients."""
    written: Files = {}
    for name, data in files.items():
        if recipients is None:
            target = written[name] = new()
            target.write(data)
        else:
            target = written[f"{name}{age.SUFFIX}"] = new()
            age.encrypt(io.BytesIO(data), target, recipients)
        target.flush()
    return written


def _tarred(files: Mapping[str, bytes], recipients: Recipients, new: NewFile) -> Files:
    """An uncompressed tar archive of the files."""
    target = new()
    if recipients is None:
        parts: Files = {name: io.BytesIO(data) for name, data in files.items()}
    else:
        parts = _written(files, recipients, new)
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name, part in parts.items():
            info = tarfile.TarInfo(name)
            info.size = part.seek(0, os.SEEK_END)
            part.seek(0)
            tar.addfile(info, part)
            part.close()
    target.flush()
    return {ARCHIVE: target}
