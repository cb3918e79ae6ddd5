"""Adapters as files, made by hand: whatever a test wants to be wrong with them."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
HEAD = "base_model.model.lm_head"
VOCAB = 1024
"""Tokens of the fake engine's models, which have one hidden unit."""


def config(**changes: Any) -> bytes:
    return json.dumps(
        {
            "peft_type": "LORA",
            "base_model_name_or_path": "tinkex/tiny",
            "r": 2,
            "lora_alpha": 8,
            "target_modules": ["lm_head"],
            "bias": "none",
            **changes,
        }
    ).encode()


def weights(tensors: Mapping[str, Any] | None = None, **entry: Any) -> bytes:
    """A safetensors file; `entry` replaces what the head says of its first tensor."""
    found = pair() if tensors is None else tensors
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, array in found.items():
        end = start + array.nbytes
        head[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [start, end]}
        start = end
    if entry:
        head[next(iter(found))] |= entry
    packed = json.dumps(head).encode()
    body = b"".join(array.tobytes() for array in found.values())
    return struct.pack("<Q", len(packed)) + packed + body


def pair(module: str = HEAD, rank: int = 2, inputs: int = 1, outputs: int = VOCAB) -> dict:
    """The two factors of a matrix; B raises the first token alone."""
    a, b = np.ones((rank, inputs), "<f4"), np.zeros((outputs, rank), "<f4")
    b[0] = 1.0
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def files(**changes: bytes) -> dict[str, bytes]:
    return {CONFIG: changes.get("config", config()), WEIGHTS: changes.get("weights", weights())}


def write(folder: Path, **changes: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files(**changes).items():
        (folder / name).write_bytes(content)
    return folder


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
"""A matrix that real models have and the fake ones do not."""

BAD: dict[str, tuple[dict[str, bytes], str]] = {
    "truncated": ({"weights": weights()[:-100]}, "is cut off: 100 of"),
    "truncated in its head": ({"weights": weights()[:40]}, "cut off"),
    "empty": ({"weights": b""}, "no safetensors file"),
    "a pickle under the name of safetensors": (
        {"weights": b"\x80\x02}q\x00." + bytes(64)},
        "no safetensors file",
    ),
    "a head that never ends": ({"weights": struct.pack("<Q", 1 << 60) + b"{}"}, "head is longer"),
    "a head that is no JSON": ({"weights": struct.pack("<Q", 4) + b"{{{{"}, "damaged head"),
    "a head that is no text": ({"weights": struct.pack("<Q", 4) + b'"\xff\xff"'}, "damaged head"),
    "bytes that belong to nobody": ({"weights": weights() + b"more"}, "belong to no tensor"),
    "overlapping tensors": ({"weights": weights(data_offsets=[4, 12])}, "damaged"),
    "negative offsets": ({"weights": weights(data_offsets=[-8, 0])}, "damaged"),
    "a shape that is a lie": ({"weights": weights(shape=[2, 1 << 40])}, "damaged"),
    "integers": ({"weights": weights(dtype="I32")}, "stored as I32"),
    "no tensors": ({"weights": weights({})}, "holds no tensors"),
    "half a pair": (
        {"weights": weights({f"{HEAD}.lora_A.weight": np.ones((2, 1), "<f4")})},
        "lora_B.weight is missing",
    ),
    "twice the same matrix": (
        {"weights": weights({**pair(), **pair("base_model.model.model.unembed_tokens")})},
        "two names",
    ),
    "unknown tensors": (
        {"weights": weights({**pair(), "base_model.model.model.norm.weight": np.ones(1, "<f4")})},
        "base_model.model.model.norm.weight is not a matrix this engine adapts",
    ),
    "an embedding": (
        {"weights": weights(pair("base_model.model.model.embed_tokens"))},
        "is not a matrix this engine adapts",
    ),
    "other ranks per matrix": ({"weights": weights(pair(rank=3))}, "not of rank 2"),
    "dora": ({"config": config(use_dora=True)}, "use_dora is not supported"),
    "bias": ({"config": config(bias="all")}, "bias 'all' is not supported"),
    "lora bias": ({"config": config(lora_bias=True)}, "lora_bias is not supported"),
    "modules to save": (
        {"config": config(modules_to_save=["lm_head"])},
        "modules_to_save is not supported",
    ),
    "rank pattern": ({"config": config(rank_pattern={"q": 4})}, "rank_pattern is not supported"),
    "alpha pattern": ({"config": config(alpha_pattern={"q": 4})}, "alpha_pattern is not supported"),
    "tokens": (
        {"config": config(trainable_token_indices=[1])},
        "trainable_token_indices is not supported",
    ),
    "another method": ({"config": config(peft_type="IA3")}, "peft_type IA3 is not supported"),
    "a changed base": (
        {"config": config(init_lora_weights="pissa_niter_4")},
        "init_lora_weights 'pissa_niter_4', which changes the base, is not supported",
    ),
    "rank zero": ({"config": config(r=0)}, "rank 0 is not supported"),
    "no rank": ({"config": b'{"peft_type": "LORA"}'}, "missing required field `r`"),
    "a rank that is text": ({"config": config(r="two")}, "Expected `int`"),
    "an endless scale": ({"config": config().replace(b": 8,", b": 1e999,")}, "out of range"),
    "a configuration that is no JSON": ({"config": b"r: 2"}, "malformed"),
    "a configuration that is a list": ({"config": b"[]"}, "Expected `object`"),
}
"""What must be refused wherever it turns up, and words that the refusal has."""
