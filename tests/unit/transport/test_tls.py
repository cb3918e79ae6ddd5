"""Connections over TLS, against a certificate made for the test."""

from __future__ import annotations

import asyncio
import ssl

import pytest
from transport_fakes import read_request, reply_bytes

from tinkex.errors import APIConnectionError
from tinkex.transport.base import HttpRequest, Pool
from tinkex.transport.http import HttpTransport

pytestmark = pytest.mark.anyio
REQUEST = HttpRequest("POST", "/api/v1/x", Pool.TRAIN, 5.0, body=b"{}")


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        try:
            await read_request(reader)
        except (asyncio.IncompleteReadError, OSError):
            writer.close()
            return
        writer.write(reply_bytes(b"secure"))


async def test_a_trusted_server_is_talked_to_and_its_connection_kept(certificate):
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(*certificate)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server_side)
    trusting = ssl.create_default_context(cafile=certificate[0])
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    transport = HttpTransport(url, ssl_context=trusting)
    for _ in range(2):
        assert (await transport.send(REQUEST)).body == b"secure"
    await transport.aclose()
    server.close()


async def test_an_unknown_certificate_is_refused_with_a_next_step(certificate):
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(*certificate)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server_side)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(APIConnectionError, match="SSL_CERT_FILE"):
        await HttpTransport(url).send(REQUEST)
    server.close()
