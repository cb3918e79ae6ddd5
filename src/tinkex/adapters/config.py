"""What `adapter_config.json` says, and which adapters are refused by the name of their feature.

A feature is refused where it changes what the adapter computes in a way that `scale * B @ A`, added
to the weight of one matrix, does not. How an adapter was trained, and on which layers, is nobody's
business here: its tensors say what there is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"

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
    except msgspec.MsgspecError as error:
        raise InputError(str(error), CONFIG_FILE) from error
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8", CONFIG_FILE) from error
    for feature in _refused(config, everything):
        raise InputError(f"{feature} is not supported", CONFIG_FILE)
    return config


def _refused(config: AdapterConfig, everything: Mapping[str, Any]) -> list[str]:
    found = [name for name in _SWITCHES if everything.get(name)]
    if config.peft_type != "LORA":
        found.insert(0, f"peft_type {config.peft_type}")
    if config.bias != "none":
        found.append(f"bias {config.bias!r}")
    if str(config.init_lora_weights).startswith(_CHANGES_BASE):
        found.append(f"init_lora_weights {config.init_lora_weights!r}, which changes the base,")
    if config.r < 1:
        found.append(f"rank {config.r}")
    return found
