"""Requests that another node has to answer: sent to it, or refused so that clients send again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from tinkex.errors import APIStatusError
from tinkex.server.api.errors import error_reply, refuse
from tinkex.server.cluster.forwarding import NotOwner, can_resend
from tinkex.server.cluster.peers import NodeUnreachable
from tinkex.server.observability.requests import request_record

if TYPE_CHECKING:
    from starlette.requests import Request

    from tinkex.server.api.call import Parts
    from tinkex.server.cluster.forwarding import Elsewhere
    from tinkex.server.cluster.member import Member

# So many nodes a request is sent to after the first one.
_MOVES: Final = 3


def admit(parts: Parts, request: Request) -> bool:
    """Whether another node has passed a request on; raises a 403 for one that only says so."""
    hop = None if parts.member is None else parts.member.hops.admit(request.scope)
    if hop is not None:
        request_record(request.scope).passed_by = hop.node_id
    return hop is not None


async def pass_on(parts: Parts, request: Request, elsewhere: Elsewhere) -> Response:
    """The reply of the node that has to answer a request.

    A key may move while a request is under way, or while it waits for a result there: then the new
    owner gets it. Clients send a request again after a 503, and by then the claim names an owner
    that answers.
    """
    member = parts.member
    assert member is not None
    request_record(request.scope).passed_to = elsewhere.node.name
    try:
        reply = await _reply_of_owner(member, request, elsewhere)
        member.figures.passed_on["answered"] += 1
        return reply
    except (NodeUnreachable, NotOwner) as error:
        outcome = "not_owner" if isinstance(error, NotOwner) else "unreachable"
        member.figures.passed_on[outcome] += 1
        detail = f"{elsewhere.key} cannot be reached ({error}); send the request again."
        return error_reply(request, refuse(503, detail, headers={"retry-after": "1"}))
    except APIStatusError as error:
        return error_reply(request, error)
    except ClientDisconnect:
        return Response(status_code=499)  # for the log; the client has disconnected


async def _reply_of_owner(member: Member, request: Request, elsewhere: Elsewhere) -> Response:
    """The reply, of another node if the first one cannot be reached or has handed the key over."""
    node, others = elsewhere.node, list(elsewhere.others or ())
    for _ in range(_MOVES):
        try:
            return await member.forwarder.forward(request, node)
        except (NodeUnreachable, NotOwner) as error:
            if not can_resend(request):
                raise
            if elsewhere.others is None:
                unreachable = isinstance(error, NodeUnreachable)
                found = await member.next_owner(elsewhere.key, node, unreachable=unreachable)
            else:
                found = others.pop(0) if others else None
            if found is None:
                raise
            node = found
    return await member.forwarder.forward(request, node)
