"""The engine's side: a trainer and a sampler on the real model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.engine_cpu.workload import LEARNING_RATE, RANK
from tinkex.config import DEFAULT_MODEL
from tinkex.engine.protocol import AdapterSpec, OptimOp, SampleOp, TrainOp, Weights
from tinkex.engine.sampler import Sampler, SamplerSettings
from tinkex.engine.training.trainer import Trainer
from tinkex.types import (
    AdamOptimizerConfig,
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    SamplingParams,
)

if TYPE_CHECKING:
    from benchmarks.engine_cpu.workload import Sequence
    from tinkex.engine.decoder import Decoder


class Training:
    """Adapters of one base model; every call is one step of each adapter that has data."""

    def __init__(self, decoder: Decoder, adapters: int, *, strict: bool = False) -> None:
        self._trainer = Trainer(decoder, strict=strict)
        self._ids = [f"adapter-{number}" for number in range(adapters)]
        for model_id in self._ids:
            self._trainer.create(
                AdapterSpec(
                    model_id=model_id,
                    base_model=DEFAULT_MODEL,
                    lora=LoraConfig(rank=RANK, seed=1),
                    optimizer=AdamOptimizerConfig(),
                )
            )

    def __call__(self, data: list[list[Sequence]]) -> float:
        """One `forward_backward` and one `optim_step` per adapter; returns the summed loss."""
        ops = [
            TrainOp(
                op_id=model_id,
                model_id=model_id,
                data=[
                    Datum(ModelInput.from_ints(tokens), {"target_tokens": targets})
                    for tokens, targets in own
                ],
                loss_fn="cross_entropy",
            )
            for model_id, own in zip(self._ids, data, strict=True)
        ]
        results = self._trainer.train(ops)
        params = AdamParams(learning_rate=LEARNING_RATE)
        steps = self._trainer.optim_step(
            [OptimOp(op_id=name, model_id=name, params=params) for name in self._ids]
        )
        total = 0.0
        for result, step in zip(results, steps, strict=True):
            for answer in (result, step):
                if isinstance(answer, Exception):
                    raise answer
            total += result.output.metrics["loss:sum"]
        return total


class Sampling:
    """The base model; every call samples all prompts together."""

    def __init__(self, decoder: Decoder, *, strict: bool = False) -> None:
        self._sampler = Sampler(decoder, SamplerSettings(cache_tokens=8192, strict=strict))

    def __call__(self, prompts: list[list[int]], new_tokens: int) -> int:
        """Sample at temperature 1 with log-probabilities; returns the number of tokens."""
        params = SamplingParams(max_tokens=new_tokens, temperature=1.0, stop=[], seed=1)
        runs = [
            self._sampler.submit(
                SampleOp(
                    op_id=f"prompt-{number}",
                    weights=Weights(base_model=DEFAULT_MODEL),
                    prompt=ModelInput.from_ints(prompt),
                    params=params,
                    sequence_ids=[f"prompt-{number}-0"],
                )
            )
            for number, prompt in enumerate(prompts)
        ]
        while not self._sampler.idle:
            self._sampler.step()
        count = 0
        for run in runs:
            if run.error is not None:
                raise run.error
            assert run.result is not None
            count += sum(len(found.tokens) for found in run.result.response.sequences)
        return count
