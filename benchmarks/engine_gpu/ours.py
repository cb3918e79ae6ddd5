"""What the engine does in each row of the table; every function returns seconds per round."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
import torch

from benchmarks.engine_gpu.shapes import random_tokens
from tinkex.engine.lora import initial
from tinkex.engine.protocol import AdapterSpec, OptimOp, SampleOp, TrainOp, Weights
from tinkex.engine.sampler import LoraAdapters, Sampler, SamplerSettings
from tinkex.engine.training.trainer import Trainer
from tinkex.errors import RequestFailedError
from tinkex.types import (
    AdamOptimizerConfig,
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    SamplingParams,
    TensorData,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.engine.decoder import DecoderConfig
    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.models.families import StoredDecoder

RANK = 32
LOGITS_BYTES = 1280 * 2**20
MODEL_ID = "bench"


def lora_config(*, unembed: bool = False, rank: int = RANK) -> LoraConfig:
    """Attention and MLP; the unembedding only where it is said."""
    return LoraConfig(rank=rank, seed=1, train_unembed=unembed)


def data(config: DecoderConfig, rows: int, length: int) -> list[Datum]:
    """Next-token training data."""
    return [
        Datum(
            model_input=ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": TensorData.from_numpy(np.array(tokens[1:], np.int64)),
                "weights": TensorData.from_numpy(np.ones(length, np.float32)),
            },
        )
        for tokens in random_tokens(config, rows, length + 1, seed=7)
    ]


class Training:
    """forward_backward and optim_step of one adapter."""

    def __init__(
        self, decoder: StoredDecoder, rows: int, length: int, *, strict: bool, unembed: bool = False
    ) -> None:
        self.trainer = Trainer(
            decoder,
            "cuda",
            torch.bfloat16,
            max_pass_tokens=rows * length,
            logits_bytes=LOGITS_BYTES,
            strict=strict,
        )
        self.trainer.create(
            AdapterSpec(
                model_id=MODEL_ID,
                base_model=decoder.config.name,
                lora=lora_config(unembed=unembed),
                optimizer=AdamOptimizerConfig(),
            )
        )
        self._op = TrainOp(
            op_id="train",
            model_id=MODEL_ID,
            data=data(decoder.config, rows, length),
            loss_fn="cross_entropy",
        )
        self._step = OptimOp(op_id="step", model_id=MODEL_ID, params=AdamParams(learning_rate=1e-4))

    def __call__(self) -> float:
        began = time.perf_counter()
        _only(self.trainer.train([self._op]))
        _only(self.trainer.optim_step([self._step]))
        torch.cuda.synchronize()
        return time.perf_counter() - began


class Sampling:
    """Requests of equal length from one or many adapters, all submitted at once."""

    def __init__(
        self,
        decoder: StoredDecoder,
        *,
        requests: int,
        prompt: int,
        generated: int,
        versions: Sequence[str] = ("base",),
        strict: bool = False,
    ) -> None:
        self._config = decoder.config
        self._weights = {name: _adapter(decoder, name) for name in versions}
        self.sampler = Sampler(
            decoder,
            SamplerSettings(
                cache_tokens=requests * (prompt + generated + 32),
                pass_tokens=8192,
                max_sequences=requests,
                strict=strict,
            ),
            adapters=LoraAdapters(decoder, self._weights.__getitem__),
        )
        self._shape = (requests, prompt, generated)
        self._round = 0

    def __call__(self) -> float:
        requests, prompt, generated = self._shape
        self._round += 1  # other prompts every time: the prefix cache must not help
        prompts = random_tokens(self._config, requests, prompt, seed=self._round)
        names = sorted(self._weights)
        began = time.perf_counter()
        runs = [
            self.sampler.submit(
                _sample_op(self._config.name, number, tokens, generated),
                version=names[number * len(names) // requests],
            )
            for number, tokens in enumerate(prompts)
        ]
        while not self.sampler.idle:
            self.sampler.step()
        torch.cuda.synchronize()
        spent = time.perf_counter() - began
        for run in runs:
            if run.result is None:
                raise run.error or AssertionError("a request has no result")
            assert run.result.generated_tokens == generated
        return spent


def publish(decoder: StoredDecoder) -> Callable[[], float]:
    """From a training adapter to the first sampled token with it, less an ordinary token."""
    config = decoder.config
    trainer = Trainer(decoder, "cuda", torch.bfloat16)
    trainer.create(
        AdapterSpec(
            model_id=MODEL_ID,
            base_model=config.name,
            lora=lora_config(unembed=True),
            optimizer=AdamOptimizerConfig(),
        )
    )
    versions: dict[str, LoraWeights] = {}
    sampler = Sampler(
        decoder,
        SamplerSettings(cache_tokens=4096, pass_tokens=1024, max_sequences=4),
        adapters=LoraAdapters(decoder, versions.__getitem__),
    )
    tokens = random_tokens(config, 1, 16, seed=3)[0]

    def sample(version: str) -> float:
        began = time.perf_counter()
        sampler.submit(_sample_op(config.name, 0, tokens, 1), version=version)
        while not sampler.idle:
            sampler.step()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    count = 0

    def once() -> float:
        nonlocal count
        count += 1
        began = time.perf_counter()
        versions[f"v{count}"] = trainer.weights(MODEL_ID)
        copied = time.perf_counter() - began
        first = sample(f"v{count}")
        again = min(sample(f"v{count}") for _ in range(3))
        versions.clear()
        return copied + max(first - again, 0.0)

    return once


def _adapter(decoder: StoredDecoder, name: str) -> LoraWeights | None:
    if name == "base":
        return None
    seed = crc32(name.encode())
    weights = initial(decoder.config, lora_config(), seed, device="cuda")
    # A fresh adapter has B = 0; these are to change the answer.
    generator = torch.Generator("cuda").manual_seed(seed)
    weights.flat_P.normal_(0.0, 0.01, generator=generator)
    return weights


def _sample_op(model: str, number: int, tokens: list[int], generated: int) -> SampleOp:
    return SampleOp(
        op_id=f"op{number}",
        weights=Weights(base_model=model),
        prompt=ModelInput.from_ints(tokens),
        params=SamplingParams(max_tokens=generated, temperature=1.0, seed=number, stop=[]),
        sequence_ids=[f"s{number}"],
    )


def _only(answers: Sequence[object]) -> object:
    (answer,) = answers
    if isinstance(answer, RequestFailedError):
        raise answer
    return answer
