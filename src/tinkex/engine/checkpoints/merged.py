"""A base model with an adapter folded in, as a folder that `transformers` loads.

A trained unembedding of a model with tied embeddings becomes a separate head: the input embedding
does not change.

Shapes: I inputs and O outputs of one matrix.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] -- its own stub

from tinkex.adapters.peft_layout import hugging_face_name
from tinkex.engine.checkpoints.peft import import_folder
from tinkex.engine.checkpoints.storage import write_atomically
from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from tinkex.engine.decoder import DecoderConfig, RopeScaling
    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.models.loader import BaseModel
    from tinkex.engine.models.tokenizer import ModelTokenizer

SHARD_BYTES: Final = 4 * 2**30
# Readable by other users and containers, unless the umask forbids it.
_MODE: Final = 0o666
_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = "model.embed_tokens.weight"
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


class NamedWeights(Protocol):
    """A base model's tensors under their Hugging Face names."""

    def named(self) -> Iterator[tuple[str, Tensor]]: ...


class _In:
    """A base model's tensors in another precision."""

    def __init__(self, base: NamedWeights, dtype: torch.dtype) -> None:
        self._base = base
        self._dtype = dtype

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor once, under its Hugging Face name."""
        for name, tensor in self._base.named():
            yield name, tensor.to(self._dtype)


def merged_tensors(base: NamedWeights, weights: LoraWeights) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the merged model, one at a time, in the base model's precision."""
    pairs = {
        f"{hugging_face_name(target.layer, target.matrix)}.weight": pair
        for target, pair in weights.named()
    }
    embedding: Tensor | None = None
    for name, tensor in base.named():
        embedding = tensor if name == _EMBEDDING else embedding
        pair = pairs.pop(name, None)
        yield name, tensor if pair is None else _merged(tensor, *pair, weights.scale)
    pair = pairs.pop(_HEAD, None)
    if pair is not None and embedding is not None:
        yield _HEAD, _merged(embedding, *pair, weights.scale)


def _merged(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    total_OI = weight_OI.float().addmm(b_OR.detach(), a_RI.detach(), alpha=scale)
    return total_OI.to(weight_OI.dtype)


def write_merged(
    folder: Path,
    base: NamedWeights,
    weights: LoraWeights,
    model_type: str,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a folder that `transformers` loads; `extra_files` are those of the tokenizer.

    The configuration is written last, so an unfinished folder does not look like a model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tied = weights.config.tied_embeddings and not weights.lora.train_unembed
    dtype = next(tensor.dtype for _, tensor in base.named())
    config = hugging_face_config(weights.config, model_type, dtype, tied=tied)
    _write_tensors(folder, merged_tensors(base, weights))
    for name, content in (extra_files or {}).items():
        _write(folder / name, content)
    _write(folder / "config.json", msgspec.json.format(msgspec.json.encode(config), indent=2))


def _write_tensors(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write files of about `SHARD_BYTES`, and the index that says which tensor is where."""
    where: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(tensors), 1):
        file = f"model-{number:05}.safetensors"
        where |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
        write_atomically(folder / file, partial(_save, shard), mode=_MODE)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    _write(folder / "model.safetensors.index.json", msgspec.json.encode(index))


def _save(shard: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(shard, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # Its message is the system's own, such as a full disk.
        raise OSError(str(error)) from error


def _shards(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        # Base tensors may be views of larger ones, which safetensors does not write.
        shard[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    yield shard


def hugging_face_config(
    config: DecoderConfig, model_type: str, dtype: torch.dtype, *, tied: bool
) -> dict[str, Any]:
    """The `config.json` that describes this model to `transformers`."""
    described: dict[str, Any] = {
        "architectures": [config.arch],
        "model_type": model_type,
        "attention_bias": config.attention_bias,
        "eos_token_id": list(config.eos_token_ids) or None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_context,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
    }
    if config.rope_scaling is not None:
        described["rope_scaling"] = _rope_scaling(config.rope_scaling)
    return described


def _rope_scaling(scaling: RopeScaling) -> dict[str, Any]:
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    if scaling.kind == "llama3":
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_context,
        }
    raise InputError(
        "this model's rotary frequencies come from a GGUF file and have no name in Hugging "
        "Face's format; export the adapter with PEFT's layout instead",
        "rope_scaling",
    )


def _write(path: Path, content: bytes) -> None:
    def write(file: Path) -> None:
        file.write_bytes(content)

    write_atomically(path, write, mode=_MODE)


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
