"""Secrets of nodes: never shown, removed from log lines."""

from __future__ import annotations

import pickle

import pytest

from tinkex.config import node_environment
from tinkex.ray_cluster.secrets import NodeSecrets, url_secrets

SECRETS = NodeSecrets(
    {
        "TINKEX_DATABASE": "postgresql://user:p%40ssword@host/db",
        "AWS_SECRET_ACCESS_KEY": "aws-secret",
        "AWS_REGION": "eu-central-1",
    }
)


@pytest.mark.parametrize("secret", ["p%40ssword", "p@ssword", "aws-secret"])
def test_secrets_are_removed_from_text_in_every_form(secret: str):
    assert secret not in SECRETS.hide(f"cannot use {secret}!")
    assert secret not in repr(SECRETS)


def test_other_values_stay_readable():
    text = "eu-central-1: no such bucket; database host/db of user"
    assert SECRETS.hide(text) == text


def test_secrets_travel_and_compare():
    copy = pickle.loads(pickle.dumps(SECRETS))
    assert copy == SECRETS
    assert copy.environment({"HOME": "/"})["AWS_SECRET_ACCESS_KEY"] == "aws-secret"
    assert NodeSecrets({}) != SECRETS


def test_passwords_in_the_query_of_a_url_are_secret_too():
    assert url_secrets("postgresql:///db?host=h&password=abcd") == ("abcd",)
    assert url_secrets("s3://bucket/folder") == ()
    assert url_secrets("plain") == ()
    assert url_secrets("http://[broken") == ("http://[broken",)


def test_nodes_get_settings_and_credentials_and_nothing_else():
    given = {
        "TINKEX_DATABASE": "d",
        "AWS_ENDPOINT_URL": "e",
        "PGPASSWORD": "p",
        "HF_TOKEN": "t",
        "TINKEX_EMBEDDED_SERVER": "folder",
        "TINKEX_EMPTY": "",
        "HOME": "/root",
        "TINKER_API_KEY": "k",
    }
    assert node_environment(given).keys() == {
        "TINKEX_DATABASE",
        "AWS_ENDPOINT_URL",
        "PGPASSWORD",
        "HF_TOKEN",
    }
