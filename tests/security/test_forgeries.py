"""Keys, tokens and links that were made up, changed or used for something else."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.security.world import world_on

if TYPE_CHECKING:
    from pathlib import Path

    from tests.security.world import Answer, Tenant, World

_SESSIONS = "/api/v1/sessions"


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _pack(value: object) -> str:
    return _b64(json.dumps(value, separators=(",", ":")).encode())


def _unpack(text: str) -> dict[str, Any]:
    return json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))


def _signed(head: str, secret: bytes) -> str:
    return f"{head}.{_b64(hmac.new(secret, head.encode(), hashlib.sha256).digest())}"


def _with(tenant: Tenant, credential: str, header: str = "x-api-key") -> Answer:
    """A list of sessions, asked for with something else than the tenant's key."""
    other = type(tenant)(tenant.port, credential, "nobody")
    headers = {} if header == "x-api-key" else {"x-api-key": "", header: f"Bearer {credential}"}
    return other.request("GET", _SESSIONS, None, headers)


ODD_KEYS = {
    "empty": "",
    "space": " ",
    "prefix": "tml-",
    "wrong": "tml-" + "a" * 43,
    "long": "tml-" + "a" * 9000,
    "sql": "tml-' OR '1'='1",
    "like": "tml-%",
    "path": "tml-../../etc/passwd",
    "format": "tml-{0}%s%n",
    "latin": "tml-\xe9\xff",
    "json": '{"key": 1}',
    "null": "null",
    "jwt-like": "eyJ.eyJ.x",
    "dots": "....",
    "owner": "neighbour",
}


@pytest.mark.parametrize("name", ODD_KEYS)
def test_an_odd_key_opens_nothing(world: World, name: str) -> None:
    answer = _with(world.attacker, ODD_KEYS[name])
    assert answer.status in (401, 429), answer
    assert b"neighbour" not in answer.body


@pytest.mark.parametrize("change", ["upper", "lower", "cut", "more", "space", "twice", "hash"])
def test_a_key_that_is_nearly_right_opens_nothing(world: World, change: str) -> None:
    key = world.neighbour.key
    changed = {
        "upper": key.upper(),
        "lower": key.lower() if key != key.lower() else key[::-1],
        "cut": key[:-1],
        "more": key + "a",
        "space": key[:20] + " " + key[20:],
        "twice": f"{key},{key}",
        "hash": hashlib.sha256(key.encode()).hexdigest(),
    }
    assert _with(world.attacker, changed[change]).status in (401, 429)


def _token(tenant: Tenant) -> str:
    return tenant.made("auth/token")["jwt"]


def _forgeries(token: str) -> dict[str, str]:
    """Tokens made from a good one of the attacker's."""
    kind, claims, signature = token.split(".")
    theirs = _pack({**_unpack(claims), "sub": "neighbour", "key": "stored 2"})
    later = _pack({**_unpack(claims), "exp": 2**53})
    head = _unpack(kind)
    made = {
        "other owner": f"{kind}.{theirs}.{signature}",
        "later end": f"{kind}.{later}.{signature}",
        "no signature": f"{kind}.{theirs}.",
        "no signature part": f"{kind}.{theirs}",
        "signature of nothing": f"{kind}.{theirs}.{_b64(b'')}",
        "signature cut": f"{kind}.{claims}.{signature[:-3]}",
        "signature longer": f"{kind}.{claims}.{signature}AAAA",
        "only claims": theirs,
        "four parts": f"{kind}.{claims}.{signature}.{signature}",
        "other secret": _signed(f"{kind}.{theirs}", b"secret"),
        "empty secret": _signed(f"{kind}.{theirs}", b"\0"),
    }
    for alg in ("none", "None", "NONE", "nOnE", "HS384", "HS512", "RS256", ""):
        changed = _pack({**head, "alg": alg})
        made[f"alg {alg!r}"] = f"{changed}.{theirs}."
        made[f"alg {alg!r} signed"] = f"{changed}.{claims}.{signature}"
    for name in ("jwk", "jku", "kid", "x5u"):
        made[name] = f"{_pack({**head, name: '/dev/null'})}.{theirs}.{signature}"
    return made


def test_a_changed_token_opens_nothing(world: World) -> None:
    token = _token(world.attacker)
    assert _with(world.attacker, token).status == 200
    for name, forged in _forgeries(token).items():
        for header in ("x-api-key", "authorization"):
            answer = _with(world.attacker, forged, header)
            assert answer.status in (401, 429), (name, answer)
            assert b"neighbour" not in answer.body, name
    world.assert_well()


def test_a_token_is_no_link_and_a_link_is_no_token(world: World) -> None:
    us = world.attacker
    model = us.model(us.session())
    us.result(us.made("save_weights", model_id=model, seq_id=1, path="own")["request_id"])
    url = us.get(f"training_runs/{model}/checkpoints/weights/own/archive").json["url"]
    link = url.split("/files/")[1].split("/")[0]
    token = _token(us)
    assert us.get(f"/api/v1/files/{token}/archive.tar").status == 404
    assert us.get(f"/api/v1/files/{token.partition('.')[2]}/archive.tar").status == 404
    assert _with(us, link).status in (401, 429)
    assert _with(us, f"eyJ.{link}").status in (401, 429)


def test_a_changed_link_opens_nothing(world: World) -> None:
    us = world.attacker
    model = us.model(us.session())
    us.result(us.made("save_weights", model_id=model, seq_id=1, path="own")["request_id"])
    url = us.get(f"training_runs/{model}/checkpoints/weights/own/archive").json["url"]
    link, name = url.split("/files/")[1].split("/", 1)
    claims, _, signature = link.rpartition(".")
    known = _unpack(claims)
    changes: list[dict[str, Any]] = [{key: "x"} for key in known]
    changes += [
        {"exp": 2**53},
        {"path": f"tinker://{model}/weights/../other"},
        {"owner": "neighbour"},
    ]
    for change in changes:
        forged = f"{_pack({**known, **change})}.{signature}"
        assert us.get(f"/api/v1/files/{forged}/{name}").status == 404, change
    for other in (
        "../archive.tar",
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e/x",
        "adapter_config.json%00",
        "",
    ):
        answer = us.get(f"/api/v1/files/{link}/{other}")
        assert answer.status in (400, 404), (other, answer)
    assert us.get(f"/api/v1/files/{link}/{name}").status == 200


@pytest.mark.timeout(600)
def test_tokens_and_links_end_when_they_say(tmp_path: Path) -> None:
    flags = ("--set", "token_ttl_s=0", "--set", "url_ttl_s=0")
    with world_on(tmp_path, *flags) as world:
        us = world.attacker
        assert _with(us, _token(us)).status == 401
        model = us.model(us.session())
        us.result(us.made("save_weights", model_id=model, seq_id=1, path="own")["request_id"])
        url = us.get(f"training_runs/{model}/checkpoints/weights/own/archive").json["url"]
        answer = us.get("/" + url.split("/", 3)[3])
        assert answer.status == 403
        assert "expired" in answer.detail
