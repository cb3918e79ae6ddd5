"""Text while it is sampled: the server-sent events of `/v1/completions`.

tinkex servers have that route. Others refuse it, and the caller samples in the usual way.
Requests go out with the session's own transport and credentials.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tinkex.errors import RequestFailedError, ResultError
from tinkex.transport.base import Reply
from tinkex.transport.sse import SseStream
from tinkex.wire.routes import Pool, Route

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tinkex.transport.api import Api

# Not in the table of `wire.routes`, which has the routes of the protocol.
COMPLETIONS: Route[None, None] = Route(
    "openai_completions", "POST", "/v1/completions", None, None, Pool.SAMPLE, 300.0, "none"
)
_DONE = "[DONE]"
_MOST_ERROR_BYTES = 1 << 16


async def text_pieces(
    api: Api, model: str, prompt: Sequence[int], **options: Any
) -> AsyncIterator[str]:
    """The continuation of `prompt`, piece by piece; to stop reading stops the sampling.

    `model` is a base model or a `tinker://` path; `options` are those of `/v1/completions`, None
    for what is not given. Raises an APIStatusError before the first piece where the server refuses
    or has no such route, and RequestFailedError when an answer that has begun cannot be ended.
    """
    given = {name: value for name, value in options.items() if value is not None}
    body = msgspec.json.encode({"model": model, "prompt": list(prompt), "stream": True, **given})
    async with api.stream(COMPLETIONS, body) as reply:
        if reply.status != 200:
            text = b""
            async for chunk in reply.chunks:
                text = (text + chunk)[:_MOST_ERROR_BYTES]
            api.raise_for(Reply(reply.status, reply.headers, text), COMPLETIONS)
        async for event in SseStream(reply.chunks):
            if event.data == _DONE:
                return
            yield _text(event.data)
    raise ResultError("the answer broke off: the server ended the stream before its end")


def _text(data: str) -> str:
    try:
        said = msgspec.json.decode(data, type=dict[str, Any])
        if "error" in said:
            raise RequestFailedError(str(said["error"]["message"]), None, "server")
        return "".join(str(choice["text"]) for choice in said["choices"])
    except (msgspec.MsgspecError, LookupError, TypeError) as error:
        raise ResultError("an event of the stream is not one of /v1/completions") from error
