"""Adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

Names are `base_model.model.<Hugging Face name>.lora_A.weight` and `...lora_B.weight`. The
unembedding is `lm_head`, which PEFT wraps without touching a tied input embedding; in the layout
of hosted Tinker's archives it is `model.unembed_tokens`. Either is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] -- its own stub
from safetensors.torch import save as save_bytes

from tinkex.adapters.folder import read_adapter
from tinkex.adapters.peft_layout import (
    ATTENTION,
    CONFIG_FILE,
    MLP,
    UNEMBED,
    WEIGHTS_FILE,
    LoraKey,
    hugging_face_name,
    parse_key,
)
from tinkex.engine.lora import ALPHA, check_lora, initial, wrap
from tinkex.engine.protocol import MAX_RANK
from tinkex.errors import InputError
from tinkex.types import LoraConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from tinkex.adapters.peft_layout import AdapterConfig
    from tinkex.engine.decoder import DecoderConfig
    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.protocol import Layout

_HEADS: Final[Mapping[Layout, str]] = {"peft": "lm_head", "tinker": "model.unembed_tokens"}


def export_peft(weights: LoraWeights, layout: Layout = "peft") -> dict[str, bytes]:
    """The files of a PEFT adapter, by name."""
    head = _HEADS.get(layout)
    if head is None:
        raise InputError(f"{layout!r} is unknown; there are {', '.join(_HEADS)}", "layout")
    tensors: dict[str, Tensor] = {}
    for target, pair in weights.named():
        name = head if target.layer is None else hugging_face_name(target.layer, target.matrix)
        module = f"base_model.model.{name}"
        for factor, tensor in zip("AB", pair, strict=True):
            # Views of one vector: safetensors wants memory of their own.
            tensors[f"{module}.lora_{factor}.weight"] = tensor.detach().cpu().clone()
    lora = weights.lora
    modules = [
        *(ATTENTION if lora.train_attn else ()),
        *(MLP if lora.train_mlp else ()),
        *((head.rpartition(".")[2],) if lora.train_unembed else ()),
    ]
    config = {
        "base_model_name_or_path": weights.config.name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(ALPHA),
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    return {
        CONFIG_FILE: msgspec.json.format(msgspec.json.encode(config), indent=2),
        WEIGHTS_FILE: save_bytes(tensors, {"format": "pt"}),
    }


def import_folder(folder: Path, config: DecoderConfig, *, seed: int = 0) -> LoraWeights:
    """The adapter in a PEFT folder.

    If an adapter covers only some matrices of a group (say q and v), the others are fresh ones,
    which add nothing until they are trained. Another `lora_alpha` is folded into B.
    """
    described = read_adapter(folder).config
    try:
        return _imported(described, load_file(folder / WEIGHTS_FILE), config, seed)
    except SafetensorError as error:
        raise InputError(f"cannot be read: {error}", WEIGHTS_FILE) from error


def _imported(
    described: AdapterConfig, loaded: Mapping[str, Tensor], config: DecoderConfig, seed: int
) -> LoraWeights:
    tensors = _by_key(loaded)
    lora = LoraConfig(
        rank=described.r,
        seed=seed,
        train_attn=any(key.matrix in ATTENTION for key in tensors),
        train_mlp=any(key.matrix in MLP for key in tensors),
        train_unembed=any(key.matrix == UNEMBED for key in tensors),
    )
    if described.r > MAX_RANK:
        raise InputError(f"rank {described.r} is not supported", CONFIG_FILE)
    try:
        check_lora(lora)
    except InputError as error:
        raise InputError(error.reason, WEIGHTS_FILE) from error
    weights = initial(config, lora, seed)
    factor = described.scale / weights.scale
    for target, pair in weights.named():
        name = hugging_face_name(target.layer, target.matrix)
        a = tensors.pop(LoraKey(target.layer, target.matrix, "A"), None)
        b = tensors.pop(LoraKey(target.layer, target.matrix, "B"), None)
        if a is not None:
            _fill(pair.a_RI, a, name)
        if b is not None:
            _fill(pair.b_OR, b.float() * factor, name)
    if tensors:
        raise InputError(f"{config.name} has no {next(iter(tensors))[:2]}", WEIGHTS_FILE)
    return wrap(config, lora, weights.flat_P)


def _by_key(loaded: Mapping[str, Tensor]) -> dict[LoraKey, Tensor]:
    found: dict[LoraKey, Tensor] = {}
    for name, tensor in loaded.items():
        key = parse_key(name)
        if key is None:
            raise InputError(f"{name} is not a matrix this engine adapts", WEIGHTS_FILE)
        found[key] = tensor
    return found


def _fill(into: Tensor, found: Tensor, name: str) -> None:
    if found.shape != into.shape:
        raise InputError(
            f"{name} has shape {list(found.shape)}, expected {list(into.shape)}", WEIGHTS_FILE
        )
    if not bool(torch.isfinite(found).all()):
        raise InputError(f"{name} has values that are not finite", WEIGHTS_FILE)
    into.copy_(found)
