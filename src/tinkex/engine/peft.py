"""Adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

Names are `base_model.model.<Hugging Face name>.lora_A.weight` and `...lora_B.weight`. The
unembedding is `lm_head`, which PEFT wraps without touching a tied input embedding; in the layout
of hosted Tinker's archives it is `model.unembed_tokens`. Either is read.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from tinkex.engine.lora import ALPHA, MAX_RANK, check_lora, initial, wrap
from tinkex.engine.lora.shapes import ATTENTION, MLP
from tinkex.errors import InputError
from tinkex.types import LoraConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from tinkex.engine.base import Layout
    from tinkex.engine.lora import LoraWeights, Target
    from tinkex.engine.models.base import DecoderConfig

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"

_HEADS: Final[Mapping[Layout, str]] = {"peft": "lm_head", "tinker": "model.unembed_tokens"}
_KEY: Final = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?"
    r"(?:layers\.(?P<layer>\d+)\.(?:self_attn|mlp)\.(?P<name>[a-z]+_proj)"
    r"|(?P<head>lm_head|unembed_tokens))"
    r"\.lora_(?P<factor>[AB])(?:\.default)?\.weight"
)


def hugging_face_name(target: Target) -> str:
    """The module that a target is in Hugging Face's models."""
    if target.layer is None:
        return _HEADS["peft"]
    group = "self_attn" if target.matrix in ATTENTION else "mlp"
    return f"model.layers.{target.layer}.{group}.{target.matrix}"


def export_peft(weights: LoraWeights, layout: Layout = "peft") -> dict[str, bytes]:
    """The files of a PEFT adapter, by name."""
    head = _HEADS.get(layout)
    if head is None:
        raise InputError(f"{layout!r} is unknown; there are {', '.join(_HEADS)}", "layout")
    tensors: dict[str, Tensor] = {}
    for target, pair in weights.named():
        name = head if target.layer is None else hugging_face_name(target)
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


class _Config(msgspec.Struct, kw_only=True):
    r: int
    lora_alpha: float = 8.0
    peft_type: str = "LORA"
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


def import_peft(files: Mapping[str, bytes], config: DecoderConfig, *, seed: int = 0) -> LoraWeights:
    """The adapter in these PEFT files.

    An adapter that covers only some matrices of a group (say q and v) gets the others as
    fresh ones, which add nothing until they are trained. Another `lora_alpha` is folded
    into B.
    """
    described = _described(files)
    tensors = _tensors(files)
    lora = LoraConfig(
        rank=described.r,
        seed=seed,
        train_attn=any(key[1] in ATTENTION for key in tensors),
        train_mlp=any(key[1] in MLP for key in tensors),
        train_unembed=any(key[0] is None for key in tensors),
    )
    try:
        check_lora(lora)
    except InputError as error:
        raise InputError(error.reason, f"{CONFIG_FILE}: r") from error
    weights = initial(config, lora, seed)
    factor = _scale(described) / weights.scale
    for target, pair in weights.named():
        name = hugging_face_name(target)
        for letter, into in zip("AB", pair, strict=True):
            found = tensors.pop((target.layer, target.matrix, letter), None)
            if found is not None:
                _fill(into, found if letter == "A" else found.float() * factor, name)
    if tensors:
        raise InputError(f"{config.name} has no {next(iter(tensors))[:2]}", WEIGHTS_FILE)
    return wrap(config, lora, weights.flat_P)


def _described(files: Mapping[str, bytes]) -> _Config:
    try:
        found = msgspec.json.decode(files[CONFIG_FILE], type=_Config)
    except KeyError:
        raise InputError("is missing", CONFIG_FILE) from None
    except msgspec.MsgspecError as error:
        raise InputError(str(error), CONFIG_FILE) from error
    refused = {
        f"peft_type {found.peft_type}": found.peft_type != "LORA",
        f"bias {found.bias!r}": found.bias != "none",
        "use_dora": found.use_dora,
        "fan_in_fan_out": found.fan_in_fan_out,
        "modules_to_save": bool(found.modules_to_save),
        "rank_pattern": bool(found.rank_pattern),
        "alpha_pattern": bool(found.alpha_pattern),
        f"rank {found.r}": not 1 <= found.r <= MAX_RANK,
    }
    for feature, asked_for in refused.items():
        if asked_for:
            raise InputError(f"{feature} is not supported", CONFIG_FILE)
    return found


def _scale(described: _Config) -> float:
    divisor = math.sqrt(described.r) if described.use_rslora else described.r
    return described.lora_alpha / divisor


def _tensors(files: Mapping[str, bytes]) -> dict[tuple[int | None, str, str], Tensor]:
    try:
        loaded: dict[str, Tensor] = load_bytes(files[WEIGHTS_FILE])
    except KeyError:
        raise InputError("is missing", WEIGHTS_FILE) from None
    except SafetensorError as error:
        raise InputError(f"cannot be read: {error}", WEIGHTS_FILE) from error
    found: dict[tuple[int | None, str, str], Tensor] = {}
    for key, tensor in loaded.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise InputError(f"{key} is not a matrix this engine adapts", WEIGHTS_FILE)
        if match["head"]:
            found[None, "unembed", match["factor"]] = tensor
        else:
            found[int(match["layer"]), match["name"], match["factor"]] = tensor
    return found


def _fill(into: Tensor, found: Tensor, name: str) -> None:
    if found.shape != into.shape:
        raise InputError(
            f"{name} has shape {list(found.shape)}, expected {list(into.shape)}", WEIGHTS_FILE
        )
    if not bool(torch.isfinite(found).all()):
        raise InputError(f"{name} has values that are not finite", WEIGHTS_FILE)
    into.copy_(found)


def read_folder(folder: Path) -> dict[str, bytes]:
    """The two files of a PEFT folder."""
    return {
        name: (folder / name).read_bytes()
        for name in (CONFIG_FILE, WEIGHTS_FILE)
        if (folder / name).is_file()
    }
