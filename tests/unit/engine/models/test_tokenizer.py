"""The tokenizer a model brings, from bytes, a folder or GGUF metadata."""

from __future__ import annotations

import json
import unicodedata
from typing import TYPE_CHECKING, Any

import gguf as library
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.models.byte_text import BYTE_EOS, BYTE_VOCAB_SIZE
from tinkex.engine.models.gguf_file import GgufFile
from tinkex.engine.models.tokenizer import (
    byte_tokenizer,
    folder_tokenizer,
    gguf_tokenizer,
)
from tinkex.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

BYTES = byte_tokenizer()


@given(st.text())
def test_byte_ids_are_the_bytes_of_the_text(text: str):
    ids = BYTES.encode(text)
    assert "<|" in text or bytes(ids) == text.encode()
    assert BYTES.decode(ids) == text


def test_every_byte_has_its_own_id_and_special_tokens_follow():
    assert BYTES.encode("a<|endoftext|>b") == [97, BYTE_EOS, 98]
    assert BYTES.fast.token_to_id("<|im_start|>") == 257
    assert BYTES.decode([97, BYTE_EOS], skip_special_tokens=True) == "a"
    assert BYTES.fast.get_vocab_size() <= BYTE_VOCAB_SIZE


def test_half_a_character_and_an_unused_id_can_be_decoded():
    assert BYTES.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"
    assert BYTES.decode([97, BYTE_VOCAB_SIZE - 1]) == "a"


def test_a_folder_brings_its_tokenizer_and_template(tmp_path: Path):
    assert folder_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text(BYTES.json)
    plain = folder_tokenizer(tmp_path)
    assert plain is not None
    assert plain.chat_template is None
    assert plain.encode("é<|im_end|>") == [0xC3, 0xA9, 258]


@pytest.mark.parametrize(
    "template",
    ["{{ x }}", [{"name": "tool", "template": "no"}, {"name": "default", "template": "{{ x }}"}]],
)
def test_the_template_is_found_in_the_settings(template: Any, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(BYTES.json)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    found = folder_tokenizer(tmp_path)
    assert found is not None
    assert found.chat_template == "{{ x }}"


def test_a_template_in_its_own_file_goes_first(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(BYTES.json)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("new")
    found = folder_tokenizer(tmp_path)
    assert found is not None
    assert found.chat_template == "new"


@pytest.mark.parametrize(
    ("marker", "expected"),
    [("<s>", "<s>"), ({"__type": "AddedToken", "content": "<s>"}, "<s>"), (None, None), (7, None)],
)
def test_the_markers_are_found_in_the_settings(marker: Any, expected: str | None, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(BYTES.json)
    settings = {"bos_token": marker, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = folder_tokenizer(tmp_path)
    assert found is not None
    assert (found.bos_token, found.eos_token) == (expected, "</s>")


@pytest.mark.parametrize(
    ("file", "content"),
    [("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "[")],
)
def test_a_broken_file_is_named(file: str, content: str, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(BYTES.json)
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=str(tmp_path)):
        folder_tokenizer(tmp_path)


# -- GGUF metadata --------------------------------------------------------------------------------

LETTERS = sorted(json.loads(BYTES.json)["model"]["vocab"])
MERGES = ["1 2", "12 3", "123 4", "' S"]
TOKENS = [*LETTERS, "12", "123", "1234", "'S", "xyz", "<bos>", "<tool>"]


def written(tmp_path: Path, *, pre: str, tokens: list[str], merges: list[str], **more: Any) -> Path:
    """A GGUF file with nothing but a tokenizer."""
    writer = library.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    for key, value in more.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "t.gguf"


def pieces(tmp_path: Path, pre: str, text: str, **more: Any) -> list[str]:
    path = written(tmp_path, pre=pre, tokens=TOKENS, merges=MERGES, **more)
    with GgufFile(path) as file:
        tokenizer = gguf_tokenizer(file)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == unicodedata.normalize("NFC", text)
    return [TOKENS[token] for token in ids]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234", "I", "'", "S"]),
        ("smollm", ["1", "2", "3", "4", "I", "'", "S"]),
        ("llama-bpe", ["123", "4", "I", "'S"]),
        ("qwen2", ["1", "2", "3", "4", "I", "'S"]),
    ],
)
def test_each_style_cuts_digits_and_contractions_its_own_way(
    pre: str, expected: list[str], tmp_path: Path
):
    assert pieces(tmp_path, pre, "1234I'S") == expected


def test_llama_takes_whole_words_of_the_vocabulary_without_merges(tmp_path: Path):
    assert pieces(tmp_path, "llama-bpe", "xyz") == ["xyz"]
    assert pieces(tmp_path, "qwen2", "xyz") == ["x", "y", "z"]


def test_qwen_composes_accents_first(tmp_path: Path):
    assert len(pieces(tmp_path, "qwen2", "e\u0301")) == 2


def test_a_begin_token_is_put_in_front_when_the_file_says_so(tmp_path: Path):
    bos = {"bos_token_id": TOKENS.index("<bos>"), "add_bos_token": True}
    kinds = [1] * (len(TOKENS) - 2) + [3, 4]
    found = pieces(tmp_path, "gpt-2", "1", token_types=kinds, **bos)
    assert found == ["<bos>", "1"]


def test_marked_tokens_are_never_split_and_only_control_tokens_are_skipped(tmp_path: Path):
    kinds = [1] * (len(TOKENS) - 2) + [3, 4]
    path = written(tmp_path, pre="gpt-2", tokens=TOKENS, merges=MERGES, token_types=kinds)
    with GgufFile(path) as file:
        tokenizer = gguf_tokenizer(file)
    ids = tokenizer.encode("1<bos><tool>")
    assert [TOKENS[token] for token in ids] == ["1", "<bos>", "<tool>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1<tool>"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"merges": ["12"]}, "'12' does not name two tokens"),
        ({"merges": ["no such"]}, "do not fit"),
        ({"token_types": [1, 1]}, "2 token types for"),
        ({"bos_token_id": 9999, "add_bos_token": True}, "id 9999 is not in the vocabulary"),
    ],
)
def test_metadata_that_do_not_fit_together_are_refused(
    change: dict[str, Any], reason: str, tmp_path: Path
):
    path = written(tmp_path, **({"pre": "gpt-2", "tokens": TOKENS, "merges": MERGES} | change))
    with GgufFile(path) as file, pytest.raises(ModelError, match=reason):
        gguf_tokenizer(file)
