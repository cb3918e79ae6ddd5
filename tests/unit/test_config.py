"""Settings: where they come from, and where they must not go."""

from __future__ import annotations

import ast
import logging
import pickle
from pathlib import Path

import pytest

import tinkex
from tinkex import urls
from tinkex.config import DEFAULT_BASE_URL, Config
from tinkex.credentials import (
    CredentialStore,
    StoredKey,
    credentials_path,
    write_store,
)
from tinkex.errors import CredentialError, InputError


def load(tmp_path: Path, env: dict[str, str] | None = None, **arguments) -> Config:
    return Config.load(env=env or {}, home=tmp_path, **arguments)


def proxy_of(config: Config, url: str | None = None) -> str | None:
    """The proxy that requests to a server (None: the configured one) go through."""
    assert not isinstance(config.proxy, str)
    chosen = config.proxy.choose(urls.parse(url or config.base_url)) if config.proxy else None
    return None if chosen is None else str(chosen)


def test_an_argument_beats_the_environment_which_beats_the_default(tmp_path):
    env = {
        "TINKER_BASE_URL": "http://env:1/",
        "TINKER_API_KEY": "tml-env",
        "TINKER_PROJECT_ID": "p",
    }
    assert load(tmp_path, env, base_url="http://arg:1").base_url == "http://arg:1"
    config = load(tmp_path, env)
    assert (config.base_url, config.api_key, config.project_id) == ("http://env:1", "tml-env", "p")
    assert load(tmp_path, env, api_key="tml-arg", project_id="q").api_key == "tml-arg"
    assert load(tmp_path, {"TINKER_API_KEY": "tml-env"}).base_url == DEFAULT_BASE_URL


def test_empty_values_count_as_not_set(tmp_path):
    names = ["BASE_URL", "API_KEY", "CREDENTIAL_CMD", "PROJECT_ID", "TAGS", "LOG"]
    env = {f"TINKER_{name}": "" for name in names}
    config = load(tmp_path, env, base_url="", api_key="")
    assert config.base_url == DEFAULT_BASE_URL
    assert (config.api_key, config.credential_cmd, config.project_id) == (None, None, None)
    assert (config.tags, config.log_level) == ((), None)
    assert config.embedded


def test_without_url_and_credential_the_client_is_embedded_and_otherwise_not(tmp_path):
    assert load(tmp_path).embedded
    assert not load(tmp_path, {"TINKER_BASE_URL": "http://h"}).embedded
    assert not load(tmp_path, {"TINKER_API_KEY": "tml-x"}).embedded
    assert not load(tmp_path, {"TINKER_CREDENTIAL_CMD": "cmd"}).embedded
    write_store(
        credentials_path(tmp_path), CredentialStore().with_key("1", StoredKey("tml-s", "n"))
    )
    config = load(tmp_path)
    assert not config.embedded
    assert config.stored_key == "tml-s"


def test_embedded_can_be_asked_for_by_name(tmp_path):
    env = {"TINKER_BASE_URL": "http://h", "TINKER_API_KEY": "tml-x"}
    assert load(tmp_path, env, base_url="embedded").embedded
    assert load(tmp_path, env | {"TINKER_BASE_URL": "embedded"}).embedded
    assert not load(tmp_path, {"TINKER_BASE_URL": "embedded"}, base_url="http://h").embedded


def test_the_stored_file_is_read_only_when_it_is_needed(tmp_path):
    path = credentials_path(tmp_path)
    path.parent.mkdir()
    path.write_text("damaged")
    assert load(tmp_path, {"TINKER_API_KEY": "tml-x"}).stored_key is None
    assert load(tmp_path, {"TINKER_CREDENTIAL_CMD": "cmd"}).stored_key is None
    with pytest.raises(CredentialError, match="damaged"):
        load(tmp_path)


def test_tags_keep_their_order_without_repetitions_and_empty_ones(tmp_path):
    assert load(tmp_path, {"TINKER_TAGS": "b, a,,b , c,"}).tags == ("b", "a", "c")
    assert Config(tags=("x", "", "x")).tags == ("x",)


@pytest.mark.parametrize(
    ("value", "on"),
    [
        ("1", True),
        ("TRUE", True),
        ("yes", True),
        ("on", True),
        ("0", False),
        ("off", False),
        ("", False),
    ],
)
def test_telemetry_is_on_unless_told_otherwise(tmp_path, value, on):
    assert load(tmp_path).telemetry
    assert load(tmp_path, {"TINKER_TELEMETRY": value}).telemetry is on


def test_the_log_level_is_read(tmp_path):
    assert load(tmp_path, {"TINKER_LOG": "debug"}).log_level == logging.DEBUG
    assert load(tmp_path, {"TINKER_LOG": "INFO"}).log_level == logging.INFO


def test_cloudflare_headers_are_added_and_can_be_overridden_in_any_case(tmp_path):
    env = {"CLOUDFLARE_ACCESS_CLIENT_ID": "id", "CLOUDFLARE_ACCESS_CLIENT_SECRET": "s3cret"}
    assert load(tmp_path, env).headers == {
        "CF-Access-Client-Id": "id",
        "CF-Access-Client-Secret": "s3cret",
    }
    overridden = load(tmp_path, env, headers={"cf-access-client-id": "mine", "X": "1"}).headers
    assert overridden == {
        "cf-access-client-id": "mine",
        "CF-Access-Client-Secret": "s3cret",
        "X": "1",
    }


@pytest.mark.parametrize(
    ("env", "plain", "secure"),
    [
        ({}, None, None),
        ({"NO_PROXY": "x.org"}, None, None),
        ({"HTTP_PROXY": "http://p:1"}, "http://p:1", None),
        ({"HTTPS_PROXY": "http://p:1"}, None, "http://p:1"),
        ({"ALL_PROXY": "p:1"}, "http://p:1", "http://p:1"),
        ({"all_proxy": "p:1", "https_proxy": "q:1"}, "http://p:1", "http://q:1"),
        ({"HTTP_PROXY": "upper:1", "http_proxy": "lower:1"}, "http://lower:1", None),
        ({"HTTP_PROXY": "upper:1", "http_proxy": ""}, None, None),
        ({"ALL_PROXY": "p:1", "http_proxy": ""}, "http://p:1", "http://p:1"),
        ({"ALL_PROXY": "p:1", "NO_PROXY": "x.org"}, None, None),
        ({"ALL_PROXY": "p:1", "NO_PROXY": "x.org", "no_proxy": ""}, "http://p:1", "http://p:1"),
        ({"HTTP_PROXY": "p:1", "REQUEST_METHOD": "GET"}, None, None),
        ({"http_proxy": "p:1", "REQUEST_METHOD": "GET"}, "http://p:1", None),
    ],
)
def test_proxy_variables_are_read_in_both_cases(tmp_path, env, plain, secure):
    config = load(tmp_path, env, base_url="http://x.org")
    assert proxy_of(config) == plain
    assert proxy_of(config, "https://x.org") == secure
    assert proxy_of(config, "http://localhost:8000") is None


def test_a_proxy_given_by_name_beats_the_environment(tmp_path):
    env = {"ALL_PROXY": "p:1", "NO_PROXY": "*", "TINKER_API_KEY": "tml-x"}
    assert proxy_of(load(tmp_path, env, proxy="q:1")) == "http://q:1"
    assert proxy_of(load(tmp_path, env, proxy="q:1"), "http://127.0.0.1:8000") == "http://q:1"
    assert proxy_of(Config(base_url="http://h", proxy="q:1")) == "http://q:1"
    assert proxy_of(Config(base_url="http://h", proxy="")) is None
    assert proxy_of(Config(base_url="http://h")) is None


def test_a_bad_proxy_variable_harms_only_those_whom_it_concerns(tmp_path):
    env = {"ALL_PROXY": "socks5://p:1"}
    assert load(tmp_path, env).embedded
    assert load(tmp_path, env, base_url="http://127.0.0.1:8000").proxy_secrets() == ()
    assert (
        load(tmp_path, env | {"NO_PROXY": "x.org"}, base_url="http://x.org").proxy_secrets() == ()
    )


@pytest.mark.parametrize(
    ("env", "arguments", "key"),
    [
        ({"TINKER_BASE_URL": "localhost:8000"}, {}, "TINKER_BASE_URL"),
        ({}, {"base_url": "ftp://h"}, "base_url"),
        ({"TINKER_LOG": "loud"}, {}, "TINKER_LOG"),
        ({}, {"headers": {"X": "a\r\nb"}}, "headers\\['X'\\]"),
        ({}, {"headers": {"x-api-key": "tml-x"}}, "headers\\['x-api-key'\\]"),
        ({}, {"headers": {"Proxy-Authorization": "x"}}, "pass proxy="),
        ({}, {"proxy": "ftp://p"}, "proxy"),
        ({}, {"proxy": 7}, "proxy"),
        ({"TINKER_API_KEY": "tml-x", "https_proxy": "socks5://p"}, {}, "https_proxy.*SOCKS"),
        ({"TINKER_BASE_URL": "http://h", "ALL_PROXY": "http://p:port"}, {}, "ALL_PROXY"),
    ],
)
def test_a_malformed_setting_is_named(tmp_path, env, arguments, key):
    with pytest.raises(InputError, match=key):
        load(tmp_path, env, **arguments)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_deadlines_are_finite_and_positive(seconds):
    with pytest.raises(InputError, match="submit_deadline_s"):
        Config(submit_deadline_s=seconds)


def test_every_default_deadline_is_finite():
    config = Config()
    assert (config.submit_deadline_s, config.silence_deadline_s) == (300, 300)
    assert (config.connect_timeout_s, config.bootstrap_deadline_s) == (4, 120)


@pytest.mark.req("S30")
def test_a_config_cannot_be_changed():
    config = Config(headers={"X": "1"})
    with pytest.raises(AttributeError):
        config.base_url = "http://other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.headers["X"] = "2"  # type: ignore[index]
    assert hash(config) == hash(Config(headers={"X": "1"}))


@pytest.mark.req("S30")
def test_two_configs_live_side_by_side(tmp_path):
    one = load(tmp_path, base_url="http://a", api_key="tml-a")
    two = load(tmp_path, base_url="http://b", api_key="tml-b")
    assert (one.base_url, one.api_key) == ("http://a", "tml-a")
    assert (two.base_url, two.api_key) == ("http://b", "tml-b")


@pytest.mark.req("B1")
@pytest.mark.req("B9")
def test_secrets_are_neither_shown_nor_pickled(monkeypatch, tmp_path):
    config = Config(
        base_url="http://h:1",
        api_key="tml-canary1",
        stored_key="tml-canary2",
        credential_cmd="echo tml-canary3",
        headers={"CF-Access-Client-Secret": "canary4"},
        proxy="http://me:canary5@p:3128",
        tags=("t",),
        telemetry=False,
    )
    assert "canary" not in repr(config)
    data = pickle.dumps(config)
    assert b"canary" not in data
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-this-process")
    monkeypatch.setenv("http_proxy", "http://proxy-of-this-process")
    monkeypatch.setenv("HOME", str(tmp_path))
    there = pickle.loads(data)
    assert (there.base_url, there.tags, there.telemetry) == ("http://h:1", ("t",), False)
    assert there.api_key == "tml-of-this-process"
    assert proxy_of(there) == "http://proxy-of-this-process"


@pytest.mark.req("S30")
def test_only_config_reads_the_environment():
    root = Path(tinkex.__file__).parent
    readers = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os"
            and {"environ", "getenv"} & {alias.name for alias in node.names})
    }  # fmt: skip
    assert readers == {"config.py"}
