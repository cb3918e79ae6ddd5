"""PEFT's layout of an adapter: its two files, its configuration, the names of its tensors.

A feature of a configuration is refused where it changes what the adapter computes in a way that
`scale * B @ A`, added to the weight of one matrix, does not. How an adapter was trained, and on
which layers, does not matter here: its tensors say what there is.

PEFT calls tensors `base_model.model.<Hugging Face name>.lora_A.weight`. Archives of hosted Tinker
say `model.unembed_tokens` for the unembedding, which `lm_head` is elsewhere. Every spelling is
read; PEFT's is written.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from tinkex.errors import InputError, quoted, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"

UNEMBED: Final = "unembed"
ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")

_KEY: Final = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?"
    r"(?:layers\.(?P<layer>\d{1,6})\.(?:self_attn|mlp)\.(?P<name>[a-z]+_proj)"
    r"|(?P<head>lm_head|unembed_tokens))"
    r"\.lora_(?P<factor>[AB])(?:\.default)?\.weight"
)

# Initialisations that also change the base model, without which the adapter means nothing.
_CHANGES_BASE: Final = ("pissa", "olora", "loftq", "corda", "lora_ga")
_SWITCHES: Final = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "fan_in_fan_out",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "megatron_config",
)


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a PEFT configuration that decides what an adapter computes."""

    r: int
    lora_alpha: float = 8.0
    peft_type: str = "LORA"
    bias: str = "none"
    use_rslora: bool = False
    init_lora_weights: bool | str | None = True
    base_model_name_or_path: str | None = None

    @property
    def scale(self) -> float:
        """What B @ A is multiplied with."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def read_config(content: bytes) -> AdapterConfig:
    """The content of `adapter_config.json`, if an adapter like this can be used."""
    try:
        everything = msgspec.json.decode(content, type=dict[str, Any])
        config = msgspec.convert(everything, AdapterConfig)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(shortened(str(error)), CONFIG_FILE) from error
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8", CONFIG_FILE) from error
    for feature in _refused(config, everything):
        raise InputError(f"{feature} is not supported", CONFIG_FILE)
    return config


def _refused(config: AdapterConfig, everything: Mapping[str, Any]) -> list[str]:
    found = [name for name in _SWITCHES if everything.get(name)]
    if config.peft_type != "LORA":
        found.insert(0, f"peft_type {shortened(config.peft_type)}")
    if config.bias != "none":
        found.append(f"bias {quoted(config.bias)}")
    if str(config.init_lora_weights).startswith(_CHANGES_BASE):
        found.append(
            f"init_lora_weights {quoted(config.init_lora_weights)}, which changes the base,"
        )
    if config.r < 1:
        found.append(f"rank {quoted(config.r)}")
    return found


class LoraKey(NamedTuple):
    """The name of a tensor: one factor of one adapted matrix; the unembedding has no layer."""

    layer: int | None
    matrix: str
    factor: Literal["A", "B"]


def parse_key(key: str) -> LoraKey | None:
    """What a tensor is, by its name in any spelling; None for a matrix that is not adapted."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    factor: Literal["A", "B"] = "A" if found["factor"] == "A" else "B"
    if found["head"]:
        return LoraKey(None, UNEMBED, factor)
    if found["name"] not in (*ATTENTION, *MLP):
        return None
    return LoraKey(int(found["layer"]), found["name"], factor)


def module_name(matrix: str) -> str:
    """Hugging Face's name of a matrix inside its layer."""
    return f"{'self_attn' if matrix in ATTENTION else 'mlp'}.{matrix}"


def hugging_face_name(layer: int | None, matrix: str) -> str:
    """Hugging Face's name of an adapted matrix."""
    return "lm_head" if layer is None else f"model.layers.{layer}.{module_name(matrix)}"


def peft_key(key: LoraKey) -> str:
    """PEFT's name of a tensor."""
    return f"base_model.model.{hugging_face_name(key.layer, key.matrix)}.lora_{key.factor}.weight"


def target_modules(matrices: set[str]) -> list[str]:
    """How a PEFT configuration lists these matrices."""
    listed = [name for name in (*ATTENTION, *MLP) if name in matrices]
    return [*listed, "lm_head"] if UNEMBED in matrices else listed
