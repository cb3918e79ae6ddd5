"""Requests that another node has to answer: sent to it, or refused so that clients send again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from tinkex.errors import APIStatusError
from tinkex.server.api.errors import error_reply, refuse
from tinkex.server.cluster.forwarding import NotOwner
from tinkex.server.cluster.peers import NodeUnreachable

if TYPE_CHECKING:
    from starlette.requests import Request

    from tinkex.server.api.call import Parts
    from tinkex.server.cluster.forwarding import Elsewhere


def admit(parts: Parts, request: Request) -> bool:
    """Whether another node has passed a request on; raises a 403 for one that only says so."""
    return parts.member is not None and parts.member.hops.admit(request.scope) is not None


async def pass_on(parts: Parts, request: Request, elsewhere: Elsewhere) -> Response:
    """The reply of the node that has to answer a request.

    Clients send a request again after a 503, and by then the claim names its new owner.
    """
    assert parts.member is not None
    try:
        return await parts.member.forwarder.forward(request, elsewhere.node)
    except (NodeUnreachable, NotOwner) as error:
        detail = f"{elsewhere.key} cannot be reached ({error}); send the request again."
        return error_reply(request, refuse(503, detail, headers={"retry-after": "1"}))
    except APIStatusError as error:
        return error_reply(request, error)
    except ClientDisconnect:
        return Response(status_code=499)  # for the log; the client has disconnected
