"""Which credential, from where, and how long it lasts."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from typing import TYPE_CHECKING

import anyio
import pytest

from tinkex.config import Config
from tinkex.errors import APIConnectionError, CredentialError
from tinkex.testing.fake_clock import FakeClock
from tinkex.transport import auth
from tinkex.transport.auth import Credentials, choose

if TYPE_CHECKING:
    from transport_fakes import StillClock

pytestmark = pytest.mark.anyio

KEY, STORED = "tml-key", "tml-stored"


def jwt(**claims) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"eyJhbGciOiJub25lIn0.{payload}.sig"


JWT = jwt(sub="u")


@pytest.mark.parametrize(
    ("key", "command", "stored", "enforce", "chosen"),
    [
        (KEY, None, None, False, ("key", KEY)),
        (KEY, "cmd", STORED, False, ("key", KEY)),
        (JWT, "cmd", STORED, False, ("token", JWT)),
        (JWT, "cmd", STORED, True, ("token", JWT)),
        (KEY, "cmd", STORED, True, ("command", "cmd")),
        (None, "cmd", STORED, False, ("command", "cmd")),
        ("nonsense", "cmd", STORED, False, ("command", "cmd")),
        (None, None, STORED, False, ("key", STORED)),
        (None, None, JWT, False, ("token", JWT)),
    ],
)
def test_sources_are_tried_in_the_protocols_order(key, command, stored, enforce, chosen):
    config = Config(api_key=key, credential_cmd=command, stored_key=stored)
    source = choose(config, enforce_command=enforce)
    assert (source.kind, source.value) == chosen
    assert source.value not in repr(source)


@pytest.mark.req("B20")
@pytest.mark.parametrize(
    ("key", "stored", "enforce", "says"),
    [
        (None, None, False, "TINKER_API_KEY"),
        ("nonsense", STORED, False, "must start with `tml-`"),
        ("Bearer tml-x", None, False, "must start with"),
        ("tml-a b", None, False, "must start with"),
        ("tml-a\r\nX: y", None, False, "must start with"),
        (None, "nonsense", False, "stored key"),
        (KEY, None, True, "TINKER_CREDENTIAL_CMD"),
        (None, STORED, True, "TINKER_CREDENTIAL_CMD"),
    ],
)
def test_without_a_usable_source_the_error_says_what_to_set(key, stored, enforce, says):
    with pytest.raises(CredentialError, match=says) as caught:
        choose(Config(api_key=key, stored_key=stored), enforce_command=enforce)
    assert "nonsense" not in str(caught.value)


async def test_a_command_is_run_off_the_loop_and_its_output_stripped():
    assert await auth.run_command("echo '  tml-cmd '; echo noise >&2; exit 3") == "tml-cmd"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("true", "printed nothing"),
        ("exit 4", "exit status 4"),
        ("/no/such/command", "exit status 127"),
        ("printf 'a\\nb'", "more than one line"),
    ],
)
async def test_a_command_without_a_credential_says_so(command: str, says: str):
    with pytest.raises(CredentialError, match=says):
        await auth.run_command(command)


async def test_the_output_of_a_command_is_used_for_a_minute(tmp_path, clock: StillClock):
    runs = tmp_path / "runs"
    config = Config(credential_cmd=f"echo x >> {runs}; echo tml-cmd")
    credentials = Credentials(config, clock)
    for clock.time in (0.0, 59.0, 61.0, 62.0):
        assert await credentials.header_value() == "tml-cmd"
    assert runs.read_text() == "x\nx\n"


async def test_a_command_never_blocks_the_loop(monkeypatch: pytest.MonkeyPatch):
    threads = []
    monkeypatch.setattr(
        auth, "_run_command", lambda _: threads.append(threading.current_thread()) or "tml-x"
    )
    await auth.run_command("x")
    assert threads[0] is not threading.current_thread()


class Exchange:
    """A server that hands out tokens, or does not."""

    def __init__(self, clock: StillClock, life_s: float | None = 3600.0) -> None:
        self.clock, self.life_s, self.calls, self.broken = clock, life_s, 0, False

    async def __call__(self) -> str:
        self.calls += 1
        await self.clock.sleep(0)
        if self.broken:
            raise APIConnectionError(message="no")
        claims = {} if self.life_s is None else {"exp": self.clock.wall() + self.life_s}
        return jwt(n=self.calls, **claims)


def exchanging(clock: StillClock, exchange: Exchange) -> Credentials:
    credentials = Credentials(Config(api_key=KEY), clock)
    credentials.follow(exchange, exchanging=True, enforce_command=False)
    return credentials


async def test_a_token_is_fetched_on_first_use_and_kept(clock: StillClock):
    exchange = Exchange(clock)
    credentials = exchanging(clock, exchange)
    first = await credentials.header_value()
    assert first.startswith("eyJ")
    assert await credentials.header_value() == first
    assert await credentials.header_value(raw=True) == KEY
    assert exchange.calls == 1
    assert credentials.token == first


async def test_many_first_uses_at_once_exchange_once(clock: StillClock):
    exchange = Exchange(clock)
    credentials = exchanging(clock, exchange)
    values = await asyncio.gather(*(credentials.header_value() for _ in range(20)))
    assert (len(set(values)), exchange.calls) == (1, 1)


async def test_a_token_is_refreshed_inline_when_a_minute_is_left(clock: StillClock):
    exchange = Exchange(clock)
    credentials = exchanging(clock, exchange)
    first = await credentials.header_value()
    clock.time = 3539.0
    assert await credentials.header_value() == first
    clock.time = 3540.0
    assert await credentials.header_value() != first
    assert exchange.calls == 2


async def test_a_failed_refresh_keeps_the_old_token(clock: StillClock, caplog):
    exchange = Exchange(clock)
    credentials = exchanging(clock, exchange)
    first = await credentials.header_value()
    clock.time, exchange.broken = 3590.0, True
    assert await credentials.header_value() == first
    assert "could not be refreshed" in caplog.text
    assert first not in caplog.text


async def test_a_failed_first_exchange_is_the_callers_error(clock: StillClock):
    exchange = Exchange(clock)
    exchange.broken = True
    with pytest.raises(APIConnectionError):
        await exchanging(clock, exchange).header_value()


async def test_a_token_that_hides_its_expiry_is_not_exchanged_for_every_request(
    clock: StillClock,
):
    exchange = Exchange(clock, life_s=None)
    credentials = exchanging(clock, exchange)
    for clock.time in range(0, 240, 10):
        await credentials.header_value()
    assert exchange.calls == 1
    clock.time = 241.0
    await credentials.header_value()
    assert exchange.calls == 2


async def test_the_background_refresh_runs_five_minutes_ahead_and_survives_failures():
    clock = FakeClock()
    exchange = Exchange(clock)  # type: ignore[arg-type]
    credentials = exchanging(clock, exchange)  # type: ignore[arg-type]
    async with clock.running(), anyio.create_task_group() as group:
        await credentials.header_value()
        group.start_soon(credentials.keep_fresh)
        await clock.sleep(3299)
        assert exchange.calls == 1
        await clock.sleep(2)
        assert exchange.calls == 2
        exchange.broken = True
        await clock.sleep(3300)
        failed = exchange.calls
        assert failed >= 3
        exchange.broken = False
        await clock.sleep(120)
        assert await credentials.header_value()
        assert exchange.calls > failed
        group.cancel_scope.cancel()


@pytest.mark.parametrize("token", ["", "eyJ", "eyJ.!!!.x", "eyJ.bm9wZQ.x", "eyJ.WzFd.x", "eyJ.é.x"])
def test_an_unreadable_token_has_no_claims(token: str):
    assert auth.read_claims(token) == {}


def test_a_token_given_by_hand_counts_for_whoami_only_from_the_services_issuer(clock: StillClock):
    ours, other = jwt(iss="passport-prod", sub="u"), jwt(iss="elsewhere")
    assert Credentials(Config(api_key=ours), clock).token == ours
    assert Credentials(Config(api_key=other), clock).token is None
    assert Credentials(Config(api_key=KEY), clock).token is None
    assert auth.read_claims(ours)["sub"] == "u"
