"""A real S3-compatible server on loopback, in threads of the test process; import the fixtures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import fsspec
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """Where the server listens."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_environment(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What anybody sets to use a server of their own."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.fixture
def bucket(s3_environment: None) -> str:
    """A fresh bucket."""
    name = f"bucket-{uuid4().hex}"
    files: Any = fsspec.filesystem("s3", skip_instance_cache=True)
    files.mkdir(name)
    return name
