"""Which proxy is chosen, and what is said about it."""

from __future__ import annotations

import base64
import socket
import ssl

import pytest

from tinkex import urls
from tinkex.errors import InputError
from tinkex.proxy import ProxyRules, parse, rules
from tinkex.transport.http_connection import BrokenReply
from tinkex.transport.proxy_failure import ProxyFailure, refusal

CANARY = "canary-p4ss"


def chosen(no_proxy: str, url: str) -> bool:
    """Whether a request to `url` goes through the proxy."""
    variables = {"all_proxy": ("ALL_PROXY", "http://p:3128"), "no_proxy": ("NO_PROXY", no_proxy)}
    return ProxyRules.from_variables(variables).choose(urls.parse(url)) is not None


@pytest.mark.parametrize(
    ("no_proxy", "url", "direct"),
    [
        ("", "https://example.com", False),
        ("*", "https://example.com", True),
        ("other.com,*", "http://10.0.0.1", True),
        ("example.com", "https://example.com", True),
        ("example.com", "https://api.example.com", True),
        ("example.com", "https://a.b.example.com:8443", True),
        ("example.com", "https://notexample.com", False),
        ("example.com", "https://example.com.evil.org", False),
        (".example.com", "https://api.example.com", True),
        (".example.com", "https://example.com", True),
        ("*.example.com", "https://api.example.com", True),
        ("EXAMPLE.com", "https://Example.COM", True),
        ("example.com.", "https://example.com", True),
        ("a.org, example.com", "https://example.com", True),
        ("a.org example.com", "https://example.com", True),
        (",, ,", "https://example.com", False),
        ("example.com:8443", "https://example.com:8443", True),
        ("example.com:8443", "https://example.com", False),
        ("example.com:443", "https://example.com", True),
        ("*:8443", "https://example.com:8443", True),
        ("*:8443", "https://example.com", False),
        ("https://example.com", "https://example.com", True),
        ("https://example.com", "http://example.com", False),
        ("all://example.com", "http://example.com", True),
        ("10.1.2.3", "http://10.1.2.3:8000", True),
        ("10.1.2.3", "http://10.1.2.4", False),
        ("10.1.2.3:8000", "http://10.1.2.3:8000", True),
        ("10.1.2.3:8000", "http://10.1.2.3", False),
        ("10.0.0.0/8", "http://10.200.1.1", True),
        ("10.0.0.0/8", "http://11.0.0.1", False),
        ("10.0.0.1/8", "http://10.200.1.1", True),
        ("10.0.0.0/8", "http://ten.example.com", False),
        ("2.3", "http://10.1.2.3", False),
        ("fd00::/8", "http://[fd12::1]:8000", True),
        ("fd00::/8", "http://10.0.0.1", False),
        ("fd12::1", "http://[fd12::1]", True),
        ("[fd12::1]:8000", "http://[fd12::1]:8000", True),
        ("[fd12::1]:8000", "http://[fd12::1]", False),
        ("10.0.0.0/99", "http://10.0.0.1", False),
        (".", "https://example.com", False),
    ],
)
def test_no_proxy_names_the_hosts_that_are_connected_directly(no_proxy, url, direct):
    assert chosen(no_proxy, url) is not direct


@pytest.mark.parametrize(
    "host",
    ["localhost", "app.localhost", "127.0.0.1", "127.9.9.9", "[::1]", "0.0.0.0", "[::ffff:7f00:1]"],
)
def test_loopback_is_connected_directly_unless_the_proxy_is_given_by_name(host):
    base = urls.parse(f"http://{host}:8000")
    assert not chosen("", f"http://{host}:8000")
    assert str(rules("http://p:3128").choose(base)) == "http://p:3128"


def test_a_proxy_given_by_name_is_for_every_request():
    for url in ("http://a", "https://b:1", "http://10.0.0.1"):
        assert str(rules("p:3128").choose(urls.parse(url))) == "http://p:3128"
    assert rules(None).choose(urls.parse("http://a")) is None
    assert rules("").choose(urls.parse("http://a")) is None


def test_a_variable_of_the_scheme_beats_the_general_one():
    variables = {
        "http_proxy": ("http_proxy", "http://one:1"),
        "all_proxy": ("ALL_PROXY", "http://all:1"),
    }
    found = ProxyRules.from_variables(variables)
    plain, secure = (found.choose(urls.parse(f"{scheme}://x.org")) for scheme in ("http", "https"))
    assert plain is not None
    assert (str(plain), plain.setting) == ("http://one:1", "http_proxy")
    assert secure is not None
    assert (str(secure), secure.setting) == ("http://all:1", "ALL_PROXY")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://p:3128", "http://p:3128"),
        ("p:3128", "http://p:3128"),
        ("P.Corp", "http://p.corp"),
        (" http://p:3128/ ", "http://p:3128"),
        ("HTTPS://p", "https://p"),
        ("http://[::1]:3128", "http://[::1]:3128"),
    ],
)
def test_a_proxy_is_written_in_the_usual_ways(text, address):
    assert str(parse(text)) == address


def test_credentials_are_decoded_and_sent_as_basic():
    proxy = parse("http://me%40corp:p%3Aw%2F%C3%BC@p:3128")
    assert proxy.authorization == f"Basic {base64.b64encode('me@corp:p:w/ü'.encode()).decode()}"
    only_user = parse("http://me@p:3128").authorization
    assert only_user == f"Basic {base64.b64encode(b'me:').decode()}"
    assert parse("http://p:3128").authorization is None


@pytest.mark.parametrize("scheme", ["socks4", "socks5", "SOCKS5H", "socks"])
def test_socks_is_refused_with_what_is_supported(scheme):
    with pytest.raises(
        InputError, match=r"ALL_PROXY.*SOCKS.*http://host:port or https://"
    ) as caught:
        parse(f"{scheme}://u:{CANARY}@p:1080", "ALL_PROXY")
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"ftp://u:{CANARY}@p",
        f"http://u:{CANARY}/x@p:3128",
        f"http://u:{CANARY}#x@p:3128",
        f"http://u:{CANARY}?x@p:3128",
        f"http://u:{CANARY}@p:port",
        f"http://u:{CANARY}@",
        f"http://u:{CANARY}@p:0",
        f"u://{CANARY}://p",
        f"http://u:{CANARY}\ud800@p",
        f"http://u:{CANARY}@[p",
    ],
)
@pytest.mark.req("B1")
def test_a_malformed_proxy_is_refused_without_being_quoted(text):
    with pytest.raises(InputError, match=r"proxy.*http://user:password@host:port") as caught:
        parse(text)
    assert "canary" not in str(caught.value) + repr(caught.value.__dict__)


def test_a_proxy_that_is_not_used_may_be_malformed():
    variables = {"all_proxy": ("ALL_PROXY", "socks5://p"), "no_proxy": ("NO_PROXY", "x.org")}
    found = ProxyRules.from_variables(variables)
    assert found.choose(urls.parse("http://127.0.0.1:8000")) is None
    assert found.choose(urls.parse("http://x.org")) is None
    with pytest.raises(InputError, match="ALL_PROXY"):
        found.choose(urls.parse("http://y.org"))


@pytest.mark.req("B1")
def test_credentials_are_in_no_repr_and_no_message():
    proxy = parse(f"http://me:{CANARY}@p:3128")
    failure = ProxyFailure(proxy, 407)
    shown = [repr(proxy), str(proxy), repr(rules(f"http://me:{CANARY}@p")), repr(failure)]
    shown += [str(failure), repr(vars(failure)), failure.describe("http://s")]
    assert not [text for text in shown if CANARY in text or proxy.authorization in text]
    assert proxy.secrets() == (proxy.authorization.removeprefix("Basic "), CANARY)


# -- failures -------------------------------------------------------------------------------------

PROXY = parse("http://p:3128", "HTTPS_PROXY")
WITH_PASSWORD = parse(f"http://me:{CANARY}@p:3128", "HTTPS_PROXY")


@pytest.mark.parametrize(
    ("proxy", "problem", "words"),
    [
        (PROXY, 407, ["asks for a user name and a password", "put them into HTTPS_PROXY"]),
        (WITH_PASSWORD, 407, ["refused the user name or the password", "correct them"]),
        (PROXY, 403, ["the proxy answered 403 Forbidden", "administrator", "NO_PROXY"]),
        (PROXY, 599, ["the proxy answered 599)", "did not reach https://s"]),
        (PROXY, 502, ["the proxy answered 502 Bad Gateway", "did not reach https://s"]),
        (PROXY, ConnectionRefusedError(111, "x"), ["Nothing listens", "check HTTPS_PROXY"]),
        (PROXY, TimeoutError("no connection within 4 s"), ["did not open a connection", "4 s"]),
        (PROXY, socket.gaierror(-2, "unknown"), ["cannot be resolved (unknown)", "HTTPS_PROXY"]),
        (PROXY, ssl.SSLError(1, "wrong version"), ["No TLS connection", "http:// instead of"]),
        (PROXY, BrokenReply("the answer is no HTTP"), ["is unusable", "no HTTP"]),
        (PROXY, ConnectionResetError(104, "reset"), ["broke", "reset"]),
    ],
)
def test_a_failure_names_the_proxy_the_setting_and_the_next_step(proxy, problem, words):
    text = ProxyFailure(proxy, problem).describe("https://s")
    assert "The proxy http://p:3128" in text or "the proxy http://p:3128" in text
    for word in words:
        assert word in text


def test_a_proxy_given_by_name_is_not_avoided_with_no_proxy():
    text = ProxyFailure(parse("http://p:3128"), 403).describe("https://s")
    assert "NO_PROXY" not in text
    assert "without proxy=" in text


@pytest.mark.parametrize(
    ("status", "final"),
    [(407, True), (403, True), (405, True), (501, True), (429, False), (502, False)],
)
def test_refusals_are_final_and_outages_are_not(status, final):
    assert ProxyFailure(PROXY, status).final is final


@pytest.mark.parametrize(
    ("status", "headers", "by_proxy"),
    [
        (407, {"content-type": "application/json"}, True),
        (403, {"content-type": "text/html"}, True),
        (403, {"content-type": "application/json"}, False),
        (502, {}, True),
        (503, {"content-type": "application/json; charset=utf-8"}, False),
        (504, {"content-type": "application/json", "proxy-status": "p; error=timeout"}, True),
        (404, {"content-type": "text/html"}, False),
        (500, {"content-type": "text/plain"}, False),
    ],
)
def test_what_a_proxy_writes_itself_is_told_from_what_the_server_says(status, headers, by_proxy):
    assert (refusal(PROXY, status, headers) is not None) is by_proxy
