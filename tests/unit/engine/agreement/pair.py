"""A trainer and samplers over one base model, asked the same questions in any batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.unit.engine.sampler.kit import answer, drive, op
from tests.unit.engine.training.kit import add, run
from tinkex.engine.protocol import TrainOp
from tinkex.engine.sampler import BASE, LoraAdapters, Sampler, SamplerSettings
from tinkex.engine.training.trainer import Trainer
from tinkex.types import Datum, ModelInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tinkex.engine.decoder import Decoder
    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.protocol import SampleResult, TrainResult

    Floats = NDArray[np.float32]

RANKS = {"r1": 1, "r3": 3, "r8": 8, "r33": 33}
"""Adapters by name: ranks that are no power of two, and the smallest."""


@dataclass(frozen=True)
class Asked:
    """A text and the weights it is scored with."""

    model_id: str
    tokens: list[int]


@dataclass
class Pair:
    decoder: Decoder
    strict: bool = True
    trainer: Trainer = field(init=False)

    def __post_init__(self) -> None:
        self.trainer = Trainer(self.decoder, strict=self.strict)
        for name, rank in RANKS.items():
            # Attention alone, or all that there is.
            add(self.trainer, name, rank, train_mlp=rank != 3, train_unembed=rank != 3)

    def weights(self, version: str) -> LoraWeights | None:
        return None if version == BASE else self.trainer.weights(version)

    def sampler(self, **settings: Any) -> Sampler:
        chosen: dict[str, Any] = {"cache_tokens": 4096, "strict": self.strict, **settings}
        adapters = LoraAdapters(self.decoder, self.weights)
        return Sampler(self.decoder, SamplerSettings(**chosen), adapters=adapters)

    def train(self, batch: Sequence[Asked], *, backward: bool) -> list[Floats]:
        """Log-probabilities by `forward` or `forward_backward`, in one batch of operations."""
        ops = [
            TrainOp(
                op_id=f"op-{number}",
                model_id=asked.model_id,
                data=[scored(asked.tokens)],
                loss_fn="cross_entropy",
                backward=backward,
            )
            for number, asked in enumerate(batch)
        ]
        return [logprobs(result) for result in run(self.trainer, *ops)]

    def score(self, batch: Sequence[Asked], **settings: Any) -> list[Floats]:
        """Log-probabilities of prompts, all submitted to one sampler at once."""
        sampler = self.sampler(**settings)
        runs = [
            sampler.submit(
                op(asked.tokens, op_id=f"op-{number}", max_tokens=1, extra=PROMPT),
                version=asked.model_id,
            )
            for number, asked in enumerate(batch)
        ]
        drive(sampler)
        found = [answer(one).response.prompt_logprobs_np for one in runs]
        return [np.asarray(values)[1:] for values in found]


PROMPT = {"prompt_logprobs": True}


def scored(tokens: Sequence[int]) -> Datum:
    """Every token but the first as a target."""
    targets = np.array(tokens[1:], np.int64)
    inputs = {"target_tokens": targets, "weights": np.ones(len(targets), np.float32)}
    return Datum(ModelInput.from_ints(list(tokens[:-1])), inputs)


def logprobs(result: TrainResult) -> Floats:
    (output,) = result.output.loss_fn_outputs
    return np.asarray(output["logprobs"].to_numpy())


def sampled(result: SampleResult, prompt: Sequence[int]) -> list[tuple[list[int], Floats]]:
    """Each sample's whole text, and the log-probabilities of what was generated."""
    return [
        ([*prompt, *sequence.tokens], np.asarray(sequence.logprobs, np.float32))
        for sequence in result.response.sequences
    ]
