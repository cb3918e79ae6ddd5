"""The ASGI app: the routes of the protocol over a store and an engine.

`create_app` connects the parts it is given; the app's lifespan runs the worker and the
upkeep. The app can be mounted below any path prefix.
"""

from __future__ import annotations

import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tinkex.clock import SteadyDate, SystemClock, time_limit
from tinkex.server import openai
from tinkex.server.api import (
    checkpoints,
    downloads,
    futures,
    imports,
    models,
    operator_pages,
    sampling,
    service,
    sessions,
    training,
    usage,
)
from tinkex.server.api.access import FULL
from tinkex.server.api.audit import CHANGES
from tinkex.server.api.call import Call, Parts, Uploads, check_scope
from tinkex.server.api.downloads import Exports
from tinkex.server.api.errors import error_reply, refuse
from tinkex.server.api.identity import Caller, Identity
from tinkex.server.api.limits import TenantLimits
from tinkex.server.api.passing_on import admit, pass_on
from tinkex.server.api.submit import decode_operation
from tinkex.server.cluster import remote_samples
from tinkex.server.cluster.forwarding import Elsewhere
from tinkex.server.cluster.member import Member
from tinkex.server.cluster.shared_date import SharedDate
from tinkex.server.observability.meters import Meters, Readiness
from tinkex.server.observability.requests import (
    Polls,
    RequestObserver,
    header_value,
    request_record,
)
from tinkex.server.scheduler.outcomes import Waiters
from tinkex.server.scheduler.upkeep import Upkeep
from tinkex.server.scheduler.worker import Worker
from tinkex.server.server_settings import ServerSettings
from tinkex.server.supervision import keep_running, no_stray_cancellation
from tinkex.wire.routes import HEALTHZ, PREFIX, ROUTES, SESSION_HEARTBEAT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

    from tinkex.clock import Clock
    from tinkex.engine.protocol import Engine
    from tinkex.server.api.call import Handler
    from tinkex.server.cluster.member import Joined
    from tinkex.server.store.protocol import Store

    Endpoint = Callable[[Request], Awaitable[Response]]

_MODULES = (
    service,
    sessions,
    models,
    training,
    sampling,
    futures,
    checkpoints,
    downloads,
    imports,
    usage,
)
_NOBODY = Caller("", "")
# How long a node waits for the database to leave; then its lease runs out.
_LEAVE_S = 2.0
# A route's handler is the function of its name in one of these modules.
HANDLERS: dict[str, Handler] = {
    name: vars(module)[name]
    for module in _MODULES
    for name in vars(module).keys() & {route.name for route in ROUTES}
}


def create_app(
    store: Store,
    engine: Engine,
    settings: ServerSettings | None = None,
    clock: Clock | None = None,
    *,
    new_id: Callable[[], str] | None = None,
    meters: Meters | None = None,
    readiness: Readiness | None = None,
    joined: Joined | None = None,
) -> Starlette:
    """The server's app; run its lifespan, or nothing accepted is ever executed.

    `joined` makes it a node of a cluster; the store is then an `Ownership`, too.
    """
    parts = _connect(
        store,
        engine,
        settings or ServerSettings(),
        SteadyDate(clock or SystemClock()),
        new_id or _random_id,
        meters or Meters(),
        readiness or Readiness(),
        joined,
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        async with running(parts):
            yield

    endpoints = {route.name: _endpoint(parts, route) for route in ROUTES}
    app = Starlette(
        routes=[
            *(_route(route, endpoints[route.name]) for route in ROUTES),
            *(_bare(route, endpoints[route.name]) for route in ROUTES if "{ckpt}" in route.path),
            Route(f"{PREFIX}/files/{{token}}/{{name:path}}", _files(parts), methods=["GET"]),
            *operator_pages.routes(parts),
            *openai.routes(parts),
            *_internal(parts),
        ],
        middleware=[
            Middleware(
                RequestObserver,
                clock=parts.clock,
                settings=parts.settings,
                meters=parts.meters,
                readiness=parts.readiness,
                polls=parts.polls,
                error_reply=error_reply,
            ),
            Middleware(
                Direct,
                endpoints={
                    (route.method, route.path): endpoints[route.name]
                    for route in ROUTES
                    if "{" not in route.path
                },
            ),
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error},
    )
    # A path with a slash too many is another path; a redirect would repeat the caller's Host.
    app.router.redirect_slashes = False
    app.state.parts = parts
    return app


@asynccontextmanager
async def running(parts: Parts) -> AsyncGenerator[None]:
    """Run what works between requests."""
    member = parts.member
    leads = (lambda: True) if member is None else (lambda: member.roster.leads)
    upkeep = Upkeep(parts.store, parts.worker, parts.clock, parts.settings, leads)
    failure: Exception | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(_work, parts)
        group.start_soon(keep_running, "upkeep", upkeep.run, parts.clock)
        group.start_soon(keep_running, "watching uploads", parts.uploads.run, parts.clock)
        if member is not None:
            member.start(parts.worker, parts.engine, group)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below, outside the group
            failure = error
        if member is not None:
            async with time_limit(parts.clock, parts.settings.grace_s):
                await member.stop()
        await parts.worker.stop()
        if member is not None:
            # After what runs: the outcomes and snapshots of a node that has left are refused.
            async with time_limit(parts.clock, _LEAVE_S):
                await member.leave()
        group.cancel_scope.cancel()
    parts.exports.close()
    if failure is not None:
        raise failure


async def _work(parts: Parts) -> None:
    """Run the worker; without it nothing that is accepted would be done."""
    await parts.worker.run()
    parts.readiness.fails("worker", parts.worker.ended or "the scheduler has ended")


def _connect(
    store: Store,
    engine: Engine,
    settings: ServerSettings,
    clock: Clock,
    new_id: Callable[[], str],
    meters: Meters,
    readiness: Readiness,
    joined: Joined | None,
) -> Parts:
    member = None
    if joined is not None:
        clock = shared = SharedDate(clock, joined.membership.now)
        member = Member(store, joined, shared, long_poll_s=settings.long_poll_s)
        meters.registry.register(member.figures)
    waiters = Waiters(clock)
    worker = Worker(
        store,
        engine,
        clock,
        waiters,
        meters,
        settings,
        encode=futures.encode_value,
        decode=decode_operation,
        owned=None if member is None else member.keys.owned,
        elsewhere=None if member is None else member.samples.sample,
    )
    return Parts(
        store=store,
        engine=engine,
        settings=settings,
        clock=clock,
        worker=worker,
        waiters=waiters,
        identity=Identity(settings, clock, store),
        limits=TenantLimits(settings, clock, store, worker),
        exports=Exports(engine),
        imports=imports.Imports(),
        new_id=new_id,
        meters=meters,
        readiness=readiness,
        uploads=Uploads(clock, settings.upload_timeout_s),
        polls=Polls(),
        member=member,
    )


def _endpoint(parts: Parts, route: Any) -> Endpoint:
    handler = HANDLERS[route.name]
    public = route.name == HEALTHZ.name

    async def endpoint(request: Request) -> Response:
        record = request_record(request.scope)
        record.route = route.name
        try:
            with no_stray_cancellation():
                caller = _NOBODY if public else await _caller(parts, request, route.name)
                record.owner = owner = caller.owner
                check_scope(request)
                call = Call(request=request, parts=parts, owner=owner, access=caller.access)
                if route.name in training.IN_ORDER:
                    with parts.worker.arriving(owner):
                        return await handler(call)
                return await handler(call)
        except Elsewhere as elsewhere:
            return await pass_on(parts, request, elsewhere)
        except ClientDisconnect:
            return Response(status_code=499)  # for the log; the client has disconnected
        except Exception as error:  # noqa: BLE001  # a request ends here, answered
            return error_reply(request, error)

    return endpoint


def _internal(parts: Parts) -> list[Route]:
    """The routes between nodes."""
    if parts.member is None:
        return []
    return [remote_samples.route(parts.member, parts.worker, parts.engine)]


def _route(route: Any, endpoint: Endpoint) -> Route:
    # A checkpoint id is the two last parts of a path, such as weights/final.
    path = route.path.replace("{ckpt}", "{kind}/{name}")
    return Route(path, endpoint, methods=[route.method], name=route.name)


def _bare(route: Any, endpoint: Endpoint) -> Route:
    """A checkpoint's name without its kind: the handler answers what a checkpoint id looks like."""
    return Route(route.path.replace("{ckpt}", "{name}"), endpoint, methods=[route.method])


async def _caller(parts: Parts, request: Request, route: str) -> Caller:
    passed_on = parts.member is not None and admit(parts, request)
    address = "" if request.client is None else request.client.host
    caller = await parts.identity.caller(header_value(request.scope, "x-api-key") or None, address)
    if caller.access is not FULL:
        parts.identity.check(caller, route, address)
    # The node that a request was sent to has counted it.
    if route != SESSION_HEARTBEAT.name and not passed_on:
        parts.limits.request(caller.owner)
    if route in CHANGES and not passed_on:
        parts.limits.change(caller.owner)
    return caller


def _files(parts: Parts) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        request_record(request.scope).route = "files"
        params = request.path_params
        try:
            if parts.member is not None:
                admit(parts, request)
            return await downloads.download(parts, request, params["token"], params["name"])
        except Elsewhere as elsewhere:
            return await pass_on(parts, request, elsewhere)
        except Exception as error:  # noqa: BLE001  # a request ends here, answered
            return error_reply(request, error)

    return endpoint


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such path, wrong method) in our form."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = f"{request.method} {request.url.path} is not part of this API."
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return error_reply(request, refuse(status, what, headers=headers))


def _random_id() -> str:
    return str(uuid.uuid4())


class Direct:
    """An ASGI app before the router: `endpoints` by method and path."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[tuple[str, str], Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Below a prefix, the path has more parts.
        if scope["type"] == "http" and not scope.get("root_path"):
            endpoint = self._endpoints.get((scope["method"], scope["path"]))
            if endpoint is not None:
                response = await endpoint(Request(scope, receive, send))
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
