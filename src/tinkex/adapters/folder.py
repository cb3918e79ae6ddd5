"""A PEFT folder: what is in it, checked before anything is done with it.

Only safetensors are read. A `.bin` is a pickle, which can run code when it is loaded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tinkex.adapters.peft_layout import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoraKey,
    parse_key,
    peft_key,
    read_config,
    target_modules,
)
from tinkex.adapters.tensor_header import read_tensors, rename_tensors
from tinkex.errors import InputError, quoted, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tinkex.adapters.peft_layout import AdapterConfig
    from tinkex.adapters.tensor_header import TensorInfo

MAX_CONFIG_BYTES = 1 << 20
_PICKLE = "adapter_model.bin"


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What the two files of an adapter say about it."""

    config: AdapterConfig
    tensors: Mapping[LoraKey, TensorInfo]

    @property
    def parameters(self) -> int:
        """The number of its parameters."""
        return sum(tensor.count for tensor in self.tensors.values())


def read_adapter(folder: Path) -> AdapterInfo:
    """The adapter in a folder; raises InputError that says why one cannot be used."""
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


def check_adapter(config: AdapterConfig, tensors: Mapping[str, TensorInfo]) -> AdapterInfo:
    """Refuse tensors that are no adapter, or another one than the configuration describes."""
    found: dict[LoraKey, TensorInfo] = {}
    for name, tensor in tensors.items():
        key = parse_key(name)
        if key is None:
            raise InputError(f"{shortened(name)} is not a matrix this engine adapts", WEIGHTS_FILE)
        if key in found:
            raise InputError(f"{shortened(name)} is there under two names", WEIGHTS_FILE)
        found[key] = tensor
        shape = tensor.shape
        if len(shape) != 2 or shape[0 if key.factor == "A" else 1] != config.r:
            raise InputError(
                f"{shortened(name)} has shape {quoted(shape)}, which is not of rank "
                f"{quoted(config.r)} as {CONFIG_FILE} says; one rank for all matrices is supported",
                WEIGHTS_FILE,
            )
    if not found:
        raise InputError("holds no tensors", WEIGHTS_FILE)
    for key in found:
        other = key._replace(factor="B" if key.factor == "A" else "A")
        if other not in found:
            raise InputError(f"{peft_key(other)} is missing", WEIGHTS_FILE)
    return AdapterInfo(config, found)


def make_peft(folder: Path, base_model: str | None = None) -> AdapterInfo:
    """Rewrite a downloaded adapter as PEFT reads it: names, modules, and the base model's name."""
    adapter = read_adapter(folder)
    weights = folder / WEIGHTS_FILE
    parsed = {name: parse_key(name) for name in read_tensors(weights)}
    names = {name: peft_key(key) for name, key in parsed.items() if key is not None}
    if any(old != new for old, new in names.items()):
        rename_tensors(weights, folder / f".{WEIGHTS_FILE}", names)
        os.replace(folder / f".{WEIGHTS_FILE}", weights)
    _complete_config(folder / CONFIG_FILE, adapter, base_model)
    return adapter


def _complete_config(file: Path, adapter: AdapterInfo, base_model: str | None) -> None:
    config: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    # Exactly what has tensors: words such as "all-linear" leave out the unembedding.
    config["target_modules"] = target_modules({key.matrix for key in adapter.tensors})
    config["base_model_name_or_path"] = base_model or adapter.config.base_model_name_or_path
    config.setdefault("task_type", "CAUSAL_LM")
    config.setdefault("peft_type", "LORA")
    file.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
