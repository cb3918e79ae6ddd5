"""The stored credentials file."""

from __future__ import annotations

import json
import os
import stat

import pytest

from tinkex.credentials import (
    CredentialStore,
    KeyDetails,
    OrgDetails,
    StoredKey,
    UserDetails,
    credentials_path,
    read_store,
    write_store,
)
from tinkex.errors import CredentialError


def test_a_missing_file_is_an_empty_store(tmp_path):
    assert read_store(credentials_path(tmp_path)) == CredentialStore()


def test_what_is_written_is_read_again_with_the_protocols_shape(tmp_path):
    path = credentials_path(tmp_path)
    details = KeyDetails(OrgDetails("Org"), UserDetails("a@b"))
    store = CredentialStore().with_key("123", StoredKey("tml-x", "laptop", note="n"))
    store = store.with_key(
        "9", StoredKey("tml-y", "ci", "generated", details=details), make_default=False
    )
    write_store(path, store)
    assert read_store(path) == store
    assert read_store(path).default_key == "tml-x"
    assert json.loads(path.read_text()) == {
        "version": 1,
        "default": "123",
        "keys": {
            "123": {"type": "manual", "key": "tml-x", "name": "laptop", "note": "n"},
            "9": {
                "type": "generated",
                "key": "tml-y",
                "name": "ci",
                "details": {"org_details": {"name": "Org"}, "user_details": {"email": "a@b"}},
            },
        },
    }


@pytest.mark.skipif(os.name == "nt", reason="POSIX modes")
def test_folder_and_file_are_for_their_owner_only(tmp_path):
    path = credentials_path(tmp_path)
    path.parent.mkdir(mode=0o755)
    write_store(path, CredentialStore())
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = credentials_path(tmp_path)
    write_store(path, CredentialStore(default="old"))

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_store(path, CredentialStore(default="new"))
    assert read_store(path).default == "old"
    assert [each.name for each in path.parent.iterdir()] == ["credentials.json"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"version": 2, "keys": {}}', "version 2"),
        ('{"version": 1, "keys": {"1": {"key": 5, "name": "x"}}}', "damaged"),
        (
            '{"version": 1, "keys": {"1": {"type": "other", "key": "tml-canary", "name": "x"}}}',
            "damaged",
        ),
    ],
)
def test_an_unusable_file_is_named_without_its_content(tmp_path, content, says):
    path = credentials_path(tmp_path)
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(CredentialError, match=says) as caught:
        read_store(path)
    assert "credentials.json" in str(caught.value)
    assert "TINKER_API_KEY" in str(caught.value)
    assert "canary" not in str(caught.value)


def test_unknown_members_are_tolerated_and_a_dangling_default_is_none(tmp_path):
    path = credentials_path(tmp_path)
    path.parent.mkdir()
    path.write_text('{"version": 1, "default": "7", "keys": {}, "future": true}')
    assert read_store(path).default_key is None


def test_removing_the_default_key_leaves_no_default():
    store = (
        CredentialStore()
        .with_key("1", StoredKey("tml-a", "a"))
        .with_key("2", StoredKey("tml-b", "b"))
    )
    assert store.without_key("1").default == "2"
    assert store.without_key("2").default is None
    assert "tml-a" not in repr(store)
