"""Small models, data and a plain float64 reference for the training tests.

The reference shares nothing with the engine but the decoder: whole logits, whole attention
matrices, adapters merged into the weights, and autograd through all of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from tinkex.engine.decoder import DecoderConfig
from tinkex.engine.lora import wrap
from tinkex.engine.models.families import Llama, Qwen2, Qwen3, family
from tinkex.engine.protocol import AdapterSpec, OptimOp, TrainOp, TrainResult
from tinkex.engine.training.trainer import Trainer
from tinkex.types import AdamOptimizerConfig, AdamParams, Datum, LoraConfig, ModelInput

if TYPE_CHECKING:
    from tinkex.engine.models.families import StoredDecoder

# Tests share two cores: a second thread would mostly wait for its turn.
torch.set_num_threads(1)

CONFIG = DecoderConfig(
    name="test/small",
    arch=Llama.arch,
    vocab_size=97,
    hidden_size=32,
    # A multiple of 64, as real models have: torch computes silu in blocks of 32 numbers, and
    # what is left over differs in the last bits.
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    max_context=128,
    tied_embeddings=True,
    attention_bias=False,
    qk_norm=False,
    eos_token_ids=(0,),
)
QWEN = replace(
    CONFIG, name="test/qwen", arch=Qwen3.arch, qk_norm=True, tied_embeddings=False, head_dim=16
)
QWEN2 = replace(CONFIG, name="test/qwen2", arch=Qwen2.arch, attention_bias=True)


def decoder(config: DecoderConfig = CONFIG, dtype: torch.dtype = torch.float32) -> StoredDecoder:
    """A model of random weights, the same ones in every precision."""
    made = family(config.arch, config.name)(config, dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    for _, slot in made.stored.named():
        noise = torch.randn(slot.shape, generator=generator)
        # One-dimensional ones are norms and biases.
        slot.copy_(1 + 0.1 * noise if slot.ndim == 1 else noise * (2.0 / slot.shape[-1]) ** 0.5)
    return made


def trainer(config: DecoderConfig = CONFIG, **kwargs: Any) -> Trainer:
    return Trainer(decoder(config), **kwargs)


def add(made: Trainer, model_id: str, rank: int = 4, *, stir: bool = True, **lora: Any) -> None:
    """Make an adapter; `stir` gives it a B that is not zero, so that every path matters."""
    made.create(
        AdapterSpec(
            model_id=model_id,
            base_model=CONFIG.name,
            lora=LoraConfig(rank=rank, **{"seed": 1, **lora}),
            optimizer=AdamOptimizerConfig(),
        )
    )
    if stir:
        adapter = made.adapters[model_id]
        noise = torch.randn(adapter.weights.flat_P.shape, generator=_generator(rank)) * 0.05
        flat_P = adapter.weights.flat_P + noise
        weights = wrap(adapter.weights.config, adapter.weights.lora, flat_P)
        made._adapters[model_id] = replace(adapter, weights=weights)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(length: int, seed: int = 0, vocab: int = CONFIG.vocab_size) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, vocab, length).tolist()


def datum(length: int = 7, seed: int = 0, columns: int = 0, loss: str = "cross_entropy") -> Datum:
    """Random targets and inputs for a loss; `columns` makes them [N, K]."""
    rng = np.random.default_rng([seed, length, columns])
    shape = (length, columns) if columns else (length,)
    inputs: dict[str, Any] = {"target_tokens": rng.integers(0, CONFIG.vocab_size, shape)}
    if loss == "cross_entropy":
        inputs["weights"] = rng.normal(size=shape).astype(np.float32)
    else:
        inputs["logprobs"] = (-4.5 + rng.normal(size=shape)).astype(np.float32)
        inputs["advantages"] = rng.normal(size=shape).astype(np.float32)
    return Datum(ModelInput.from_ints(tokens(length, seed)), inputs)


def op(model_id: str, data: list[Datum], loss_fn: str = "cross_entropy", **fields: Any) -> TrainOp:
    return TrainOp(op_id=f"op-{model_id}", model_id=model_id, data=data, loss_fn=loss_fn, **fields)


def run(made: Trainer, *ops: TrainOp) -> list[TrainResult]:
    """Train, and insist that every operation succeeds."""
    results = made.train(ops)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [result for result in results if isinstance(result, TrainResult)]


def step(made: Trainer, model_id: str, **params: Any) -> dict[str, float]:
    found = made.optim_step(
        [OptimOp(op_id="step", model_id=model_id, params=AdamParams(**params))]
    )[0]
    if isinstance(found, Exception):
        raise found
    return found.metrics


def gradient(made: Trainer, model_id: str) -> torch.Tensor:
    found = made.adapters[model_id].gradient_P
    assert found is not None
    return found


class Reference:
    """One adapter's log-probabilities in float64, differentiable by `flat_P`."""

    def __init__(self, made: Trainer, model_id: str) -> None:
        weights = made.adapters[model_id].weights
        self.decoder = decoder(weights.config, torch.float64)
        self.flat_P = weights.flat_P.double().requires_grad_()
        self.weights = wrap(weights.config, weights.lora, self.flat_P)

    def logprobs(self, example: Datum) -> torch.Tensor:
        ids = example.model_input.to_ints()
        h_TD = self.decoder.hidden(
            torch.tensor(ids), torch.arange(len(ids)), self._attend, self._project
        )
        head = self._merged(self.decoder.unembed_VD, None, "unembed")
        logprobs_TV = (h_TD @ head.T).log_softmax(-1)
        targets = torch.from_numpy(example.loss_fn_inputs["target_tokens"].to_numpy().copy())
        square = targets if targets.ndim == 2 else targets[:, None]
        return logprobs_TV.gather(1, square).view(targets.shape)

    def _merged(self, weight: torch.Tensor, layer: int | None, name: Any) -> torch.Tensor:
        pair = self.weights.pair(layer, name)
        return weight if pair is None else weight + self.weights.scale * pair.b_OR @ pair.a_RI

    def _project(self, layer: int, names: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            F.linear(
                x,
                self._merged(self.decoder.stored.layers[layer].weights[name], layer, name),
                self.decoder.stored.layers[layer].biases.get(name),
            )
            for name in names
        )

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[2] ** 0.5
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, v).flatten(1)


def column(example: Datum, name: str) -> torch.Tensor:
    """An input of a datum in float64."""
    return torch.from_numpy(example.loss_fn_inputs[name].to_numpy().copy()).double()
