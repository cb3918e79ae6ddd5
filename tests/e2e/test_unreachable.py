"""A server that cannot be reached: told within seconds, and an error at the deadline."""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.workers import MODEL
from tests.patience import PATIENCE_S
from tinkex import APIConnectionError, Config, RestClient, ServiceClient, TinkerError
from tinkex.clients.connection import Connection
from tinkex.clients.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.req("B7")


@contextmanager
def nobody_listens() -> Iterator[str]:
    """A port on which connections are refused, as long as it is held."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@contextmanager
def nobody_answers() -> Iterator[str]:
    """A port whose queue is full: connecting takes for ever."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        try:
            yield f"http://127.0.0.1:{address[1]}"
        finally:
            for filler in fillers:
                filler.close()


class Warned(logging.Handler):
    """The warnings about one server: a client of another test may still have something to say."""

    def __init__(self, url: str) -> None:
        super().__init__(logging.WARNING)
        self._url = url
        self.first = threading.Event()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if self._url in (text := record.getMessage()):
            self.texts.append(text)
            self.first.set()


@contextmanager
def warnings_about(url: str) -> Iterator[Warned]:
    handler = Warned(url)
    logger = logging.getLogger("tinkex")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("server", [nobody_listens, nobody_answers])
def test_a_warning_names_the_cause_and_the_next_step_and_the_error_comes_at_the_deadline(
    server: Any,
):
    with server() as url, warnings_about(url) as warned:
        config = Config(
            base_url=url, api_key="tml-test", bootstrap_deadline_s=2.0, connect_timeout_s=0.5
        )
        service = ServiceClient.over(Session(config))
        started = time.monotonic()
        errors: list[BaseException] = []

        def call() -> None:
            try:
                service.create_sampling_client(base_model=MODEL)
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        attempt = threading.Thread(target=call)
        attempt.start()
        assert warned.first.wait(PATIENCE_S), "no warning"
        assert "TINKER_BASE_URL" in warned.texts[0]
        attempt.join(PATIENCE_S)
        took = time.monotonic() - started
        assert isinstance(errors[0], APIConnectionError)
        assert url in str(errors[0])
        assert not attempt.is_alive()
        assert took >= 1.0  # the deadline is 2 s; a busy machine takes longer
        assert len(warned.texts) == 1, "one line, not one for each retry"
        service.close().result(PATIENCE_S)


def test_a_rest_client_ends_at_its_deadline_too():
    with nobody_listens() as url, warnings_about(url) as warned:
        config = Config(base_url=url, api_key="tml-test", bootstrap_deadline_s=1.0)
        rest = RestClient(Connection(config))
        assert isinstance(rest.list_training_runs().exception(PATIENCE_S), TinkerError)
        assert warned.texts
        rest.close().result(PATIENCE_S)


def test_a_name_that_does_not_exist_is_told_as_such():
    url = "http://no-such-host.invalid"
    with warnings_about(url) as warned:
        service = ServiceClient.over(
            Session(Config(base_url=url, api_key="tml-test", bootstrap_deadline_s=1.0))
        )
        with pytest.raises(APIConnectionError, match=r"no-such-host\.invalid"):
            service.get_server_capabilities()
        assert warned.texts
        service.close().result(PATIENCE_S)
