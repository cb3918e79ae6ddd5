"""A Hugging Face `config.json` as a `DecoderConfig`; unsupported features are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

from tinkex.engine.decoder import DecoderConfig, RopeScaling
from tinkex.engine.models.families import family
from tinkex.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"

_Size = Annotated[int, msgspec.Meta(gt=0)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Ids = int | list[int] | None
_S = TypeVar("_S", bound=msgspec.Struct)


class _Kind(msgspec.Struct, kw_only=True):
    # Read first, so that an unsupported model is refused by its name, not because of a field.
    architectures: list[str] | None = None
    model_type: str | None = None


class _Rope(msgspec.Struct, kw_only=True):
    rope_type: str | None = None
    type: str | None = None  # what older files call rope_type
    rope_theta: _Positive | None = None
    partial_rotary_factor: float = 1.0
    factor: _Positive = 1.0
    low_freq_factor: _Positive = 1.0
    high_freq_factor: _Positive = 4.0
    original_max_position_embeddings: _Size | None = None


class _Generation(msgspec.Struct, kw_only=True):
    eos_token_id: _Ids = None


class _Config(msgspec.Struct, kw_only=True):
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    rms_norm_eps: _Positive = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: _Size = 2048
    rope_theta: _Positive | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None  # transformers 5 writes both of the above here
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    quantization_config: dict[str, object] | None = None
    eos_token_id: _Ids = None


def read_config(folder: Path, name: str) -> DecoderConfig:
    """Read the configuration of the model in a Hugging Face folder."""
    file = folder / CONFIG
    kind = read_json(file, _Kind)
    made = family((kind.architectures or [kind.model_type or ""])[0], str(file))
    config = read_json(file, _Config)
    _refuse_unsupported(config, file)
    heads = config.num_attention_heads
    rope = config.rope_parameters or config.rope_scaling or _Rope()
    return check_config(
        DecoderConfig(
            name=name,
            arch=made.arch,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=config.num_key_value_heads or heads,
            head_dim=config.head_dim or config.hidden_size // heads,
            rms_eps=config.rms_norm_eps,
            rope_theta=rope.rope_theta or config.rope_theta or 10_000.0,
            rope_scaling=_scaling(rope, config, file),
            max_context=config.max_position_embeddings,
            tied_embeddings=config.tie_word_embeddings,
            attention_bias=made.always_biased or config.attention_bias,
            qk_norm=made.qk_norm,
            eos_token_ids=_eos(folder, config),
        ),
        str(file),
    )


def check_config(config: DecoderConfig, where: str) -> DecoderConfig:
    """Refuse shapes that do not fit together."""
    if config.head_dim < 2 or config.head_dim % 2:
        raise ModelError(f"{where}: the head size {config.head_dim} is not an even number")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{where}: {config.num_heads} attention heads cannot share "
            f"{config.num_kv_heads} key/value heads evenly"
        )
    bad = [token for token in config.eos_token_ids if not 0 <= token < config.vocab_size]
    if bad:
        raise ModelError(
            f"{where}: the end-of-text id {bad[0]} is not one of {config.vocab_size} ids"
        )
    return config


def read_json(file: Path, kind: type[_S]) -> _S:
    """Read one of the JSON files of a model, or say what is wrong with it."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: {error}") from error


def _refuse_unsupported(config: _Config, file: Path) -> None:
    refused = {
        f"the activation {config.hidden_act!r}": config.hidden_act != "silu",
        "mlp_bias": config.mlp_bias,
        "sliding-window attention": config.use_sliding_window,
        "a quantization_config": config.quantization_config is not None,
    }
    for feature, asked_for in refused.items():
        if asked_for:
            raise ModelError(f"{file}: {feature} is not supported")


def _scaling(rope: _Rope, config: _Config, file: Path) -> RopeScaling | None:
    if rope.partial_rotary_factor != 1.0:
        raise ModelError(f"{file}: partial_rotary_factor is not supported")
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.factor)
    if kind != "llama3":
        raise ModelError(
            f"{file}: the rope scaling {kind!r} is not supported; "
            "supported are default, linear and llama3"
        )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise ModelError(f"{file}: high_freq_factor must be above low_freq_factor")
    return RopeScaling(
        kind="llama3",
        factor=rope.factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        original_max_context=(
            rope.original_max_position_embeddings or config.max_position_embeddings
        ),
    )


def _eos(folder: Path, config: _Config) -> tuple[int, ...]:
    # Chat models often name more ends of a turn here than in config.json.
    ids = config.eos_token_id
    if (folder / _GENERATION_CONFIG).is_file():
        named = read_json(folder / _GENERATION_CONFIG, _Generation).eos_token_id
        ids = ids if named is None else named
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
