"""Which tokenizer belongs to a model, and loading it with either library or none."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers as hf_tokenizers
from tokenizers import models, pre_tokenizers, processors

from tinkex.clients.service import ServiceClient
from tinkex.errors import InputError
from tinkex.testing import API_KEY, FakeServer
from tinkex.testing.faults import reply
from tinkex.tokenizers import (
    FastTokenizer,
    Tokenizer,
    TokenizerError,
    TokenizerSource,
    load_tokenizer,
    load_tokenizer_async,
    plan,
)

if TYPE_CHECKING:
    from pathlib import Path

WORDS = {"<bos>": 0, "<eos>": 1, "hello": 2, "world": 3, "[UNK]": 4}


def make_folder(folder: Path, words: dict[str, int] = WORDS, **settings: Any) -> Path:
    """A tokenizer folder as the hub has them: one token per word, a mark before each text."""
    folder.mkdir(parents=True, exist_ok=True)
    fast = hf_tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.add_special_tokens(["<bos>", "<eos>"])
    fast.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 0)])
    fast.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- which one -----------------------------------------------------------------------------------


@pytest.mark.req("S33")
@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize(
    ("model", "tokenizer_id", "expected"),
    [
        ("Qwen/Qwen3-8B", None, "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B:lora-32", None, "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", "other/tokenizer", "other/tokenizer"),
        ("org/model/variant", None, "org/model"),
        ("org/model/variant:8", None, "org/model"),
        ("a/b/c/d", None, "a/b/c/d"),
        (
            "meta-llama/Llama-3.1-8B",
            None,
            "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer",
        ),
        ("meta-llama/Llama-3.1-8B", "server/choice", "server/choice"),
        ("meta-llama/Llama-2-7b", None, "meta-llama/Llama-2-7b"),
    ],
)
def test_a_name_leads_to_a_tokenizer(model: str, tokenizer_id: str | None, expected: str):
    assert plan(model, tokenizer_id) == TokenizerSource(expected)


@pytest.mark.req("S33")
@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize(
    ("name", "repository", "revision"),
    [
        ("Kimi-K2-Thinking", "Kimi-K2-Thinking", "612681931a8c906ddb349f8ad0f582cb552189cd"),
        ("Kimi-K2.5", "Kimi-K2.5", "4d01dfe0332d63057c186e0b262165819efb6611"),
        ("Kimi-K2.5-Text-Only", "Kimi-K2.5", "4d01dfe0332d63057c186e0b262165819efb6611"),
        ("Kimi-K2.6", "Kimi-K2.6", "b5aabbfb20227ed42becbf5541dbffd213942c58"),
        ("Kimi-K3", "Kimi-K3", "f831ab66814297da540d832a5235f8e904f29d06"),
    ],
)
def test_repositories_with_code_are_pinned(name: str, repository: str, revision: str):
    expected = TokenizerSource(f"moonshotai/{repository}", revision)
    assert plan(f"moonshotai/{name}") == expected
    assert plan("some/model", f"moonshotai/{name}") == expected


@pytest.mark.req("S33")
def test_a_local_folder_comes_first_even_with_two_slashes_in_its_path(in_an_empty_folder: Path):
    folder = make_folder(in_an_empty_folder / "models" / "mine" / "v2")
    for name in (str(folder), "models/mine/v2", "./models/mine/v2"):
        found = plan(name, "server/choice")
        assert (found.name, found.local) == (str(folder), True)


@pytest.mark.req("S33")
def test_a_tokenizer_id_may_be_a_local_folder_too(in_an_empty_folder: Path):
    folder = make_folder(in_an_empty_folder / "tok")
    assert plan("org/model", "tok").name == str(folder)


def test_a_folder_without_a_tokenizer_in_it_does_not_count(in_an_empty_folder: Path):
    (in_an_empty_folder / "org" / "model").mkdir(parents=True)
    assert plan("org/model") == TokenizerSource("org/model")


@pytest.mark.parametrize("name", ["x\0y", "x" * 5000])
def test_a_name_that_no_folder_can_have_is_no_folder(name: str):
    assert plan(name) == TokenizerSource(name)


def test_an_empty_name_is_refused():
    with pytest.raises(InputError, match="model_name"):
        plan("")


# -- loading -------------------------------------------------------------------------------------


# Not isinstance: since Python 3.12 that does not see what transformers computes on demand.
MEMBERS = [name for name in vars(Tokenizer) if not name.startswith("_")]


@pytest.mark.req("S33")
def test_transformers_makes_the_tokenizer_where_it_is_installed(tmp_path: Path):
    import transformers

    loaded = load_tokenizer(str(make_folder(tmp_path)))
    assert isinstance(loaded, transformers.PreTrainedTokenizerBase)
    assert all(hasattr(loaded, name) for name in MEMBERS)
    assert loaded.encode("hello world") == [0, 2, 3]


@pytest.mark.req("S33")
@pytest.mark.usefixtures("without_transformers")
def test_without_transformers_the_small_library_does(tmp_path: Path):
    loaded = load_tokenizer(str(make_folder(tmp_path)))
    assert isinstance(loaded, FastTokenizer)
    assert all(hasattr(loaded, name) for name in MEMBERS)
    assert loaded.encode("hello world") == [0, 2, 3]
    assert loaded.encode("hello world", add_special_tokens=False) == [2, 3]
    assert loaded.decode([0, 2, 3]) == "<bos> hello world"
    assert loaded.decode([0, 2, 3], skip_special_tokens=True) == "hello world"
    assert (loaded.bos_token_id, loaded.eos_token_id) == (0, 1)
    assert (loaded.vocab_size, len(loaded)) == (5, 5)
    assert str(tmp_path) in repr(loaded)


@pytest.mark.usefixtures("without_transformers")
def test_decoding_takes_numpy_values(tmp_path: Path):
    import numpy as np

    loaded = load_tokenizer(str(make_folder(tmp_path)))
    assert loaded.decode(np.array([2, 3])) == "hello world"


@pytest.mark.usefixtures("without_transformers")
@pytest.mark.parametrize(
    ("settings", "eos"),
    [
        ({"eos_token": {"content": "<eos>", "lstrip": False}}, 1),
        ({"eos_token": None}, None),
        ({"eos_token": "<never-heard-of>"}, None),
    ],
)
def test_special_tokens_are_read_in_either_form(
    tmp_path: Path, settings: dict[str, Any], eos: int | None
):
    assert load_tokenizer(str(make_folder(tmp_path, **settings))).eos_token_id == eos


@pytest.mark.usefixtures("without_transformers")
def test_settings_that_cannot_be_read_leave_a_working_tokenizer(tmp_path: Path):
    folder = make_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    loaded = load_tokenizer(str(folder))
    assert loaded.encode("hello") == [0, 2]
    assert loaded.eos_token_id is None


@pytest.mark.usefixtures("without_transformers")
def test_chat_templates_name_the_library_they_need(tmp_path: Path):
    loaded: Any = load_tokenizer(str(make_folder(tmp_path)))
    with pytest.raises(TokenizerError, match="transformers"):
        loaded.apply_chat_template([{"role": "user", "content": "hello"}])


@pytest.mark.req("S33")
@pytest.mark.usefixtures("without_transformers")
def test_without_any_library_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerError, match=r"tinkex\[tokenizers\]"):
        load_tokenizer(str(make_folder(tmp_path)))


@pytest.mark.usefixtures("without_transformers")
def test_a_damaged_folder_is_a_typed_error(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="could not be read from the folder"):
        load_tokenizer(str(tmp_path))


@pytest.mark.usefixtures("without_transformers")
def test_a_folder_that_only_transformers_can_read_says_so(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.req("S33")
@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize("name", ["TML/Inkling", "thinkingmachines/inkling"])
def test_the_vendors_own_tokenizers_need_the_vendors_package(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "tml_tokenizers", None)
    with pytest.raises(TokenizerError, match="tml_tokenizers"):
        load_tokenizer(name)


@pytest.mark.req("S33")
@pytest.mark.usefixtures("in_an_empty_folder")
def test_the_vendors_package_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    package, module = types.ModuleType("tml_tokenizers"), types.ModuleType("tinker_tokenizers")
    vars(module)["get_tinker_tokenizer"] = lambda name: f"the tokenizer {name}"
    monkeypatch.setitem(sys.modules, "tml_tokenizers", package)
    monkeypatch.setitem(sys.modules, "tml_tokenizers.tinker_tokenizers", module)
    assert load_tokenizer("TML/Made-For-This-Test") == "the tokenizer TML/Made-For-This-Test"


@pytest.mark.req("S33")
@pytest.mark.usefixtures("without_transformers")
def test_a_tokenizer_is_loaded_once_until_its_folder_changes(tmp_path: Path):
    first = load_tokenizer(str(make_folder(tmp_path)))
    assert load_tokenizer(str(tmp_path)) is first
    make_folder(tmp_path, {**WORDS, "new": 5})
    later = (tmp_path / "tokenizer.json").stat().st_mtime_ns + 1_000_000_000
    os.utime(tmp_path / "tokenizer.json", ns=(later, later))
    assert load_tokenizer(str(tmp_path)).vocab_size == 6


@pytest.mark.req("B11")
@pytest.mark.req("B5")
@pytest.mark.usefixtures("without_transformers")
def test_loading_does_not_block_the_callers_loop(tmp_path: Path):
    from blockbuster import blockbuster_ctx

    folder = make_folder(tmp_path)

    async def load() -> Tokenizer:
        with blockbuster_ctx():
            return await load_tokenizer_async(str(folder))

    assert asyncio.run(load()).encode("world", add_special_tokens=False) == [3]


def test_a_server_on_this_machine_gives_its_own_tokenizer():
    with (
        FakeServer().serve() as server,
        ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        sampler = service.create_sampling_client(base_model="tinkex/tiny")
        tokenizer = sampler.get_tokenizer()
        assert tokenizer.encode("yes", add_special_tokens=False) == list(b"yes")
        assert tokenizer.decode(list(b"yes")) == "yes"
        assert [request.query for request in server.seen("get_tokenizer")] == [
            "base_model=tinkex%2Ftiny"
        ]


def test_a_server_without_the_route_leaves_it_to_the_hub(in_an_empty_folder: Path):
    with (
        FakeServer().serve() as server,
        ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        server.faults.on("get_tokenizer", reply(404, {"detail": "no such path"}))
        sampler = service.create_sampling_client(base_model="tinkex/tiny")
        with pytest.raises(TokenizerError, match="tinkex serve"):
            sampler.get_tokenizer()
