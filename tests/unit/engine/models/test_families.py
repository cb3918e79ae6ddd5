"""Each family gives the logits that `transformers` gives for the same folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.unit.engine.models.reference import (
    assert_same_logits,
    logits,
    plain_attention,
    random_model,
    random_tokens,
)
from tests.unit.engine.projections import base_projections
from tinkex.engine.decoder import PROJECTIONS, RopeScaling
from tinkex.engine.models.hf_config import read_config
from tinkex.engine.models.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from tinkex.engine.decoder import Projection

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama without groups": ("Llama", {"num_key_value_heads": 4}),
    "llama with one group": ("Llama", {"num_key_value_heads": 1}),
    "llama biased": ("Llama", {"attention_bias": True}),
    "llama wide heads": ("Llama", {"head_dim": 12}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama linear": ("Llama", {"rope_parameters": LINEAR}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 biased": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path):
    family, settings = CASES[case]
    model = random_model(family, **settings)
    model.save_pretrained(tmp_path)
    decoder = load_model(str(tmp_path)).decoder
    assert decoder.config.tied_embeddings == settings.get("tie_word_embeddings", False)
    assert_same_logits(decoder, model, 40, 1, 9)


def test_a_sharded_folder_is_read_like_a_single_file(tmp_path: Path):
    model = random_model("Qwen3", head_dim=16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_logits(load_model(str(tmp_path)).decoder, model, 12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_are_read_into_float32(dtype: torch.dtype, tmp_path: Path):
    random_model("Llama").to(dtype).save_pretrained(tmp_path)
    decoder = load_model(str(tmp_path), dtype=torch.float32).decoder
    assert decoder.unembed_VD.dtype == torch.float32
    # Read again, because `.to(dtype)` has rounded the rotary frequencies of the first one.
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(decoder, model, 12)


def test_a_float32_file_is_rounded_to_the_chosen_type(tmp_path: Path):
    model = random_model("Llama")
    model.save_pretrained(tmp_path)
    decoder = load_model(str(tmp_path), dtype=torch.bfloat16).decoder
    expected = model.model.layers[2].mlp.down_proj.weight.bfloat16()
    assert torch.equal(decoder.stored.layers[2].weights["down_proj"], expected)
    assert {tensor.dtype for _, tensor in decoder.stored.named()} == {torch.bfloat16}


def test_the_configuration_of_older_files_means_the_same(tmp_path: Path):
    random_model("Llama", rope_parameters=LLAMA3).save_pretrained(tmp_path)
    new = read_config(tmp_path, "m")
    values = json.loads((tmp_path / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = rope | {"type": rope.pop("rope_type")}
    del values["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_config(tmp_path, "m") == new
    assert new.rope_theta == 500.0
    assert new.rope_scaling == RopeScaling(
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_context=32,
    )


def test_a_generation_config_names_all_ends_of_a_turn(tmp_path: Path):
    random_model("Llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2, 9]}')
    assert read_config(tmp_path, "m").eos_token_ids == (5, 2, 9)
    (tmp_path / "generation_config.json").unlink()
    assert read_config(tmp_path, "m").eos_token_ids == (2,)


def test_packed_sequences_do_not_see_each_other():
    decoder = load_model("tinkex/tiny").decoder
    first, second = random_tokens(decoder.config.vocab_size, 17, 23)
    together = logits(decoder, [first, second])
    apart = torch.cat([logits(decoder, [first]), logits(decoder, [second])])
    assert torch.allclose(together, apart, atol=1e-5)


def test_no_tokens_give_no_hidden_states():
    decoder = load_model("tinkex/tiny").decoder
    nothing = torch.zeros(0, dtype=torch.int64)
    assert logits(decoder, [nothing]).shape == (0, decoder.config.vocab_size)


def test_base_projections_apply_weight_and_bias(tmp_path: Path):
    model = random_model("Qwen2")
    model.save_pretrained(tmp_path)
    decoder = load_model(str(tmp_path)).decoder
    project = base_projections(decoder)
    x_TD = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    attention = model.model.layers[1].self_attn
    q, k, v = project(1, ("q_proj", "k_proj", "v_proj"), x_TD)
    assert torch.allclose(q, attention.q_proj(x_TD), atol=1e-5)
    assert torch.allclose(k, attention.k_proj(x_TD), atol=1e-5)
    assert torch.allclose(v, attention.v_proj(x_TD), atol=1e-5)
    assert decoder.stored.layers[1].biases.get("q_proj") is not None
    assert decoder.stored.layers[1].biases.get("o_proj") is None
    assert decoder.stored.layers[1].biases.get("down_proj") is None


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_the_model_asks_for_every_projection_once_per_layer(family: str, tmp_path: Path):
    random_model(family, head_dim=16).save_pretrained(tmp_path)
    decoder = load_model(str(tmp_path)).decoder
    base = base_projections(decoder)
    asked: list[tuple[int, tuple[Projection, ...]]] = []

    def project(layer: int, names: tuple[Projection, ...], x_TI: Tensor) -> tuple[Tensor, ...]:
        asked.append((layer, names))
        return base(layer, names, x_TI)

    decoder.hidden(torch.arange(4), torch.arange(4), plain_attention([4]), project)
    assert [names for layer, names in asked if layer == 1] == [
        ("q_proj", "k_proj", "v_proj"),
        ("o_proj",),
        ("gate_proj", "up_proj"),
        ("down_proj",),
    ]
    assert len(asked) == 4 * decoder.config.num_layers


@pytest.mark.parametrize("name", PROJECTIONS)
def test_gradients_reach_whatever_a_projection_adds(name: Projection):
    decoder = load_model("tinkex/tiny").decoder
    base = base_projections(decoder)
    outputs = decoder.stored.layers[0].weights[name].shape[0]
    added = torch.zeros(outputs, requires_grad=True)

    def project(layer: int, names: tuple[Projection, ...], x_TI: Tensor) -> tuple[Tensor, ...]:
        made = base(layer, names, x_TI)
        if layer:
            return made
        return tuple(y + added if n == name else y for n, y in zip(names, made, strict=True))

    hidden = decoder.hidden(torch.arange(6), torch.arange(6), plain_attention([6]), project)
    hidden[:, 0].sum().backward()
    assert added.grad is not None
    assert added.grad.abs().max() > 1e-4
    assert not any(tensor.requires_grad for _, tensor in decoder.stored.named())


def test_projections_with_one_input_lie_next_to_each_other_in_memory():
    decoder = load_model("tinkex/tiny").decoder
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        weights = [decoder.stored.layers[1].weights[name] for name in group]
        assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
        assert all(weight.is_contiguous() for weight in weights)
