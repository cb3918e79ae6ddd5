"""A command line on a server of its own, with an empty home."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tinkex.cli.main import main
from tinkex.clients.service import ServiceClient
from tinkex.testing import API_KEY, FakeServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def _is_proxy(name: str) -> bool:
    return name.lower().endswith("_proxy")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, no settings, an 80-column terminal, and a folder to work in."""
    ours = ("TINKER_", "CLOUDFLARE_")
    for name in [name for name in os.environ if name.startswith(ours) or _is_proxy(name)]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    work = tmp_path / "work"
    home.mkdir()
    work.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(work)
    return home


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def command(*words: object) -> Ran:
        capsys.readouterr()
        status = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return Ran(status, out, err)

    return command


@pytest.fixture(scope="module")
def shared_server() -> Iterator[FakeServer]:
    with FakeServer().serve() as server:
        yield server


@pytest.fixture
def server(shared_server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """A server that listens, which the settings name."""
    monkeypatch.setenv("TINKER_BASE_URL", shared_server.url)
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    yield shared_server
    shared_server.faults.clear()
    shared_server.requests.clear()


@dataclass(frozen=True)
class Saved:
    """What a short session has saved."""

    session_id: str
    run_id: str
    training: str
    sampler: str
    external: str


@pytest.fixture
def saved(server: FakeServer) -> Saved:
    """One run with a checkpoint of each kind."""
    with ServiceClient() as service:
        training = service.create_lora_training_client(base_model="tinkex/tiny", rank=4)
        state = training.save_state("final", user_metadata={"step": "9"})
        sampler = training.save_weights_for_sampler("draft")
        external = training.save_weights_external("export")
        assert service.holder.session_id is not None
        return Saved(
            service.holder.session_id,
            training.model_id,
            state.result().path,
            sampler.result().path,
            external.result().path,
        )


@pytest.fixture(autouse=True)
def keep_logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level
