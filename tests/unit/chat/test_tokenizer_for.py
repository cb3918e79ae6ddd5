"""A model's tokenizer and template from whichever server is there."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tinkex import ServiceClient
from tinkex.chat import ChatExample, Renderer, tokenizer_for, tokenizer_for_async
from tinkex.errors import BadRequestError
from tinkex.testing import API_KEY, FakeServer
from tinkex.tokenizers import FastTokenizer, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ASKED = [{"role": "user", "content": "é"}]
PROMPT = "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer().serve() as server:
        yield server


@pytest.fixture
def service(server: FakeServer) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        yield service


def test_the_tiny_model_has_a_tokenizer_of_bytes_and_a_template(
    service: ServiceClient, server: FakeServer
):
    server.requests.clear()
    tokenizer = tokenizer_for(service, "tinkex/tiny")
    renderer = Renderer.of(tokenizer)
    assert tokenizer.decode(renderer.prompt(ASKED)) == PROMPT
    assert renderer.stop == [258, 256]
    assert not server.seen("create_session"), "looking at a tokenizer starts no session"


def test_it_is_the_same_without_transformers(
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch
):
    expected = Renderer.of(tokenizer_for(service, "tinkex/tiny")).prompt(ASKED)
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer = tokenizer_for(service, "tinkex/tiny")
    assert isinstance(tokenizer, FastTokenizer)
    renderer = Renderer.of(tokenizer)
    assert renderer.prompt(ASKED) == expected
    answer = {"role": "assistant", "content": "ok"}
    assert renderer.example(ChatExample([*ASKED, answer])).tokens[-1] == 258


def test_it_can_be_awaited(service: ServiceClient):
    tokenizer = asyncio.run(tokenizer_for_async(service, "tinkex/tiny"))
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_of_a_model_that_nobody_has_the_server_says_what_it_serves(
    service: ServiceClient, elsewhere: bool
):
    with pytest.raises(BadRequestError, match="'tinkex/huge' is not served here; there is: tinkex"):
        tokenizer_for(service, "tinkex/huge", elsewhere=elsewhere)


def test_a_tokenizer_of_a_model_that_is_not_served_is_given_only_to_who_wants_it_alone(
    service: ServiceClient, tmp_path: Path
):
    folder_with(tmp_path, "{}", None)
    folder = str(tmp_path)
    assert tokenizer_for(service, folder, elsewhere=True).encode("a") == [0]
    with pytest.raises(BadRequestError, match="is not served here"):
        tokenizer_for(service, folder)


# -- templates of folders, without transformers -------------------------------------------------


def folder_with(folder: Path, settings: str | None, template: str | None) -> Any:
    import tokenizers

    words = tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(settings)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("settings", "template", "expected"),
    [
        ('{"chat_template": "inside"}', None, "inside"),
        ('{"chat_template": "inside"}', "besidé", "besidé"),
        ("{}", "beside", "beside"),
        (None, "beside", "beside"),
        ("{", "beside", "beside"),
        ("{}", None, None),
        (None, None, None),
        ('{"chat_template": 7}', None, None),
        ('{"chat_template": [{"name": "default", "template": "d"}]}', None, "d"),
        ('{"chat_template": [{"name": "rag", "template": "r"}]}', None, None),
    ],
)
def test_a_folders_template_is_found_in_all_its_places(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: str | None,
    template: str | None,
    expected: str | None,
):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert folder_with(tmp_path, settings, template).chat_template == expected
