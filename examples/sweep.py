"""A sweep: eight adapters of different ranks and learning rates, trained at once on one base model.

    python examples/sweep.py      # seconds on the embedded server; needs tinkex[engine,server]

Every adapter gets its own training client. Their steps are all sent before any is waited for, so
the server computes them in the same passes over the base model. An adapter does not notice its
neighbours: the winner, trained once more by itself, ends with the same loss.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from dataclasses import dataclass, field
from itertools import product
from time import perf_counter
from typing import Any

import tinkex
from tinkex import AdamParams, APIFuture, Datum, ForwardBackwardOutput, ModelInput

MODEL = "tinkex/tiny"  # its ids below 256 are bytes, so text needs no tokenizer
RANKS = (2, 16)
LEARNING_RATES = (0.0003, 0.001, 0.003, 0.01)
TEXTS = [
    "rain on the roof and rain on the road",
    "wind in the wood and wind in the reeds",
    "snow on the roof and snow on the hill",
    "sun on the sea and sun on the sand",
]
HELD_OUT = ["rain on the hill and rain on the sea", "snow on the road and snow on the wood"]


@dataclass
class Trial:
    """One adapter: its settings, and the held-out loss per byte before and after training."""

    rank: int
    learning_rate: float
    training: tinkex.TrainingClient
    losses: list[float] = field(default_factory=list)
    sent: list[APIFuture[Any]] = field(default_factory=list)

    def step(self, data: list[Datum]) -> None:
        """Send a step; it runs after all that this adapter was sent before."""
        self.sent.append(self.training.forward_backward(data, "cross_entropy"))
        self.sent.append(self.training.optim_step(AdamParams(learning_rate=self.learning_rate)))

    def evaluate(self, data: list[Datum]) -> APIFuture[ForwardBackwardOutput]:
        return self.training.forward(data, "cross_entropy")

    def finish(self) -> None:
        """Wait for all steps; the first that failed raises its error."""
        for future in self.sent:
            future.result()


def datum(text: str) -> Datum:
    """Predict each byte of a text from those before it."""
    tokens = list(text.encode())
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def new_trial(service: tinkex.ServiceClient, model: str, rank: int, learning_rate: float) -> Trial:
    training = service.create_lora_training_client(model, rank=rank, seed=1)
    return Trial(rank, learning_rate, training)


def run(trials: list[Trial], steps: int) -> float:
    """Train all trials side by side; the seconds it took."""
    data, held_out = [datum(text) for text in TEXTS], [datum(text) for text in HELD_OUT]
    began = perf_counter()
    before = [trial.evaluate(held_out) for trial in trials]
    for _ in range(steps):
        for trial in trials:
            trial.step(data)
    after = [trial.evaluate(held_out) for trial in trials]
    for trial, first, last in zip(trials, before, after, strict=True):
        trial.finish()
        trial.losses = [per_byte(first), per_byte(last)]
    return perf_counter() - began


def per_byte(output: APIFuture[ForwardBackwardOutput]) -> float:
    return output.result().metrics["loss:sum"] / sum(len(text) - 1 for text in HELD_OUT)


def table(trials: list[Trial]) -> None:
    worst = max(trial.losses[-1] for trial in trials)
    print(f"{'rank':>4}  {'learning rate':>13}  held-out loss per byte")
    for trial in sorted(trials, key=lambda trial: trial.losses[-1]):
        bar = "#" * max(1, round(40 * trial.losses[-1] / worst))
        print(f"{trial.rank:>4}  {trial.learning_rate:>13g}  {trial.losses[-1]:.3f} {bar}")


def main() -> int:
    parser = ArgumentParser(description="Train eight adapters at once and find the best.")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with tinkex.ServiceClient() as service:
        settings = product(RANKS, LEARNING_RATES)
        trials = [new_trial(service, options.model, *one) for one in settings]
        seconds = run(trials, options.steps)
        best = min(trials, key=lambda trial: trial.losses[-1])
        alone = new_trial(service, options.model, best.rank, best.learning_rate)
        seconds_alone = run([alone], options.steps)
    table(trials)
    print(f"\n{len(trials)} adapters at once took {seconds:.1f} s, one alone {seconds_alone:.1f} s")
    first, last = best.losses
    gap = abs(alone.losses[-1] - last)
    checks = {
        f"rank {best.rank} at {best.learning_rate:g} is best: loss {first:.2f} -> {last:.2f}": (
            last < 0.7 * first
        ),
        # Exactly 0 on a server of ours; another one may round differently in a larger batch.
        f"by itself it learns the same: the loss differs by {gap:g}": gap < 0.01,
    }
    for claim, holds in checks.items():
        print(f"{'ok' if holds else 'NO'}: {claim}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
