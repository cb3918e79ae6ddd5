"""Models being trained: creating, describing and unloading them."""

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from tinkex.types.optimizers import (
    AdamOptimizerConfig,
    OptimizerConfigField,
    set_optimizer_config,
)
from tinkex.types.value import Int, Request, Response


class LoraConfig(Request):
    """Shape of the adapter to train, and which parts of the model it covers."""

    rank: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    seed: Int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelRequest(Request):
    """Start a training run."""

    session_id: str
    model_seq_id: Int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfigField = field(default_factory=AdamOptimizerConfig)
    type: Literal["create_model"] = "create_model"

    __post_init__ = set_optimizer_config


class CreateModelResponse(Response):
    """The id of a new model."""

    model_id: str
    type: Literal["create_model"] = "create_model"


class GetInfoRequest(Request):
    """Ask about a model."""

    model_id: str
    type: Literal["get_info"] = "get_info"


class ModelData(Response):
    """The base model of a run."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(Response):
    """What a model is."""

    type: Literal["get_info"] | None = None
    model_data: ModelData
    model_id: str
    optimizer_config: OptimizerConfigField = field(default_factory=AdamOptimizerConfig)
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None

    __post_init__ = set_optimizer_config


class UnloadModelRequest(Request):
    """Drop a model."""

    model_id: str
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(Response):
    """The model is gone."""

    model_id: str
    type: Literal["unload_model"] | None = None


class WeightsInfoResponse(Response):
    """What is needed to create a model from a checkpoint."""

    base_model: str
    optimizer_config: OptimizerConfigField = field(default_factory=AdamOptimizerConfig)
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None

    __post_init__ = set_optimizer_config


class SupportedModel(Response):
    """One base model a server offers."""

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


class GetServerCapabilitiesResponse(Response):
    """The base models a server offers."""

    supported_models: list[SupportedModel]
