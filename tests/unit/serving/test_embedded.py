"""The embedded server without one: how it is found, and what is said where it cannot run."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import pytest

from tinkex import Config, MissingPackageError
from tinkex.announcement import Announcement, announce, announced, withdraw
from tinkex.serving.embedded import reach

if TYPE_CHECKING:
    from pathlib import Path

URL = "http://127.0.0.1:1234"
SERVER = Announcement(URL, "tml-of-the-server", ("tinkex/tiny",), 1)


def load(folder: Path, **arguments: str) -> Config:
    env = {"TINKEX_EMBEDDED_SERVER": str(folder), "TINKER_API_KEY": "tml-of-another"}
    return Config.load(env=env, home=folder, **arguments)


def test_what_was_announced_is_found_until_it_is_withdrawn(tmp_path: Path):
    announce(tmp_path, SERVER)
    assert announced(str(tmp_path)) == SERVER
    withdraw(tmp_path)
    assert announced(str(tmp_path)) is None
    withdraw(tmp_path)


def test_only_its_owner_can_read_the_key_and_it_is_not_shown(tmp_path: Path):
    announce(tmp_path, SERVER)
    assert (tmp_path / "server.json").stat().st_mode & 0o777 == 0o600
    assert "tml-" not in repr(SERVER)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"url": 1}', "\0"])
def test_a_damaged_file_announces_nothing(tmp_path: Path, text: str):
    (tmp_path / "server.json").write_text(text)
    assert announced(str(tmp_path)) is None


def test_a_file_of_somebody_else_announces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    announce(tmp_path, SERVER)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert announced(str(tmp_path)) is None


def test_the_key_of_the_programs_own_server_is_for_that_server_only(tmp_path: Path):
    announce(tmp_path, SERVER)
    assert load(tmp_path, base_url=URL).api_key == "tml-of-the-server"
    assert load(tmp_path, base_url=f"{URL}/").api_key == "tml-of-the-server"
    assert load(tmp_path, base_url="http://127.0.0.1:12345").api_key == "tml-of-another"
    assert load(tmp_path, base_url="http://example.org").api_key == "tml-of-another"
    assert load(tmp_path, base_url=URL, api_key="tml-given").api_key == "tml-given"
    assert load(tmp_path).api_key == "tml-of-another"


def test_models_and_folder_come_from_the_environment(tmp_path: Path):
    env = {"TINKEX_EMBEDDED_MODELS": "a, b=/c,", "TINKEX_DATA_DIR": str(tmp_path)}
    config = Config.load(env=env, home=tmp_path)
    assert (config.embedded_models, config.data_dir) == (("a", "b=/c"), tmp_path)
    assert config.embedded


def test_without_the_extras_the_error_says_what_to_set_or_to_install(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("TINKEX_EMBEDDED_SERVER", raising=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    with pytest.raises(MissingPackageError, match="needs torch: pip install") as caught:
        reach(Config(embedded=True, embedded_models=("tinkex/tiny",)))
    assert "TINKER_API_KEY" in str(caught.value)
