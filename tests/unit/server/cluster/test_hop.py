"""Signed hops: what is accepted, what is refused and with which words."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request

from tests.unit.server.cluster.nodes import SECRET, new_hops
from tinkex.errors import APIStatusError
from tinkex.server.cluster.hop import HEADER, OF_NODE, Hop, check, received_hop, sign, target_of

NOW = 1_700_000_000.0
HOP = Hop("gpu-3-a1b2", "203.0.113.7", "https://train.example:8443")
TARGET = "/api/v1/models/m%201?page=2&x=%2F"


def signed(hop: Hop = HOP, now: float = NOW) -> str:
    return sign(SECRET, "POST", TARGET, hop, now)


def refusal(value: str, **changed: Any) -> str:
    given: dict[str, Any] = {
        "secret": SECRET, "method": "POST", "target": TARGET, "value": value, "now": NOW, **changed
    }  # fmt: skip
    with pytest.raises(APIStatusError) as caught:
        check(**given)
    assert caught.value.status_code == 403
    assert caught.value.response.headers == {HEADER: "refused"}
    return str(caught.value.body)


@pytest.mark.parametrize(
    "hop",
    [
        HOP,
        Hop("n"),
        Hop("n", "2001:db8::1", "http://[2001:db8::2]:80"),
        Hop("name with spaces\nand é", "fe80::1%eth0", ""),
    ],
)
def test_a_signed_hop_says_what_was_signed(hop: Hop):
    value = signed(hop)
    assert value.isascii()
    assert "\n" not in value
    assert check(SECRET, "POST", TARGET, value, NOW) == hop


@pytest.mark.parametrize("age_s", [0.0, 59.9, -59.9])
def test_a_hop_is_good_for_a_minute_either_way(age_s: float):
    assert check(SECRET, "POST", TARGET, signed(), NOW + age_s) == HOP


@pytest.mark.parametrize(
    ("age_s", "words"), [(61.0, "61 s old"), (-61.0, "61 s in the future"), (1e9, "s old")]
)
def test_an_expired_hop_or_one_of_the_future_is_refused(age_s: float, words: str):
    assert words in refusal(signed(), now=NOW + age_s)


@pytest.mark.parametrize(
    "changed",
    [
        {"secret": b"of another cluster"},
        {"method": "DELETE"},
        {"target": TARGET + "1"},
        {"target": TARGET.partition("?")[0]},
    ],
)
def test_a_hop_is_good_for_one_request_of_one_cluster(changed: dict[str, Any]):
    assert "signature is wrong" in refusal(signed(), **changed)


@pytest.mark.parametrize("index", range(1, 6))
def test_no_part_of_a_hop_can_be_changed(index: int):
    parts = signed().split(" ")
    parts[index] = parts[index][:-1] + ("1" if parts[index][-1] != "1" else "2")
    assert "signature is wrong" in refusal(" ".join(parts))


@pytest.mark.parametrize(
    "value", ["", "x", "1 2 3", signed() + " more", " " + signed(), signed() + "é", " " * 9]
)
def test_what_is_no_hop_is_called_malformed(value: str):
    assert "malformed" in refusal(value)


def test_another_version_is_named():
    assert "version" in refusal("2" + signed()[1:])


def test_a_time_that_is_no_number_is_refused_even_if_it_is_signed():
    class Odd(float):
        def __format__(self, spec: str) -> str:
            return "soon"

    assert "malformed" in refusal(signed(now=Odd(NOW)))
    for text in ("nan", "inf", "-inf"):
        refusal(signed(now=float(text)))


def test_no_refusal_and_no_repr_shows_the_secret():
    hops = new_hops()
    words = [refusal(signed(), method="GET"), refusal(signed(), now=0.0), refusal("x"), repr(hops)]
    assert not any(SECRET.decode() in text or SECRET.hex() in text for text in words)


def scope_of(value: str | None, **changed: Any) -> dict[str, Any]:
    headers = [(b"host", b"10.0.0.5:8000"), (b"x-api-key", b"tml-1")]
    if value is not None:
        headers.append((HEADER.encode(), value.encode()))
    return {
        "type": "http",
        "method": "POST",
        "path": "/api/v1/models/m 1",
        "raw_path": b"/api/v1/models/m%201",
        "query_string": b"page=2&x=%2F",
        "headers": headers,
        "scheme": "http",
        "server": ("10.0.0.5", 8000),
        "client": ("10.0.0.4", 5555),
        **changed,
    }


def test_an_admitted_request_looks_as_if_the_client_had_sent_it_here():
    scope = scope_of(signed())
    assert new_hops(now=NOW).admit(scope) == HOP == received_hop(scope)
    request = Request(scope)
    assert request.client is not None
    assert request.client.host == "203.0.113.7"
    assert str(request.url).startswith("https://train.example:8443/api/v1/")
    assert request.headers.getlist("host") == ["train.example:8443"]
    assert request.headers["x-api-key"] == "tml-1"


def test_a_client_without_address_and_host_stays_unknown():
    scope = scope_of(signed(Hop("n")))
    new_hops(now=NOW).admit(scope)
    assert Request(scope).client is None
    assert Request(scope).headers["host"] == "10.0.0.5:8000"


def test_a_public_request_has_no_hop_and_a_forged_one_is_refused():
    scope = scope_of(None)
    assert new_hops(now=NOW).admit(scope) is None
    assert received_hop(scope) is None
    assert scope == {**scope_of(None), "tinkex.headers": scope["tinkex.headers"]}
    forged = scope_of(sign(b"guessed", "POST", TARGET, HOP, NOW))
    with pytest.raises(APIStatusError, match="signature is wrong"):
        new_hops(now=NOW).admit(forged)
    assert received_hop(forged) is None


def test_a_prefix_of_either_node_is_no_part_of_what_is_signed():
    mounted = scope_of(
        None, path="/a b/api/v1/x", raw_path=b"/a%20b/api/v1/x", root_path="/a b", query_string=b""
    )
    assert target_of(mounted) == "/api/v1/x"
    assert target_of(scope_of(None)) == TARGET
    without_raw = {**scope_of(None)}
    del without_raw["raw_path"]
    assert target_of(without_raw) == TARGET


def test_the_server_learns_which_connections_are_those_of_nodes():
    hops, found = new_hops(), list[str]()
    scope: dict[str, Any] = {
        "method": "GET", "path": "/x", "query_string": b"", "headers": [],
        OF_NODE: lambda: found.append("node"),
    }  # fmt: skip
    assert hops.admit(dict(scope)) is None
    bad = {**scope, "headers": [(HEADER.encode(), b"1 made up")]}
    with pytest.raises(APIStatusError):
        hops.admit(bad)
    assert found == []
    good = {**scope, "headers": [(HEADER.encode(), hops.sign("GET", "/x").encode())]}
    assert hops.admit(good) is not None
    assert found == ["node"]
