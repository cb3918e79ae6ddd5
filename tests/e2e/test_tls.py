"""`tinkex serve` with TLS: clients with a private authority, renewal, and files that do not fit."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.serving import MODEL, START_S, environment, refused, served
from tests.patience import PATIENCE_S, until
from tests.unit.serving.authority import Authority

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.serving import Served

PROGRAM = f"""
import sys, tinkex
with tinkex.ServiceClient(base_url=sys.argv[1], api_key="tml-x") as service:
    sampler = service.create_sampling_client(base_model={MODEL!r})
    prompt = tinkex.types.ModelInput.from_ints([1, 2, 3])
    params = tinkex.types.SamplingParams(max_tokens=1, seed=1)
    print(len(sampler.sample(prompt, 1, params).result().sequences[0].tokens))
"""


def sampled(server: Served, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """What a program prints that asks a server for one token."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, server.url],
        env=environment(home, **env),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


def shown(server: Served, authority: Authority) -> str:
    """The name in the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=str(authority.certificate))
    with (
        socket.create_connection(("127.0.0.1", int(server.port)), PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        certificate = secured.getpeercert()
        assert certificate is not None
        return str(certificate["subject"][0][0][1])  # type: ignore[index]


def test_clients_reach_a_server_whose_authority_they_trust(tmp_path: Path):
    authority = Authority(tmp_path)
    certificate, key = authority.issue("one")
    flags = ("--tls-cert", str(certificate), "--tls-key", str(key))
    with served(tmp_path / "data", *flags) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusted = sampled(server, tmp_path, SSL_CERT_FILE=str(authority.certificate))
        assert trusted.stdout == "1\n", trusted.stderr
        for new, old in zip(authority.issue("two"), (certificate, key), strict=True):
            new.replace(old)
        server.popen.send_signal(signal.SIGHUP)
        until(lambda: shown(server, authority) == "two")
        assert server.popen.poll() is None


@pytest.mark.parametrize("wrong", ["missing", "open", "other"])
def test_files_that_do_not_fit_end_the_start(tmp_path: Path, wrong: str):
    authority = Authority(tmp_path)
    certificate, key = authority.issue("one")
    expected = "cannot be read"
    if wrong == "missing":
        certificate.unlink()
    elif wrong == "open":
        key.chmod(0o644)
        expected = "chmod 600"
    else:
        key, expected = authority.issue("two")[1], "is not the key of the certificate"
    flags = ("--no-auth", "--port", "0", "--tls-cert", str(certificate), "--tls-key", str(key))
    code, said = refused(tmp_path / "data", *flags)
    assert code == 2
    assert expected in said
    assert not (tmp_path / "data").exists()
