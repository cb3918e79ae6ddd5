"""A model in a GGUF file: configuration from its metadata, tensors under their usual names.

llama.cpp keeps the two halves of each rotary pair of a Llama next to each other, where
Hugging Face and we keep one half of the head after the other; rows of q and k are put back.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from tinkex.engine.decoder import DecoderConfig, RopeScaling
from tinkex.engine.models.families import Llama, family
from tinkex.engine.models.hf_config import check_config
from tinkex.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from tinkex.engine.models.gguf_file import GgufFile

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_PAIRED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")


def read_config(file: GgufFile, name: str) -> DecoderConfig:
    """Read a model's configuration from the metadata."""
    kind = file.get("general.architecture", str)
    made = family(kind, str(file.path))

    def number(key: str, default: int | None = None) -> int:
        value = file.get(f"{kind}.{key}", int, default)
        if value < 1:
            raise ModelError(f"{file.path}: '{kind}.{key}' in the metadata is {value}")
        return value

    heads, hidden = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", hidden // heads)
    if number("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{file.path}: rotating only a part of each head is not supported")
    eps = file.get(f"{kind}.attention.layer_norm_rms_epsilon", float)
    return check_config(
        DecoderConfig(
            name=name,
            arch=made.arch,
            vocab_size=_vocab_size(file),
            hidden_size=hidden,
            intermediate_size=number("feed_forward_length"),
            num_layers=number("block_count"),
            num_heads=heads,
            num_kv_heads=number("attention.head_count_kv", heads),
            head_dim=head_dim,
            # Stored as float32; the number that was meant is the short one that rounds to it.
            rms_eps=float(f"{eps:.7g}"),
            rope_theta=file.get(f"{kind}.rope.freq_base", float, 10_000.0),
            rope_scaling=_scaling(file, kind),
            max_context=number("context_length"),
            tied_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            qk_norm=made.qk_norm,
            eos_token_ids=_eos(file),
        ),
        str(file.path),
    )


class GgufTensors:
    """The tensors of a GGUF file under Hugging Face names."""

    def __init__(self, file: GgufFile, config: DecoderConfig) -> None:
        self._file = file
        self._config = config
        self._gguf_name = {
            _hugging_face_name(name): name for name in file.tensors if name != _ROPE_FACTORS
        }

    def names(self) -> frozenset[str]:
        """Every tensor there is."""
        return frozenset(self._gguf_name)

    def where(self, name: str) -> str:
        """Name the file, and what the tensor is called in it."""
        stored = self._gguf_name.get(name, name)
        return str(self._file.path) + ("" if stored == name else f" ({stored})")

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the tensor's shape, or None when there is no such tensor."""
        stored = self._gguf_name.get(name)
        return None if stored is None else self._file.tensors[stored].shape

    def read(self, name: str) -> Tensor:
        """Return the tensor as float32."""
        stored = self._gguf_name[name]
        tensor = torch.as_tensor(self._file.read(stored))
        paired = _PAIRED.fullmatch(stored)
        if paired is None or self._config.arch != Llama.arch:
            return tensor
        heads = self._config.num_heads if paired[1] == "q" else self._config.num_kv_heads
        pairs = tensor.view(heads, self._config.head_dim // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)


def _hugging_face_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{ending}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer is not None and layer[2] in _IN_LAYER:
        return f"model.layers.{layer[1]}.{_IN_LAYER[layer[2]]}.{ending}"
    return name


def _vocab_size(file: GgufFile) -> int:
    # The embedding decides: some files pad it beyond the tokens, and not all name a size.
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: the tensor 'token_embd.weight' is missing")
    return embedding.shape[0]


def _scaling(file: GgufFile, kind: str) -> RopeScaling | None:
    if _ROPE_FACTORS in file.tensors:
        factors = file.read(_ROPE_FACTORS)
        return RopeScaling(kind="factors", factors=tuple(float(factor) for factor in factors))
    named = file.get(f"{kind}.rope.scaling.type", str, "none")
    if named == "none":
        return None
    if named != "linear":
        raise ModelError(
            f"{file.path}: the rope scaling {named!r} is not supported; "
            "supported are none and linear"
        )
    return RopeScaling(kind="linear", factor=file.get(f"{kind}.rope.scaling.factor", float))


def _eos(file: GgufFile) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [file.get(key, int) for key in keys if key in file.metadata]
    return tuple(dict.fromkeys(found))
