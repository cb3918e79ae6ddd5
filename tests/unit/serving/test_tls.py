"""TLS: which files are accepted, what is spoken, and how a certificate is renewed."""

from __future__ import annotations

import logging
import socket
import ssl
from typing import TYPE_CHECKING

import pytest

from tests.patience import PATIENCE_S
from tests.unit.serving.authority import Authority
from tests.unit.serving.raw_http import LOOPS, Raw, Running, limits, running
from tinkex.errors import InputError
from tinkex.serving.host_settings import load_settings
from tinkex.serving.tls import Tls, load_context

if TYPE_CHECKING:
    from pathlib import Path

HEAD = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.certificate))


def secured(server: Running, context: ssl.SSLContext) -> Raw:
    plain = socket.create_connection(server.address, PATIENCE_S)
    try:
        raw = Raw(context.wrap_socket(plain, server_hostname="127.0.0.1"))
    except OSError:
        plain.close()
        raise
    server.raws.append(raw)
    return raw


def shown(server: Running, authority: Authority) -> str:
    """The name in the certificate that a new connection gets."""
    with secured(server, trusting(authority)) as raw:
        assert isinstance(raw.socket, ssl.SSLSocket)
        certificate = raw.socket.getpeercert()
        assert certificate is not None
        subject = certificate["subject"]
        assert isinstance(subject, tuple)
        return str(subject[0][0][1])  # type: ignore[index]


@pytest.mark.parametrize("loop", LOOPS)
def test_requests_over_tls_are_answered(loop: str, authority: Authority):
    tls = Tls(*authority.issue("one"))
    with running(loop=loop, tls=tls) as server, secured(server, trusting(authority)) as raw:
        for _ in range(2):
            raw.send(HEAD)
            reply = raw.reply()
            assert (reply.status, reply.json["scheme"]) == (200, "https")
            assert reply.headers["strict-transport-security"].startswith("max-age=")
        raw.send(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (70 << 10))
        assert raw.reply().status == 431


def test_tls_1_2_is_the_oldest_version_and_has_forward_secrecy(authority: Authority):
    tls = Tls(*authority.issue("one"))
    assert tls.context.minimum_version == ssl.TLSVersion.TLSv1_2
    context = trusting(authority)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with running(tls=tls) as server, secured(server, context) as raw:
        assert isinstance(raw.socket, ssl.SSLSocket)
        cipher = raw.socket.cipher()
        assert cipher is not None
        assert cipher[0].startswith("ECDHE-")
        assert raw.socket.version() == "TLSv1.2"


@pytest.mark.parametrize("loop", LOOPS)
def test_a_handshake_that_does_not_come_is_ended(loop: str, authority: Authority):
    tls = Tls(*authority.issue("one"))
    with running(limits(handshake_s=0.5), loop=loop, tls=tls) as server:
        silent, wrong = server.connect(), server.connect()
        wrong.send(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert silent.ends()
        assert wrong.ends()
        server.wait_for(lambda: len(server.server.connections) == 0)
        # On a busy machine this client may take too long as well.
        assert any(serves(server, authority) for _ in range(10))


def serves(server: Running, authority: Authority) -> bool:
    try:
        return shown(server, authority) == "one"
    except OSError:
        return False


def test_handshakes_count_as_connections(authority: Authority):
    most = limits(connections=4, per_address=2, handshake_s=PATIENCE_S)
    with running(most, tls=Tls(*authority.issue("one"))) as server:
        for _ in range(2):
            server.connect()
        server.wait_for(lambda: len(server.server.connections) == 2)
        with secured(server, trusting(authority)) as raw:
            assert raw.reply().status == 503


def test_a_renewed_certificate_is_used_without_a_restart(authority: Authority):
    certificate, key = authority.issue("one")
    tls = Tls(certificate, key)
    with running(tls=tls) as server:
        assert shown(server, authority) == "one"
        with secured(server, trusting(authority)) as before:
            for new, old in zip(authority.issue("two"), (certificate, key), strict=True):
                new.replace(old)
            server.on_loop(tls.reload)
            assert shown(server, authority) == "two"
            before.send(HEAD)
            assert before.reply().status == 200


def test_files_that_change_are_noticed(authority: Authority, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tinkex.serving.tls._LOOK_EVERY_S", 0.05)
    certificate, key = authority.issue("one")
    tls = Tls(certificate, key)
    with running(tls=tls) as server:
        watching = tls.watching()
        server.on_loop(watching.__enter__)
        first = tls.context
        for new, old in zip(authority.issue("two"), (certificate, key), strict=True):
            new.replace(old)
        server.wait_for(lambda: tls.context is not first)
        server.on_loop(lambda: watching.__exit__(None, None, None))


def test_a_broken_new_pair_leaves_the_old_one_in_use(
    authority: Authority, caplog: pytest.LogCaptureFixture
):
    certificate, key = authority.issue("one")
    tls = Tls(certificate, key)
    first = tls.context
    key.write_bytes(authority.issue("two")[1].read_bytes())
    with caplog.at_level(logging.ERROR):
        tls.reload()
    assert tls.context is first
    assert "is not the key of the certificate" in caplog.text


def test_files_that_cannot_be_used_are_refused_with_what_to_do(authority: Authority):
    certificate, key = authority.issue("one")
    missing = certificate.with_name("missing.pem")
    with pytest.raises(InputError, match=r"tls_cert: .*missing.pem cannot be read"):
        load_context(missing, key)
    with pytest.raises(InputError, match=r"tls_key: .*missing.pem cannot be read"):
        load_context(certificate, missing)
    with pytest.raises(InputError, match=r"tls_key: .*is not the key of the certificate"):
        load_context(certificate, authority.issue("two")[1])
    with pytest.raises(InputError, match="tls_key: is encrypted"):
        load_context(*authority.issue("three", b"secret"))
    garbage = certificate.with_name("garbage.pem")
    garbage.write_text("nothing")
    with pytest.raises(InputError, match="as PEM"):
        load_context(garbage, key)
    key.chmod(0o644)
    with pytest.raises(InputError, match=f"run `chmod 600 {key}`"):
        load_context(certificate, key)


@pytest.mark.parametrize("given", ["tls_cert", "tls_key"])
def test_one_file_without_the_other_is_refused(given: str):
    with pytest.raises(InputError, match="needs both"):
        load_settings({given: "some.pem"}, {})
