"""The toy model's adapters as PEFT files: its bias is a pair on the unembedding.

The toy has one hidden unit, which is always 1. So A has one row of note, and B, times the adapter's
scale, holds the bias in its first column. Written and read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tinkex.adapters.folder import read_adapter
from tinkex.adapters.peft_layout import CONFIG_FILE, UNEMBED, WEIGHTS_FILE, LoraKey
from tinkex.adapters.tensor_header import LENGTH, read_head
from tinkex.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from tinkex.engine.protocol import Layout

    Floats = npt.NDArray[np.float64]

_ALPHA = 32.0
_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


def write_toy(base_model: str, rank: int, bias: Floats, layout: Layout) -> dict[str, bytes]:
    """The two files of an adapter with this bias."""
    a, b = np.zeros((rank, 1), "<f4"), np.zeros((len(bias), rank), "<f4")
    a[0], b[:, 0] = 1.0, bias * (rank / _ALPHA)
    module = "lm_head" if layout == "peft" else "model.unembed_tokens"
    name = f"base_model.model.{module}"
    head: dict[str, object] = {}
    start = 0
    for key, value in ((f"{name}.lora_A.weight", a), (f"{name}.lora_B.weight", b)):
        end = start + value.nbytes
        head[key] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [start, end]}
        start = end
    packed = msgspec.json.encode(head)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": int(_ALPHA),
    }
    return {
        CONFIG_FILE: msgspec.json.encode(config),
        WEIGHTS_FILE: LENGTH.pack(len(packed)) + packed + a.tobytes() + b.tobytes(),
    }


def read_toy(folder: Path, base_model: str, vocab_size: int) -> tuple[int, Floats]:
    """Rank and bias of the adapter in a folder, if it is one of the toy's."""
    adapter = read_adapter(folder)
    for key, tensor in adapter.tensors.items():
        if key.matrix != UNEMBED:
            raise InputError(f"{base_model} has no {(key.layer, key.matrix)}", WEIGHTS_FILE)
        size = {"A": 1, "B": vocab_size}[key.factor]
        expected = [adapter.config.r, size] if key.factor == "A" else [size, adapter.config.r]
        if tensor.shape != expected:
            raise InputError(f"lm_head has shape {tensor.shape}, expected {expected}", WEIGHTS_FILE)
    a, b = (_numbers(folder, LoraKey(None, UNEMBED, factor), adapter) for factor in ("A", "B"))
    bias = (b @ a)[:, 0] * adapter.config.scale
    if not np.isfinite(bias).all():
        raise InputError("lm_head has values that are not finite", WEIGHTS_FILE)
    return adapter.config.r, bias


def _numbers(folder: Path, key: Any, adapter: Any) -> Floats:
    path = folder / WEIGHTS_FILE
    tensor = adapter.tensors[key]
    with path.open("rb") as file:
        read_head(file, path.stat().st_size)
        file.seek(tensor.data_offsets[0], 1)
        raw = file.read(tensor.data_offsets[1] - tensor.data_offsets[0])
    if tensor.dtype == "BF16":  # the upper half of a float32
        wide = np.frombuffer(raw, "<u2").astype("<u4") << 16
        return wide.view("<f4").reshape(tensor.shape).astype(np.float64)
    return np.frombuffer(raw, _DTYPES[tensor.dtype]).reshape(tensor.shape).astype(np.float64)
