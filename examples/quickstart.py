"""Train a tiny model, sample before and after, save, resume.

    python examples/quickstart.py

Without settings it runs on the embedded server, which starts by itself and ends with the program.
"""

from __future__ import annotations

import string
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Generator

MODEL = "tinkex/tiny"  # ids below 256 are bytes, so text needs no tokenizer
STEPS = 20
TEXTS = ["the loop is yours", "the weights are too", "and this is only a test"]
LETTERS = set(string.ascii_lowercase.encode() + b" ")


class Show(Protocol):
    def __call__(self, step: int, loss: float) -> None: ...


def main() -> int:
    with tinkex.ServiceClient() as service:
        training = service.create_lora_training_client(MODEL, rank=8)
        data = [datum(text) for text in TEXTS]

        before = training.save_weights_and_get_sampling_client()
        losses = train(training, data)
        after = training.save_weights_and_get_sampling_client()

        print(f"\nsample before  {sample(before)}  (? = no character)")
        print(f"sample after   {sample(after)}\n")

        path = training.save_state("quickstart").result().path
        print(f"saved {path}")
        resumed = service.create_training_client_from_state_with_optimizer(path)
        same = next_step(training, data) == next_step(resumed, data)
        print(f"trained {service.usage().trained_tokens:,} tokens\n")

        return report(
            {
                f"loss fell from {losses[0]:.2f} to {losses[-1]:.2f} per token": (
                    losses[-1] < losses[0] / 2
                ),
                "the trained model writes letters, the untrained one did not": (
                    letters(before) < 0.2 and letters(after) > 0.8
                ),
                "a resumed run takes the same next step, bit for bit": same,
            }
        )


def datum(text: str) -> Datum:
    """Predict each byte of a text from those before it."""
    tokens = list(text.encode())
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def train(training: tinkex.TrainingClient, data: list[Datum]) -> list[float]:
    """Losses per token. A step is sent before the last one is read, so the server never waits."""
    tokens = sum(len(one.model_input) for one in data)
    losses: list[float] = []
    with progress() as show:
        ahead = None
        for step in range(STEPS + 1):
            behind, ahead = ahead, None
            if step < STEPS:
                ahead = training.forward_backward(data, "cross_entropy")
                training.optim_step(AdamParams(learning_rate=0.01))
            if behind is not None:
                losses.append(behind.result().metrics["loss:sum"] / tokens)
                show(step, losses[-1])
    return losses


def next_step(training: tinkex.TrainingClient, data: list[Datum]) -> tuple[float, float]:
    """One more step: its gradient norm, and the loss after it."""
    training.forward_backward(data, "cross_entropy")
    norm = (training.optim_step(AdamParams(learning_rate=0.01)).result().metrics or {})["grad_norm"]
    return norm, training.forward(data, "cross_entropy").result().metrics["loss:sum"]


def draw(sampler: tinkex.SamplingClient) -> list[int]:
    prompt = ModelInput.from_ints(list(b"the "))
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=7)
    return sampler.sample(prompt, 1, params).result().sequences[0].tokens


def sample(sampler: tinkex.SamplingClient) -> str:
    return repr("".join(chr(t) if 32 <= t < 127 else "?" for t in draw(sampler)))


def letters(sampler: tinkex.SamplingClient) -> float:
    """The share of sampled tokens that are letters or spaces."""
    tokens = draw(sampler)
    return sum(token in LETTERS for token in tokens) / len(tokens)


@contextmanager
def progress() -> Generator[Show]:
    """A moving bar in a terminal when `rich` is installed, plain lines everywhere else."""
    if not (sys.stdout.isatty() and find_spec("rich")):
        yield lambda step, loss: print(f"step {step:2}/{STEPS}  loss {loss:.3f}", flush=True)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("step {task.completed:2.0f}/{task.total}"), BarColumn(30))
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}")) as bar:
        task = bar.add_task("", total=STEPS, loss=float("nan"))
        yield lambda step, loss: bar.update(task, completed=step, loss=loss)


def report(checks: dict[str, bool]) -> int:
    for claim, holds in checks.items():
        print(f"{'ok' if holds else 'NO':<4}{claim}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
