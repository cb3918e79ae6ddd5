"""An ASGI app as the other end."""

from __future__ import annotations

import gzip

import anyio
import pytest

from tinkex.errors import APIConnectionError, APITimeoutError
from tinkex.testing.asgi import AsgiTransport
from tinkex.testing.fake_clock import FakeClock
from tinkex.transport.base import HttpRequest, Pool

pytestmark = pytest.mark.anyio


def request(body: bytes | None = b"{}", **options) -> HttpRequest:
    options = {"timeout_s": 45.0, **options}
    return HttpRequest("POST", "/api/v1/x", Pool.FUTURES, body=body, **options)


async def answer(send, body: bytes = b"ok", status: int = 200, headers=()):
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


async def test_the_app_sees_the_request_a_server_would_show_it():
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope, message=await receive())
        await answer(send, headers=[(b"X-A", b"1"), (b"x-a", b"2")])

    transport = AsgiTransport(app, "http://h:1/base")
    asked = HttpRequest(
        "POST", "/api/v1/runs/a%20b", Pool.REST, 5.0, "a=1", {"X-Key": "v"}, b"body"
    )
    reply = await transport.send(asked)
    assert (reply.status, reply.body, reply.headers) == (200, b"ok", {"x-a": "1, 2"})
    assert (seen["method"], seen["path"], seen["root_path"]) == (
        "POST",
        "/base/api/v1/runs/a b",
        "/base",
    )
    assert (seen["raw_path"], seen["query_string"]) == (b"/base/api/v1/runs/a%20b", b"a=1")
    assert (b"x-key", b"v") in seen["headers"]
    assert (b"host", b"h:1") in seen["headers"]
    assert (b"content-length", b"4") in seen["headers"]
    assert seen["message"] == {"type": "http.request", "body": b"body", "more_body": False}


async def test_a_starlette_app_below_a_prefix_works():
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def echo(request):
        return JSONResponse({"got": (await request.body()).decode(), "q": request.url.query})

    app = Starlette(routes=[Route("/api/v1/x", echo, methods=["POST"])])
    reply = await AsgiTransport(app, "http://h/prefix").send(request(b"hi", query="a=1"))
    assert (reply.status, reply.body) == (200, b'{"got":"hi","q":"a=1"}')


async def test_a_hanging_app_times_out_on_the_given_clock():
    async def app(scope, receive, send):
        await anyio.sleep_forever()

    clock = FakeClock()
    async with clock.running():
        with pytest.raises(APITimeoutError, match="within 45 s"):
            await AsgiTransport(app, clock=clock).send(request())
    assert clock.now() == 45.0


async def test_an_app_that_listens_for_a_disconnect_is_just_waiting():
    async def app(scope, receive, send):
        await receive()
        await receive()

    clock = FakeClock()
    async with clock.running():
        with pytest.raises(APITimeoutError):
            await AsgiTransport(app, clock=clock).send(request())


async def test_a_complete_reply_counts_although_the_app_goes_on():
    async def app(scope, receive, send):
        await answer(send)
        await anyio.sleep_forever()

    clock = FakeClock()
    async with clock.running():
        assert (await AsgiTransport(app, clock=clock).send(request())).body == b"ok"


async def test_an_app_that_fails_in_the_middle_is_a_broken_connection():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hal", "more_body": True})
        raise RuntimeError("boom")

    with pytest.raises(APIConnectionError, match="middle of the answer") as caught:
        await AsgiTransport(app).send(request())
    assert isinstance(caught.value.__cause__, RuntimeError)


async def test_an_app_that_returns_in_the_middle_is_a_broken_connection():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    with pytest.raises(APIConnectionError, match="middle of the answer"):
        await AsgiTransport(app).send(request())


@pytest.mark.parametrize("fails", [True, False])
async def test_an_app_without_an_answer_is_a_500(fails: bool):
    async def app(scope, receive, send):
        if fails:
            raise RuntimeError("boom")

    assert (await AsgiTransport(app).send(request())).status == 500


async def test_an_os_error_before_the_answer_is_a_dropped_connection():
    async def app(scope, receive, send):
        raise ConnectionResetError("dropped")

    with pytest.raises(APIConnectionError, match="dropped"):
        await AsgiTransport(app).send(request())


async def test_an_error_after_the_whole_reply_is_not_the_callers_business():
    async def app(scope, receive, send):
        await answer(send, b"Internal Server Error", 500)
        raise RuntimeError("as Starlette does")

    assert (await AsgiTransport(app).send(request())).status == 500


async def test_cancelling_the_caller_cancels_the_app():
    stopped = []

    async def app(scope, receive, send):
        try:
            await anyio.sleep_forever()
        finally:
            stopped.append(True)

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(AsgiTransport(app).send, request())
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    assert stopped == [True]


async def test_compressed_replies_arrive_plain_and_damaged_ones_are_errors():
    async def app(scope, receive, send):
        body = (await receive())["body"]
        await answer(send, body, headers=[(b"content-encoding", b"gzip")])

    transport = AsgiTransport(app)
    assert (await transport.send(request(gzip.compress(b"hi")))).body == b"hi"
    with pytest.raises(APIConnectionError, match="unusable"):
        await transport.send(request(b"garbage"))


def pieces(*chunks: bytes, end: str = "complete"):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if end == "hang":
            await anyio.sleep_forever()
        if end == "fail":
            raise RuntimeError("boom")
        await send({"type": "http.response.body", "body": b""})

    return app


async def drain(transport: AsgiTransport, received: list[bytes]) -> None:
    async with transport.stream(request()) as reply:
        async for chunk in reply.chunks:
            received.append(chunk)


async def test_a_stream_gives_chunks_as_the_app_sends_them():
    async with AsgiTransport(pieces(b"one", b"two")).stream(request()) as reply:
        assert reply.status == 200
        assert [chunk async for chunk in reply.chunks] == [b"one", b"two"]


async def test_a_stream_that_breaks_is_a_connection_error_after_what_arrived():
    received = []
    with pytest.raises(APIConnectionError, match="middle of the answer"):
        await drain(AsgiTransport(pieces(b"one", end="fail")), received)
    assert received == [b"one"]


async def test_a_silent_stream_times_out_on_the_given_clock():
    clock = FakeClock()
    async with clock.running():
        with pytest.raises(APITimeoutError):
            await drain(AsgiTransport(pieces(b"one", end="hang"), clock=clock), [])


async def test_a_stream_that_never_starts_times_out():
    async def app(scope, receive, send):
        await anyio.sleep_forever()

    clock = FakeClock()
    async with clock.running():
        with pytest.raises(APITimeoutError):
            async with AsgiTransport(app, clock=clock).stream(request()):
                pass


async def test_a_stream_whose_app_fails_first_is_a_500_with_a_body():
    async def app(scope, receive, send):
        raise RuntimeError("boom")

    async with AsgiTransport(app).stream(request()) as reply:
        assert reply.status == 500
        assert [chunk async for chunk in reply.chunks] == [b"Internal Server Error"]


async def test_leaving_a_stream_early_stops_the_app_and_raises_nothing():
    async with AsgiTransport(pieces(b"one", end="hang")).stream(request()) as reply:
        async for chunk in reply.chunks:
            assert chunk == b"one"
            break


async def test_an_error_of_the_reader_leaves_the_stream_as_it_is():
    with pytest.raises(ZeroDivisionError):
        async with AsgiTransport(pieces(b"one", end="hang")).stream(request()):
            _ = 1 / 0
