"""Links to the files of a checkpoint, and what is behind them.

A link needs no key, so it is signed, ends by itself, and ends with its checkpoint.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, cast

from starlette.responses import RedirectResponse

from tinkex.server import age
from tinkex.server.api.call import reply
from tinkex.server.api.checkpoints import named
from tinkex.server.api.errors import refuse
from tinkex.server.api.exports import ARCHIVE, FILES
from tinkex.server.api.ranges import send
from tinkex.server.api.sessions import when
from tinkex.server.scheduler.checkpoints import is_live
from tinkex.types import ExternalWeightsUrlsResponse
from tinkex.wire import routes
from tinkex.wire.bodies import ArchiveUrlResponse

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from tinkex.server.api.call import Call, Handler, Parts
    from tinkex.server.api.exports import ExportKind
    from tinkex.server.store.records import StoredCheckpoint

_HEAD_BYTES = 1 << 12


async def get_external_weights_urls(call: Call) -> Response:
    """A signed link per file of an export."""
    checkpoint = await named(call)
    if checkpoint.kind != "external_weights":
        raise refuse(
            400, f"{checkpoint.path} is no export; make one with save_weights_external first."
        )
    token, expires = _token(call, checkpoint, "file")
    names = FILES if checkpoint.age_recipients is None else [f"{n}{age.SUFFIX}" for n in FILES]
    urls = {name: call.link(f"{routes.PREFIX}/files/{token}/{name}") for name in names}
    return reply(ExternalWeightsUrlsResponse(urls=urls, expires=when(expires)))


async def get_checkpoint_archive(call: Call) -> Response:
    """One tar of a checkpoint: a redirect for old clients, a link in JSON for newer ones."""
    token, expires = _token(call, await named(call), "archive")
    url = call.link(f"{routes.PREFIX}/files/{token}/{ARCHIVE}")
    # The clients that want a redirect add a second Accept header, for gzip.
    if not any("gzip" in accepted for accepted in call.request.headers.getlist("accept")):
        return reply(ArchiveUrlResponse(url=url, expires=when(expires)))
    stamp = when(expires).strftime("%a, %d %b %Y %H:%M:%S GMT")
    return RedirectResponse(url, status_code=302, headers={"expires": stamp})


def _token(call: Call, checkpoint: StoredCheckpoint, kind: ExportKind) -> tuple[str, float]:
    return call.parts.identity.make_link(
        {"kind": kind, "path": checkpoint.path, "location": checkpoint.location}
    )


async def send_export(
    parts: Parts, request: Request, claims: dict[str, str], name: str
) -> Response:
    """What a link to a file or an archive stands for, as long as its checkpoint is there."""
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


HANDLERS: dict[str, Handler] = {
    routes.GET_EXTERNAL_WEIGHTS_URLS.name: get_external_weights_urls,
    routes.GET_CHECKPOINT_ARCHIVE.name: get_checkpoint_archive,
}
