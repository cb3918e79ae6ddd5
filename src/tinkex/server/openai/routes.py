"""The routes below `/v1`: who calls, and errors in OpenAI's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route

from tinkex.server.api.call import Call
from tinkex.server.api.identity import credential_of
from tinkex.server.api.passing_on import admit, pass_on
from tinkex.server.cluster.forwarding import Elsewhere
from tinkex.server.observability.requests import request_record
from tinkex.server.openai.endpoints import chat, completions
from tinkex.server.openai.errors import error_event, error_reply, problem
from tinkex.server.openai.models import get_model, list_models
from tinkex.server.openai.responses import EventSender
from tinkex.server.openai.tokenization import TextCodecs
from tinkex.server.supervision import no_stray_cancellation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from tinkex.server.api.call import Parts

    # A handler that streams sends its answer itself and returns None.
    OpenAIHandler = Callable[[Call, TextCodecs, EventSender], Awaitable[Response | None]]

PREFIX = "/v1"


def routes(parts: Parts) -> list[Route]:
    """The OpenAI-compatible endpoints of a server."""
    texts = TextCodecs()

    def route(path: str, method: str, handler: OpenAIHandler, name: str) -> Route:
        return Route(PREFIX + path, _Endpoint(parts, texts, handler, name), methods=[method])

    return [
        route("/models", "GET", _list_models, "openai_models"),
        route("/models/{model:path}", "GET", _get_model, "openai_model"),
        route("/completions", "POST", completions, "openai_completions"),
        route("/chat/completions", "POST", chat, "openai_chat"),
        Route(PREFIX + "/{rest:path}", _Endpoint(parts, texts, _nothing, "openai_unknown")),
    ]


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """An ASGI app around one handler, because a stream outlives a plain reply."""

    parts: Parts
    texts: TextCodecs
    handler: OpenAIHandler
    name: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, events = Request(scope, receive), EventSender(send)
        try:
            with no_stray_cancellation():
                reply = await self._reply(request, events)
        except ClientDisconnect:
            return
        except Elsewhere as elsewhere:
            reply = await pass_on(self.parts, request, elsewhere)
        except Exception as error:  # noqa: BLE001 - a request ends here, answered
            if events.started:
                await events.fail(error_event(request, error))
                return
            reply = error_reply(request, error)
        if reply is not None:
            await reply(scope, receive, send)

    async def _reply(self, request: Request, events: EventSender) -> Response | None:
        record = request_record(request.scope)
        record.route = self.name
        passed_on = self.parts.member is not None and admit(self.parts, request)
        address = "" if request.client is None else request.client.host
        caller = await self.parts.identity.caller(credential_of(request.headers), address)
        record.owner = caller.owner
        self.parts.identity.check(caller, self.name, address)
        if not passed_on:
            self.parts.limits.request(caller.owner)
        call = Call(request=request, parts=self.parts, owner=caller.owner, access=caller.access)
        return await self.handler(call, self.texts, events)


async def _list_models(call: Call, texts: TextCodecs, events: EventSender) -> Response:
    return await list_models(call)


async def _get_model(call: Call, texts: TextCodecs, events: EventSender) -> Response:
    return await get_model(call)


async def _nothing(call: Call, texts: TextCodecs, events: EventSender) -> Response:
    what = f"{call.request.method} {call.request.url.path}"
    raise problem(404, f"{what} is not part of this API.", code="unknown_url")
