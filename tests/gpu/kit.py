"""Small random models on the GPU, operations on them, and the same model on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tinkex.engine.decoder import DecoderConfig
from tinkex.engine.lora import wrap
from tinkex.engine.models.families import family
from tinkex.engine.protocol import AdapterSpec, SampleOp, TrainOp, TrainResult, Weights
from tinkex.engine.sampler import LoraAdapters, Sampler, SamplerSettings
from tinkex.engine.training.trainer import Trainer
from tinkex.types import AdamOptimizerConfig, Datum, LoraConfig, ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.models.families import StoredDecoder
    from tinkex.engine.protocol import SampleResult

QWEN = DecoderConfig(
    name="test/qwen",
    arch="Qwen3ForCausalLM",
    vocab_size=5000,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    rms_eps=1e-6,
    rope_theta=1e6,
    rope_scaling=None,
    max_context=4096,
    tied_embeddings=True,
    attention_bias=False,
    qk_norm=True,
    eos_token_ids=(1,),
)
LLAMA = replace(
    QWEN,
    name="test/llama",
    arch="LlamaForCausalLM",
    num_heads=6,
    num_kv_heads=2,
    head_dim=128,
    qk_norm=False,
    tied_embeddings=False,
)
CONFIGS = {"qwen": QWEN, "llama": LLAMA}


def decoder(
    config: DecoderConfig, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> StoredDecoder:
    """Random weights: the same numbers, as bf16 rounds them, on every device."""
    made = family(config.arch, config.name)(config, dtype=dtype, device=torch.device(device))
    generator = torch.Generator().manual_seed(11)
    for _, slot in made.stored.named():
        noise = torch.randn(slot.shape, generator=generator)
        value = 1 + 0.1 * noise if slot.ndim == 1 else noise * (1.0 / slot.shape[-1]) ** 0.5
        slot.copy_(value.bfloat16())
    return made


def trainer(made: StoredDecoder, **kwargs: Any) -> Trainer:
    return Trainer(made, made.unembed_VD.device, made.unembed_VD.dtype, **kwargs)


def add(made: Trainer, model_id: str, rank: int, **lora: Any) -> LoraWeights:
    """Make an adapter whose B is not zero, the same numbers on every device."""
    made.create(
        AdapterSpec(
            model_id=model_id,
            base_model="test",
            lora=LoraConfig(rank=rank, **{"seed": rank, **lora}),
            optimizer=AdamOptimizerConfig(),
        )
    )
    adapter = made.adapters[model_id]
    old = adapter.weights
    generator = torch.Generator().manual_seed(rank)
    noise = torch.randn(old.flat_P.shape, generator=generator) * 0.02
    weights = wrap(old.config, old.lora, old.flat_P + noise.to(old.flat_P.device))
    made._adapters[model_id] = replace(adapter, weights=weights)
    return weights


def tokens(length: int, seed: int, vocab: int = QWEN.vocab_size) -> list[int]:
    return np.random.default_rng([seed, length]).integers(2, vocab, length).tolist()


def datum(ids: list[int], weights: float = 1.0) -> Datum:
    """Predict the sequence itself, token by token."""
    return Datum(
        ModelInput.from_ints(ids[:-1]),
        {
            "target_tokens": np.array(ids[1:]),
            "weights": np.full(len(ids) - 1, weights, np.float32),
        },
    )


def train_op(model_id: str, data: list[Datum], **fields: Any) -> TrainOp:
    return TrainOp(
        op_id=f"op-{model_id}", model_id=model_id, data=data, loss_fn="cross_entropy", **fields
    )


def run(made: Trainer, *ops: TrainOp) -> list[TrainResult]:
    """Train, and insist that every operation succeeds."""
    found = made.train(ops)
    for result in found:
        if isinstance(result, Exception):
            raise result
    return [result for result in found if isinstance(result, TrainResult)]


def logprobs(result: TrainResult) -> list[np.ndarray]:
    return [output["logprobs"].to_numpy() for output in result.output.loss_fn_outputs]


def sampler(
    made: StoredDecoder, versions: Mapping[str, LoraWeights | None], **settings: Any
) -> Sampler:
    chosen: dict[str, Any] = {"cache_tokens": 65_536, "pass_tokens": 2048, "max_sequences": 64}
    return Sampler(
        made,
        SamplerSettings(**(chosen | settings)),
        adapters=LoraAdapters(made, versions.__getitem__),
    )


def sample_op(
    prompt: Sequence[int], *, samples: int = 1, seed: int = 0, extra: Any = None, **params: Any
) -> SampleOp:
    chosen: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "stop": [], "seed": seed}
    return SampleOp(
        op_id=f"op{seed}",
        weights=Weights(base_model="test"),
        prompt=ModelInput.from_ints(list(prompt)),
        params=SamplingParams(**(chosen | params)),
        sequence_ids=[f"s{i}" for i in range(samples)],
        **(extra or {}),
    )


def drive(target: Sampler, ops: Sequence[tuple[str, SampleOp]]) -> list[SampleResult]:
    """Submit all at once and step to the end, checking the books."""
    runs = [target.submit(op, version=version) for version, op in ops]
    while not target.idle:
        target.step()
        target.check()
    for made in runs:
        if made.error is not None:
            raise made.error
    return [made.result for made in runs if made.result is not None]
