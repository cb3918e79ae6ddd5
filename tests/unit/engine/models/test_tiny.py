"""`tinkex/tiny` is the same model everywhere, and a real one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.unit.engine.models.reference import assert_same_logits, logits, random_tokens
from tinkex.engine.models.loader import load_model
from tinkex.engine.models.tiny import TINY_CONFIG, tiny_decoder

if TYPE_CHECKING:
    from pathlib import Path

CHECKSUM = "db3d76860cc88bee21390f7212e6530886f5385ed408deb2c780e1b4d2b791df"


def test_its_weights_are_the_same_bits_on_every_machine():
    digest = hashlib.sha256()
    for name, tensor in tiny_decoder().stored.named():
        digest.update(name.encode())
        digest.update(tensor.numpy().astype("<f4").tobytes())
    assert digest.hexdigest() == CHECKSUM


def test_it_has_a_few_hundred_thousand_parameters():
    assert sum(tensor.numel() for _, tensor in tiny_decoder().stored.named()) == 329_344


def test_in_another_type_it_is_the_same_model_rounded():
    exact, rounded = tiny_decoder(), tiny_decoder(dtype=torch.bfloat16)
    assert torch.equal(
        exact.stored.layers[1].weights["k_proj"].bfloat16(),
        rounded.stored.layers[1].weights["k_proj"],
    )


def test_its_predictions_depend_on_the_text_and_are_neither_flat_nor_certain():
    decoder = tiny_decoder()
    first, second = random_tokens(TINY_CONFIG.vocab_size, 30, 30)
    second[-1] = first[-1]
    probabilities = logits(decoder, [first, second]).softmax(-1)
    assert 0.01 < probabilities.max(-1).values.mean() < 0.5
    assert (probabilities[29] - probabilities[59]).abs().max() > 0.001


def test_transformers_reads_it_as_a_llama(tmp_path: Path):
    model = load_model("tinkex/tiny")
    config = dataclasses.asdict(TINY_CONFIG)
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "rms_eps": "rms_norm_eps",
        "max_context": "max_position_embeddings",
        "tied_embeddings": "tie_word_embeddings",
        "rope_theta": "rope_theta",
    }
    values = {theirs: config[ours] for ours, theirs in names.items()}
    values |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = {name: tensor.clone() for name, tensor in model.decoder.stored.named()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(model.decoder, theirs, 50, 5)


def test_transformers_reads_its_tokenizer(tmp_path: Path):
    tokenizer = load_model("tinkex/tiny").tokenizer
    assert tokenizer is not None
    (tmp_path / "tokenizer.json").write_text(tokenizer.json)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    text = "naïve 東京 <|im_end|>\n"
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer.encode(text)
