"""Settings of a server: four sources in order, one list of names, everything else refused."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import pytest

from tinkex.config import server_environment
from tinkex.engine.local_settings import LocalSettings
from tinkex.engine.process import ProcessSettings
from tinkex.errors import InputError
from tinkex.server import Settings
from tinkex.serving.host_settings import HostSettings, base_models, known, load_settings
from tinkex.serving.process import _engine_spec, _process_settings

if TYPE_CHECKING:
    from pathlib import Path


def test_flags_beat_the_environment_which_beats_the_file_which_beats_the_defaults(tmp_path: Path):
    (tmp_path / "tinkex.toml").write_text("port = 1\nlong_poll_s = 1\ngap_timeout_s = 1\n")
    env = {"data_dir": str(tmp_path), "port": "2", "long_poll_s": "2"}
    settings = load_settings({"port": "3"}, env)
    server = settings.server
    assert (settings.port, server.long_poll_s, server.gap_timeout_s) == (3, 2.0, 1.0)
    assert server.session_timeout_s == Settings().session_timeout_s
    assert settings.data_dir == tmp_path


def test_a_file_that_is_named_is_read_instead_of_the_one_in_the_data_folder(tmp_path: Path):
    (tmp_path / "tinkex.toml").write_text("port = 1\n")
    (tmp_path / "other.toml").write_text("host = '127.0.0.2'\n")
    flags = {"data_dir": str(tmp_path)}
    settings = load_settings(flags, {}, config=tmp_path / "other.toml")
    assert (settings.port, settings.host) == (8000, "127.0.0.2")


def test_every_plain_setting_of_the_server_can_be_set():
    plain = {f.name for f in fields(Settings) if isinstance(f.default, int | float)}
    assert plain - {"grace_s"} <= known().keys()
    assert not {"keys", "secret", "key_mode", "grace_s"} & known().keys()


def test_the_memory_of_adapters_and_caches_reaches_the_engine():
    given = {"adapter_bytes": "5", "cache_bytes": "6"}
    chosen = _engine_spec(load_settings(given, {"parked_bytes": "7"})).settings
    assert (chosen.adapter_bytes, chosen.cache_bytes, chosen.host_bytes) == (5, 6, 7)
    assert _engine_spec(HostSettings()).settings == LocalSettings()


def test_a_stopped_engine_is_waited_for_as_set():
    chosen = load_settings({"engine_stopped_timeout_s": "5"}, {})
    assert _process_settings(chosen).stopped_timeout_s == 5.0
    assert _process_settings(HostSettings()) == ProcessSettings()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prot": "1"}, "--prot: there is no such setting; did you mean --port?"),
        ({"data_dri": "x"}, "did you mean --data-dir?"),
        ({"zzzzzz": "x"}, "--zzzzzz: there is no such setting$"),
        ({"port": "http"}, "--port: 'http' does not fit"),
        ({"port": "70000"}, "port: must be from 0 to 65535"),
        ({"threads": "0"}, "threads: must be 1 or more"),
        ({"engine_stopped_timeout_s": "0"}, "engine_stopped_timeout_s: must be above 0"),
        ({"shutdown_s": "nan"}, "--shutdown-s: must be a number from 0 on"),
        ({"long_poll_s": "-1"}, "--long_poll_s: must be a number from 0 on"),
        ({"log_level": "loud"}, "--log-level: 'loud' does not fit"),
        ({"dtype": "int8"}, "--dtype: 'int8' does not fit"),
        ({"base_models": []}, "base_models: name at least one"),
        ({"base_models": ["a", "a=/b"]}, "base_models: names must differ"),
        ({"base_models": ["=folder"]}, "must be NAME or NAME=FOLDER"),
        ({"base_models": ["name="]}, "must be NAME or NAME=FOLDER"),
        ({"auth": "none", "host": "0.0.0.0"}, "no_auth: lets in everybody"),
        ({"auth": "none", "host": "example.org"}, "no_auth: lets in everybody"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(given: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        load_settings(given, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", r"tinkex\.toml: prot: there is no such setting; did you mean .*port"),
        ('port = "1"', r"tinkex\.toml: port: '1' does not fit"),
        ("port = true", r"tinkex\.toml: port: True does not fit"),
        ("[server]\nport = 1", r"tinkex\.toml: server: there is no such setting"),
        ("port = ", "is not TOML"),
    ],
)
def test_what_does_not_fit_in_the_file_is_refused_by_name(tmp_path: Path, text: str, message: str):
    (tmp_path / "tinkex.toml").write_text(text)
    with pytest.raises(InputError, match=message):
        load_settings({"data_dir": str(tmp_path)}, {})


def test_a_limit_can_be_lifted(tmp_path: Path):
    (tmp_path / "tinkex.toml").write_text("max_requests_per_s = 2.0\n")
    flags = {"data_dir": str(tmp_path)}
    assert load_settings(flags, {}).server.max_requests_per_s == 2.0
    assert load_settings(flags, {"max_requests_per_s": "none"}).server.max_requests_per_s is None
    with pytest.raises(InputError, match="'none' does not fit"):
        load_settings({"max_samples": "none"}, {})


@pytest.mark.parametrize(
    ("host", "inside"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("h", False)],
)
def test_which_addresses_only_this_machine_reaches(host: str, inside: bool):
    assert HostSettings(host=host).on_loopback is inside


def test_a_base_model_has_a_name_and_a_place():
    settings = load_settings({"base_models": ["tinkex/tiny", "mine=/models/x=1"]}, {})
    assert list(base_models(settings)) == [("tinkex/tiny", "tinkex/tiny"), ("mine", "/models/x=1")]


def test_the_environment_names_settings_and_not_those_of_the_embedded_server():
    env = {
        "TINKEX_PORT": "1",
        "TINKEX_BASE_MODELS": "a, b",
        "TINKEX_EMBEDDED_MODELS": "c",
        "TINKEX_DEVICE": "",
        "TINKER_API_KEY": "k",
    }
    found = server_environment(env)
    assert found == {"port": "1", "base_models": "a, b"}
    assert load_settings({}, found).base_models == ("a", "b")
