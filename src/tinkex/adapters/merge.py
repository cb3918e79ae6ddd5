"""Writing a base model with an adapter folded in, as a folder that `transformers` loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import torch

from tinkex.engine.checkpoints.merged import write_merged
from tinkex.engine.checkpoints.peft import import_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tinkex.engine.checkpoints.merged import NamedWeights
    from tinkex.engine.models.loader import BaseModel
    from tinkex.engine.models.tokenizer import ModelTokenizer

DtypeName = Literal["float32", "bfloat16", "float16"]
_DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# What belongs to a model besides its weights and its configuration.
_BESIDE: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def own_dtype(base: BaseModel) -> DtypeName:
    """The precision of a base model's own files; float32 where they do not say."""
    try:
        config = msgspec.json.decode((Path(base.origin) / "config.json").read_bytes())
        named = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    except (OSError, msgspec.MsgspecError, AttributeError):
        return "float32"
    return "bfloat16" if named == "bfloat16" else "float16" if named == "float16" else "float32"


def merged_bytes(base: BaseModel, dtype: DtypeName) -> int:
    """About how large the merged model's files are; a head of its own comes on top."""
    return sum(t.numel() for _, t in base.decoder.stored.named()) * _DTYPES[dtype].itemsize


def merge(base: BaseModel, adapter: Path, folder: Path, dtype: DtypeName) -> None:
    """Write base model and adapter as one model; sums are made in float32 and then rounded."""
    decoder = base.decoder
    weights = import_folder(adapter, decoder.config)
    kept = _In(decoder.stored, _DTYPES[dtype])
    write_merged(folder, kept, weights, decoder.model_type, _beside(base))


class _In:
    """A base model's tensors in another precision."""

    def __init__(self, base: NamedWeights, dtype: torch.dtype) -> None:
        self._base = base
        self._dtype = dtype

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor once, under its Hugging Face name."""
        for name, tensor in self._base.named():
            yield name, tensor.to(self._dtype)


def _beside(base: BaseModel) -> dict[str, bytes]:
    """The files of the tokenizer: the base model's own, or written from what it has."""
    origin = Path(base.origin)
    if origin.is_dir():
        return {n: (origin / n).read_bytes() for n in _BESIDE if (origin / n).is_file()}
    if base.tokenizer is None:
        return {}
    return _written(base.tokenizer)


def _written(tokenizer: ModelTokenizer) -> dict[str, bytes]:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
    }
    return {
        "tokenizer.json": tokenizer.json.encode(),
        "tokenizer_config.json": msgspec.json.format(msgspec.json.encode(settings), indent=2),
    }
