"""`tinkex chat` as a person uses it: on a terminal of eighty columns, with Ctrl-C and history."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import pytest

from tests.e2e.terminal import COLUMNS, CTRL_D, UP, on_terminal
from tests.patience import PATIENCE_S
from tinkex.errors import RequestFailedError
from tinkex.testing import API_KEY, FakeServer, faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.e2e.terminal import Terminal
    from tinkex.testing.recorder import Exchange, SeenRequest

    Open = Callable[..., AbstractContextManager[Terminal]]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="uses a Linux terminal"),
]
TINY = "tinkex/tiny"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer().serve() as server:
        yield server


@pytest.fixture
def chat(server: FakeServer, tmp_path: Path) -> Open:
    def on(*words: str, **env: str) -> AbstractContextManager[Terminal]:
        settings = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY, **env}
        return on_terminal(tmp_path, "chat", *words, cwd=tmp_path, **settings)

    return on


def is_stream(seen: SeenRequest) -> bool:
    return seen.path == "/v1/completions"


def streams(server: FakeServer) -> int:
    return sum(map(is_stream, server.requests))


def event(text: str) -> bytes:
    return f'data: {{"choices": [{{"text": "{text}"}}]}}\n\n'.encode()


def test_a_person_is_greeted_answered_and_let_go(chat: Open, server: FakeServer):
    with chat(TINY, "--max-tokens", "5", "--seed", "1") as terminal:
        assert TINY in terminal.until("/quit leaves.")
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("> ")
        assert streams(server) == 1
        terminal.type("/quit\n")
        assert terminal.wait() == 0


def test_the_answer_is_seen_while_it_is_drawn_and_ctrl_c_ends_it_but_not_the_chat(
    chat: Open, server: FakeServer
):
    left = threading.Event()

    async def begin_to_answer(exchange: Exchange) -> None:
        await exchange.start(200, {"content-type": "text/event-stream"})
        await exchange.send_body(event("Once upon a time"), more=True)
        await exchange.gone()
        left.set()

    server.faults.on(None, begin_to_answer, when=is_stream)
    with chat(TINY, "--max-tokens", "3") as terminal:
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("Once upon a time")
        assert not left.is_set()
        terminal.interrupt("(stopped)")
        assert left.wait(PATIENCE_S), "the server still draws"
        terminal.until("> ")
        terminal.type("go on\n")
        terminal.until("> ")
        terminal.type("/quit\n")
        assert terminal.wait() == 0
    # What was said until then is part of the conversation.
    *_, last = [seen.json for seen in server.requests if is_stream(seen)]
    assert b"Once upon a time" in bytes(token for token in last["prompt"] if token < 256)


def test_ctrl_c_at_the_prompt_leaves_the_chat_open_and_ctrl_d_closes_it(chat: Open):
    with chat(TINY) as terminal:
        terminal.until("> ")
        terminal.type("half a mess")
        terminal.until("half a mess")
        terminal.interrupt("Ctrl-D leaves.")
        terminal.until("> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


def test_what_was_typed_can_be_had_again_also_in_the_next_chat(
    chat: Open, server: FakeServer, tmp_path: Path
):
    short = (TINY, "--max-tokens", "3")
    with chat(*short) as terminal:
        terminal.until("> ")
        terminal.type("remember me\n")
        terminal.until("> ")
        terminal.type("/quit\n")
        assert terminal.wait() == 0
    history = tmp_path / ".tinkex_chat_history"
    assert "remember me" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
    with chat(*short) as terminal:
        terminal.until("> ")
        terminal.type(UP + UP + "\n")
        terminal.until("remember me")
        terminal.until("> ")
        terminal.type("/quit\n")
        assert terminal.wait() == 0
    assert streams(server) == 2


def test_a_failure_is_told_and_the_chat_goes_on(chat: Open, server: FakeServer):
    # Twice: what fails as a stream is tried once more as a whole.
    for _ in range(2):
        server.engine.fail_next("sample", RequestFailedError("No such luck.", None, "user"))
    with chat(TINY, "--max-tokens", "3") as terminal:
        terminal.until("> ")
        terminal.type("/nonsense\n")
        terminal.until("/help lists the commands.")
        terminal.type("hello\n")
        terminal.until("No such luck.")
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("> ")
        terminal.type("/quit\n")
        assert terminal.wait() == 0


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}])
def test_two_side_by_side_fit_the_terminal(chat: Open, server: FakeServer, env: dict[str, str]):
    answer = "Many words that need more than one row. " * 4
    events = event(answer) + b"data: [DONE]\n\n"
    reply = faults.reply(200, events, media_type="text/event-stream")
    server.faults.on(None, reply, times=None, when=is_stream)
    with chat(TINY, **env) as terminal:
        terminal.until("> ")
        terminal.type(f"/compare {TINY}\n")
        terminal.until("on the right")
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("-+-")
        shown = terminal.until("> ")
        terminal.type("/quit\n")
        assert terminal.wait() == 0
    assert max(len(line) for line in shown.splitlines()) <= COLUMNS
    rows = [line.split(" | ") for line in shown.splitlines() if " | " in line]
    assert len(rows) == 5
    assert all(left.rstrip() == right.rstrip() for left, right in rows)
    for colour in ("\x1b[1m", "\x1b[3", "\x1b[9"):
        assert colour not in terminal.raw
