"""Bootstrap: flags, credentials, capabilities, and what is refused at the door."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from tinkex.server.app import HANDLERS
from tinkex.testing import FakeClock, FakeServer
from tinkex.testing.asgi import AsgiTransport
from tinkex.transport.base import HttpRequest, Pool, Reply
from tinkex.types import ClientConfigResponse
from tinkex.wire.routes import ROUTES

from .conftest import Api, Start

pytestmark = pytest.mark.anyio


def test_every_route_has_a_handler_and_every_handler_a_route() -> None:
    assert set(HANDLERS) == {route.name for route in ROUTES}


async def test_client_config_says_what_the_settings_say(start: Start) -> None:
    config = ClientConfigResponse(proto_compress_fwdbwd=True, fwdbwd_max_chunk_len=7)
    async with start(client_config=config, older_client_flags={"proto_write_fwdbwd": False}) as api:
        flags = await api.post("/client/config", {"sdk_version": "0.22.3"})
        assert flags["proto_compress_fwdbwd"] is True
        assert flags["fwdbwd_max_chunk_len"] == 7
        assert flags["proto_write_fwdbwd"] is False
        assert None not in flags.values()
        dynamic = await api.post("/client/dynamic_config", {"sdk_version": "0.36.0"})
        assert dynamic["sample_cancel_enabled"] is True


async def test_a_request_without_a_key_is_refused_and_health_needs_none(api: Api) -> None:
    nobody = Api(api.server, api.clock, key="")
    reply = await nobody.call("POST", "/client/config", {"sdk_version": "x"})
    assert reply.status == 401
    assert "X-API-Key" in msgspec.json.decode(reply.body)["detail"]
    assert await nobody.get("/healthz") == {"status": "ok"}


async def test_only_listed_keys_are_let_in(start: Start) -> None:
    async with start(key_mode="fixed", keys=frozenset({"tml-one"})) as api:
        await api.session()
        reply = await api.other().call("POST", "/client/config", {})
        assert reply.status == 401


async def test_a_token_stands_for_its_key_until_it_expires(start: Start) -> None:
    async with start(token_ttl_s=100) as api:
        session = await api.session()
        jwt = (await api.post("/auth/token"))["jwt"]
        holder = Api(api.server, api.clock, key=jwt)
        assert (await holder.get("/sessions"))["sessions"] == [session]
        assert (await holder.call("POST", "/auth/token", {})).status == 400
        await api.clock.sleep(101)
        assert (await holder.call("GET", "/sessions")).status == 401


async def test_a_forged_token_is_refused(api: Api) -> None:
    jwt: str = (await api.post("/auth/token"))["jwt"]
    head, _, signature = jwt.rpartition(".")
    for forged in (f"{head}.", f"{head}.{signature[::-1]}", "eyJ", "eyJhbGciOiJub25lIn0.e30."):
        reply = await Api(api.server, api.clock, key=forged).call("GET", "/sessions")
        assert reply.status == 401


async def test_capabilities_list_the_engine_s_models(api: Api) -> None:
    models = (await api.get("/get_server_capabilities"))["supported_models"]
    assert models[0] == {
        "model_name": "tinkex/tiny",
        "max_context_length": 8192,
        "trainable": True,
        "sampleable": True,
    }


async def test_telemetry_is_accepted_whatever_it_says(api: Api) -> None:
    assert await api.post("/telemetry", {"events": []}) == {"status": "accepted"}


async def test_the_key_describes_itself_without_showing_itself(api: Api) -> None:
    described = await api.get("/auth/apikey/me")
    assert type(described["key_id"]) is int
    assert described["details"]["user_details"]["email"]
    assert api.key not in repr(described)
    reply = await api.call("DELETE", "/auth/apikey/me")
    assert reply.status == 501


async def test_refusals_are_json_with_a_content_length_and_never_409(api: Api) -> None:
    for method, path, body in [
        ("POST", "/create_model", {"session_id": "nope", "model_seq_id": 0, "base_model": "x"}),
        ("POST", "/create_model", b"not json"),
        ("POST", "/asample", {"num_samples": 0}),
        ("GET", "/sessions/none", None),
        ("GET", "/nothing/here", None),
        ("PATCH", "/sessions", None),
    ]:
        reply = await api.call(method, path, body)
        assert reply.status in (400, 404, 405), (path, reply)
        assert int(reply.headers["content-length"]) == len(reply.body) > 0
        assert msgspec.json.decode(reply.body)["detail"]


async def test_the_app_works_below_a_path_prefix_and_its_links_say_so() -> None:
    clock = FakeClock()
    server = FakeServer(clock=clock)
    outer = AsgiTransport(
        Starlette(routes=[Mount("/base/v2", app=server.app)]), "http://app.invalid", clock
    )

    async def send(method: str, path: str, body: bytes | None = None) -> Reply:
        headers = {"x-api-key": "tml-one"}
        return await outer.send(
            HttpRequest(method, path, Pool.REST, 60, headers=headers, body=body)
        )

    async with clock.running(), server:
        opened = b'{"tags":[],"user_metadata":{},"sdk_version":"x"}'
        reply = await send("POST", "/base/v2/api/v1/create_session", opened)
        session = msgspec.json.decode(reply.body)["session_id"]
        reply = await send("GET", f"/base/v2/api/v1/sessions/{session}/trace_export")
        url: str = msgspec.json.decode(reply.body)["url"]
        assert url.startswith("http://app.invalid/base/v2/api/v1/files/")
        assert (await send("GET", url.removeprefix("http://app.invalid"))).status == 200


async def test_a_body_that_is_too_large_is_refused_before_it_is_read(start: Start) -> None:
    async with start(max_body_bytes=100) as api:
        reply = await api.call("POST", "/create_session", b"x" * 101)
        assert reply.status == 413


async def test_an_unknown_content_encoding_is_named(api: Api) -> None:
    reply = await api.call("POST", "/create_session", b"", headers={"content-encoding": "br"})
    assert reply.status == 415
    assert b"br" in reply.body


NONSENSE: list[bytes] = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b"\xff\xfe",
    b"{}",
    b'{"model_id":1,"seq_id":"x","session_id":[],"request_id":{},"path":null,"target":7}',
    (
        b'{"session_id":"s","model_id":"s","sampling_session_id":"s","request_id":"s",'
        b'"seq_id":-1,"model_seq_id":-1,"sampling_session_seq_id":-1,"base_model":"tinkex/tiny",'
        b'"path":"tinker://","tinker_path":"","source_path":"","optimizer":true,"num_samples":1,'
        b'"prompt":{"chunks":[]},"sampling_params":{},"target":{"sampling_session_id":"s"}}'
    ),
    b"[" * 5000,
]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
async def test_nonsense_is_never_a_server_error(api: Api, route: Any) -> None:
    url = route.url(**{name: "a/b" if name == "ckpt" else "a:b" for name in route.parameters})
    for body in NONSENSE:
        for query in ("", "limit=x&offset=²&day=&event_type=&starting_on=&project_id="):
            for media in ("application/json", "application/x-protobuf"):
                reply = await api.call(
                    route.method,
                    url.removeprefix("/api/v1"),
                    body,
                    query=quote(query, safe="=&"),
                    headers={"content-type": media},
                )
                assert reply.status < 500 or route.name == "delete_api_key", (body, reply)
                assert reply.status != 409


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("tinkex/tinny", "Did you mean 'tinkex/tiny'?"),
        ("Tinkex/Tiny", "Did you mean 'tinkex/tiny'?"),
        ("tiny", "Did you mean 'tinkex/tiny'?"),
        ("Qwen/Qwen3-8B", None),
        ("tinkex/huge", None),
    ],
)
async def test_an_unknown_base_model_is_refused_with_those_there_are_and_the_nearest(
    api: Api, name: str, guess: str | None
) -> None:
    body = {"session_id": await api.session(), "model_seq_id": 0, "base_model": name}
    refused = await api.call("POST", "/create_model", {**body, "lora_config": {"rank": 8}})
    assert refused.status == 400
    said = msgspec.json.decode(refused.body)["detail"]
    assert said.startswith(f"Base model {name!r} is not served here; there is: tinkex/tiny")
    assert guess in said if guess else "mean" not in said
    assert "--base-model NAME" in said
