"""Connecting to Ray's head: waited for a while, and never longer than was said."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from tests.patience import PATIENCE_S
from tinkex.cli.main import main
from tinkex.ray_cluster.connection import ClusterError, RayConnection, await_head

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("ray")


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Bound, so that nobody else listens there."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def address(bound: socket.socket) -> str:
    return f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize("where", ["127.0.0.1:99999", "nowhere.invalid:6379", "ray://[::1]:1"])
def test_an_address_without_a_head_is_an_error_with_a_next_step(where: str) -> None:
    with pytest.raises(ClusterError, match="Ray's head does not answer at") as caught:
        RayConnection(where).__enter__()
    assert "--address" in caught.value.hint


def test_up_waits_no_longer_than_it_was_told(
    silent: socket.socket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKEX_DATABASE", "postgresql:///db")
    where = address(silent)
    words = ["--cpu-nodes", "m=1", "--address", where, "--placement-timeout", "0.1"]
    assert main(["cluster", "up", "--name", "lab", *words]) == 1
    said = capsys.readouterr().err
    assert f"Ray's head does not answer at {where}" in said
    assert "ray status" in said


def test_a_head_that_is_still_starting_is_waited_for(silent: socket.socket) -> None:
    waiting = threading.Thread(target=await_head, args=(address(silent), PATIENCE_S))
    waiting.start()
    assert waiting.is_alive()
    silent.listen()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
