"""A base model that is known but not loaded: its shape and its text without its weights.

For servers that offer models which may never be used. The weights of a hub model are downloaded on
first use; its description is downloaded at the start, so that a wrong name is detected there.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.engine.models.gguf import read_config as read_gguf_config
from tinkex.engine.models.gguf_file import GgufFile
from tinkex.engine.models.hf_config import read_config
from tinkex.engine.models.hub import hub_description, packaged_file
from tinkex.engine.models.loader import is_hub_id, load_model, not_found
from tinkex.engine.models.tokenizer import folder_tokenizer, gguf_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tinkex.engine.decoder import DecoderConfig
    from tinkex.engine.models.loader import BaseModel
    from tinkex.engine.models.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class DeferredModel:
    """The description of a model that is loaded on first use."""

    config: DecoderConfig
    tokenizer: ModelTokenizer | None
    device: torch.device
    load: Callable[[], BaseModel]


def defer_model(
    source: str, *, dtype: torch.dtype, device: torch.device, name: str | None = None
) -> DeferredModel | BaseModel:
    """A model that is loaded on first use, or the loaded model if it is made from a seed."""
    place = partial(load_model, dtype=dtype, device=device, name=name or source)
    path = _on_this_machine(source)
    if path is not None:
        return DeferredModel(*_described(path, name or source), device, partial(place, str(path)))
    if not is_hub_id(source):
        return place(source)  # made from a seed, or refused
    try:
        folder = hub_description(source)
    except OSError as error:
        raise not_found(source, error) from error
    return DeferredModel(*_described(folder, name or source), device, partial(place, source))


def _described(path: Path, name: str) -> tuple[DecoderConfig, ModelTokenizer | None]:
    if path.is_dir():
        return read_config(path, name), folder_tokenizer(path)
    with GgufFile(path) as file:
        return read_gguf_config(file, name), gguf_tokenizer(file)


def _on_this_machine(source: str) -> Path | None:
    """The folder or file of a model on this machine, without using the network."""
    try:
        if Path(source).exists():
            return Path(source)
    except (OSError, ValueError):  # no path at all
        return None
    return _cached_folder(source) or packaged_file(source)


def _cached_folder(source: str) -> Path | None:
    """The folder of the hub's cache, if the whole model is there."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        found = hub.try_to_load_from_cache(source, "model.safetensors")
    except (ImportError, ValueError):
        return None
    return Path(found).parent if isinstance(found, str) else None
