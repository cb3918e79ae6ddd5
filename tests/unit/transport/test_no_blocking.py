"""Nothing in the transport blocks the event loop."""

from __future__ import annotations

import pytest
from blockbuster import blockbuster_ctx
from transport_fakes import read_request, reply_bytes, serve

from tinkex.clock import SystemClock
from tinkex.config import Config
from tinkex.errors import APIConnectionError
from tinkex.transport.api import connect
from tinkex.transport.http import HttpTransport
from tinkex.wire import routes

pytestmark = [pytest.mark.anyio, pytest.mark.req("B5")]


async def answer(reader, writer):
    await read_request(reader)
    writer.write(reply_bytes(b'{"request_id": "r"}'))


async def test_a_call_with_a_host_name_and_a_credential_command_blocks_nothing():
    async with serve(answer) as url:
        config = Config(
            base_url=url.replace("127.0.0.1", "localhost"), credential_cmd="echo tml-from-command"
        )
        api = connect(config, HttpTransport(config.base_url), SystemClock())
        with blockbuster_ctx():
            reply = await api.call(routes.OPTIM_STEP, body=b"{}")
            await api.aclose()
    assert reply.request_id == "r"


async def test_setting_up_tls_blocks_nothing():
    async def hang_up(reader, writer):
        writer.write(b"no TLS here\r\n")

    async with serve(hang_up) as url:
        transport = HttpTransport(url.replace("http", "https"))
        api = connect(Config(base_url=url, api_key="tml-x"), transport, SystemClock())
        with blockbuster_ctx(), pytest.raises(APIConnectionError):
            await api.call(routes.OPTIM_STEP, body=b"{}", deadline_s=0.0)
