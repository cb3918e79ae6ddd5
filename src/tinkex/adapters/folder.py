"""A PEFT folder: what is in it, checked before anything is done with it.

Only safetensors are read. A `.bin` is a pickle, which runs whatever its maker wrote into it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tinkex.adapters.config import CONFIG_FILE, WEIGHTS_FILE, read_config
from tinkex.adapters.names import Place, peft_key, place_of, target_modules
from tinkex.adapters.tensor_header import read_tensors, rename_tensors
from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tinkex.adapters.config import AdapterConfig
    from tinkex.adapters.tensor_header import TensorInfo

MAX_CONFIG_BYTES = 1 << 20
_PICKLE = "adapter_model.bin"


@dataclass(frozen=True, slots=True)
class Adapter:
    """What the two files of an adapter say about it."""

    config: AdapterConfig
    tensors: Mapping[Place, TensorInfo]

    @property
    def parameters(self) -> int:
        """How many numbers it has."""
        return sum(tensor.count for tensor in self.tensors.values())


def read_adapter(folder: Path) -> Adapter:
    """The adapter in a folder; one that cannot be used is refused by what is wrong with it."""
    if not folder.is_dir():
        raise InputError("is no folder; give one with an adapter in PEFT's layout", str(folder))
    config_file, weights_file = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    if not weights_file.is_file() and any(folder.glob("*.age")):
        raise InputError("is encrypted; decrypt its files with age first", str(folder))
    if not config_file.is_file():
        raise InputError(f"has no {CONFIG_FILE}; is it an adapter in PEFT's layout?", str(folder))
    if not weights_file.is_file():
        raise _without_weights(folder)
    if config_file.stat().st_size > MAX_CONFIG_BYTES:
        raise InputError(f"has more than {MAX_CONFIG_BYTES} bytes", CONFIG_FILE)
    return check_adapter(read_config(config_file.read_bytes()), read_tensors(weights_file))


def _without_weights(folder: Path) -> InputError:
    if (folder / _PICKLE).exists():
        return InputError(
            f"is a pickle, which can run code when it is read; save the adapter again as "
            f"{WEIGHTS_FILE} (PEFT: save_pretrained(..., safe_serialization=True))",
            _PICKLE,
        )
    return InputError(f"has no {WEIGHTS_FILE}", str(folder))


def check_adapter(config: AdapterConfig, tensors: Mapping[str, TensorInfo]) -> Adapter:
    """Refuse tensors that are no adapter, or another one than the configuration describes."""
    places: dict[Place, TensorInfo] = {}
    for key, tensor in tensors.items():
        place = place_of(key)
        if place is None:
            raise InputError(f"{key} is not a matrix this engine adapts", WEIGHTS_FILE)
        if place in places:
            raise InputError(f"{key} is there under two names", WEIGHTS_FILE)
        places[place] = tensor
        _check_shape(key, place, tensor, config.r)
    if not places:
        raise InputError("holds no tensors", WEIGHTS_FILE)
    for place in places:
        other = place._replace(factor="B" if place.factor == "A" else "A")
        if other not in places:
            raise InputError(f"{peft_key(other)} is missing", WEIGHTS_FILE)
    return Adapter(config, places)


def _check_shape(key: str, place: Place, tensor: TensorInfo, rank: int) -> None:
    shape = tensor.shape
    if len(shape) != 2 or shape[0 if place.factor == "A" else 1] != rank:
        raise InputError(
            f"{key} has shape {shape}, which is not of rank {rank} as {CONFIG_FILE} says; one rank "
            "for all matrices is supported",
            WEIGHTS_FILE,
        )


def make_peft(folder: Path, base_model: str | None = None) -> Adapter:
    """Rewrite a downloaded adapter as PEFT reads it: names, modules, and the base model's name."""
    adapter = read_adapter(folder)
    weights = folder / WEIGHTS_FILE
    found = {key: place_of(key) for key in read_tensors(weights)}
    names = {key: peft_key(place) for key, place in found.items() if place is not None}
    if any(key != name for key, name in names.items()):
        rename_tensors(weights, folder / f".{WEIGHTS_FILE}", names)
        os.replace(folder / f".{WEIGHTS_FILE}", weights)
    _complete_config(folder / CONFIG_FILE, adapter, base_model)
    return adapter


def _complete_config(file: Path, adapter: Adapter, base_model: str | None) -> None:
    config: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    # Exactly what has tensors: words such as "all-linear" leave out the unembedding.
    config["target_modules"] = target_modules({place.matrix for place in adapter.tensors})
    config["base_model_name_or_path"] = base_model or adapter.config.base_model_name_or_path
    config.setdefault("task_type", "CAUSAL_LM")
    config.setdefault("peft_type", "LORA")
    file.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
