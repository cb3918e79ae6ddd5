"""GGUF files: configuration, tensors of several types, and what a broken one says."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import gguf as library
import numpy as np
import pytest
import torch

from tests.unit.engine.models.reference import assert_same_logits, random_model
from tinkex.engine.backends.torch.layers import rope_frequencies
from tinkex.engine.models.gguf import read_config
from tinkex.engine.models.gguf_file import GgufFile
from tinkex.engine.models.hf_config import read_config as read_folder_config
from tinkex.engine.models.loader import load_model
from tinkex.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

Kind = library.GGMLQuantizationType
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Widths are multiples of 32, the block of the quantised types.
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}


def gguf_name(name: str) -> str:
    stem, ending = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{ending}"
    return f"{NAMES[stem]}.{ending}"


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of the rows of q and k: the halves of each rotary pair as neighbours."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: Any,
    kind: Any = Kind.F32,
    *,
    change: dict[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write a `transformers` model the way llama.cpp's converter does."""
    config, arch = model.config, model.config.model_type
    writer = library.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    alphabet = [chr(33 + number) for number in range(config.vocab_size - 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, "!!"])
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(2)
    for key, value in (change or {}).items():
        writer.add_key_value(key, value, library.GGUFValueType.get_type(value))
    for name, weight in model.state_dict().items():
        if name in leave_out or (config.tie_word_embeddings and name == "lm_head.weight"):
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        part = name.split(".")[-2]
        if arch == "llama" and part in heads:
            weight = interleaved(weight, heads[part])
        values = weight.detach().numpy()
        quantised = values.ndim > 1
        writer.add_tensor(
            gguf_name(name),
            library.quants.quantize(values, kind) if quantised else values,
            raw_dtype=kind if quantised else Kind.F32,
        )
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 16}),
    ],
)
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(
    family: str, settings: dict[str, Any], tmp_path: Path
):
    model = random_model(family, **settings)
    loaded = load_model(str(write_gguf(tmp_path / "m.gguf", model)))
    assert_same_logits(loaded.decoder, model, 20, 3)


def test_the_metadata_give_the_same_configuration_as_the_folder(tmp_path: Path):
    model = random_model("Qwen2", rms_norm_eps=1e-5)
    model.save_pretrained(tmp_path)
    with GgufFile(write_gguf(tmp_path / "m.gguf", model)) as file:
        assert read_config(file, "m") == read_folder_config(tmp_path, "m")


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
def test_quantised_tensors_are_dequantised(kind: Any, tmp_path: Path):
    model = random_model("Qwen2", **WIDE)
    decoder = load_model(str(write_gguf(tmp_path / "m.gguf", model, kind))).decoder
    for name in ("up_proj", "q_proj"):
        group = model.model.layers[1].mlp if name == "up_proj" else model.model.layers[1].self_attn
        original = getattr(group, name).weight.detach()
        stored = library.quants.dequantize(library.quants.quantize(original.numpy(), kind), kind)
        assert torch.equal(decoder.stored.layers[1].weights[name], torch.from_numpy(stored.copy()))
        assert not torch.equal(decoder.stored.layers[1].weights[name], original)


def test_stored_rope_factors_stretch_the_frequencies(tmp_path: Path):
    scaled = random_model(
        "Llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    )
    scaled.save_pretrained(tmp_path)
    config = read_folder_config(tmp_path, "m")
    plain = 1 / 500.0 ** (torch.arange(0, 8, 2) / 8)
    factors = (plain / rope_frequencies(config)).numpy()
    file = write_gguf(tmp_path / "m.gguf", scaled, extra={"rope_freqs.weight": factors})
    assert_same_logits(load_model(str(file)).decoder, scaled, 40)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"general.architecture": "mamba"}, "architecture mamba .*LlamaForCausalLM, Qwen2"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"llama.rope.dimension_count": 4}, "only a part of each head"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads cannot share 3"),
        ({"llama.block_count": 0}, "'llama.block_count' in the metadata is 0"),
        ({"llama.block_count": 4}, r"'model\.layers\.3\.input_layernorm\.weight' is missing"),
        ({"llama.block_count": 2}, r"'model\.layers\.2\..*' has no place"),
        ({"llama.feed_forward_length": 40}, r"blk\.0\.ffn_gate.*\[48, 32\].*\[40, 32\]"),
        ({"tokenizer.ggml.eos_token_id": 67}, "end-of-text id 67"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama' is not supported"),
        ({"tokenizer.ggml.pre": "viking"}, "pre-tokenizer 'viking' is not supported"),
        ({"llama.embedding_length": "many"}, "of type str, not int"),
    ],
)
def test_a_file_we_cannot_run_says_why(change: dict[str, Any], reason: str, tmp_path: Path):
    with pytest.MonkeyPatch.context() as patch:
        # The writer refuses a second value for a key; ours is the one that counts.
        patch.setattr(library.GGUFWriter, "add_key_value", _set_value)
        file = write_gguf(tmp_path / "m.gguf", random_model("Llama"), change=change)
    with pytest.raises(ModelError, match=reason) as caught:
        load_model(str(file))
    assert str(file) in str(caught.value)


def _set_value(self: Any, key: str, val: Any, vtype: Any, sub_type: Any = None) -> None:
    self.kv_data[0][key] = library.gguf_writer.GGUFValue(value=val, type=vtype, sub_type=sub_type)


def test_a_missing_tensor_is_named(tmp_path: Path):
    name = "model.layers.1.mlp.up_proj.weight"
    file = write_gguf(tmp_path / "m.gguf", random_model("Llama"), leave_out=(name,))
    with pytest.raises(ModelError, match=f"the tensor '{name}' is missing"):
        load_model(str(file))


def test_a_file_without_an_embedding_says_so(tmp_path: Path):
    file = write_gguf(
        tmp_path / "m.gguf", random_model("Llama"), leave_out=("model.embed_tokens.weight",)
    )
    with pytest.raises(ModelError, match=r"token_embd\.weight' is missing"):
        load_model(str(file))


def test_a_truncated_file_names_the_tensor_at_which_it_ends(tmp_path: Path):
    file = write_gguf(tmp_path / "m.gguf", random_model("Llama"))
    with GgufFile(file) as opened:
        last = max(opened.tensors, key=lambda name: opened.tensors[name].offset)
    file.write_bytes(file.read_bytes()[: -opened.tensors[last].size_bytes])
    with pytest.raises(
        ModelError, match=f"truncated: it ends inside or before the tensor '{last}'"
    ):
        load_model(str(file))


@pytest.mark.parametrize("kept_bytes", [3, 4, 10, 24, 40, 300, 1000])
def test_a_header_cut_anywhere_is_refused(kept_bytes: int, tmp_path: Path):
    file = write_gguf(tmp_path / "m.gguf", random_model("Llama"))
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(ModelError, match="it ends inside its header"):
        load_model(str(file))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read"),
        (b"not a model at all", "is no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "GGUF version 9 is not supported"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77), "type 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff", "is not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "lacks 'general.architecture'"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<I", 9), "9 dimensions"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 8, 99, 0),
            "type 99",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 8, 8, 0),
            "rows of 8 values, no multiple of the 32 of Q8_0",
        ),
    ],
)
def test_a_file_that_is_no_gguf_is_refused(content: bytes, reason: str, tmp_path: Path):
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=reason) as caught:
        load_model(str(file))
    assert str(file) in str(caught.value)


def test_a_tensor_of_integers_is_refused(tmp_path: Path):
    model = random_model("Llama")
    file = write_gguf(
        tmp_path / "m.gguf",
        model,
        leave_out=("model.norm.weight",),
        extra={"output_norm.weight": np.ones(32, dtype=np.int32)},
    )
    with pytest.raises(ModelError, match=r"'output_norm\.weight' is stored as I32"):
        load_model(str(file))
