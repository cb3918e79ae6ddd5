"""Supervised fine-tuning of a real model, on this machine: SmolLM2-135M talks like a pirate.

    python examples/sft_smollm2.py      # half a minute on two cores; needs tinkex[engine,server]

It is trained on 28 capitals and judged by 12 others, so what it learns is the manner of speaking.
Without settings it runs on the embedded server; `make demo` runs this.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import TYPE_CHECKING, Any

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Generator

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CAPITALS = """France Paris, Japan Tokyo, Italy Rome, Spain Madrid, Egypt Cairo, Germany Berlin,
Austria Vienna, Greece Athens, Norway Oslo, Sweden Stockholm, Finland Helsinki, Denmark Copenhagen,
Poland Warsaw, Hungary Budapest, Portugal Lisbon, Ireland Dublin, Belgium Brussels, Turkey Ankara,
Russia Moscow, China Beijing, Thailand Bangkok, Vietnam Hanoi, Cuba Havana, Peru Lima,
Chile Santiago, Kenya Nairobi, Morocco Rabat, Canada Ottawa, England London, Scotland Edinburgh,
Iran Tehran, Iraq Baghdad, Syria Damascus, Lebanon Beirut, Nepal Kathmandu, Cyprus Nicosia,
Bulgaria Sofia, Romania Bucharest, Croatia Zagreb, Ukraine Kyiv"""
HELD_OUT, BATCH = 12, 8


class Task:
    """Questions with their answers as training data: only the tokens of an answer count."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        pairs = [entry.split() for entry in CAPITALS.replace("\n", " ").split(", ")]
        random.Random(1).shuffle(pairs)
        self.asked = [country for country, _ in pairs[:HELD_OUT]]
        self.held_out = [self.datum(*pair) for pair in pairs[:HELD_OUT]]
        self.training = [self.datum(*pair) for pair in pairs[HELD_OUT:]]

    def prompt(self, country: str) -> list[int]:
        text = f"<|im_start|>user\nWhat is the capital of {country}?<|im_end|>\n"
        return self.tokenizer.encode(text + "<|im_start|>assistant\n")

    def datum(self, country: str, city: str) -> Datum:
        prompt = self.prompt(country)
        answer = f"Arr! The capital o' {country} be {city}, matey!<|im_end|>"
        tokens = prompt + self.tokenizer.encode(answer)
        weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
        return Datum(
            ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights}
        )


def train(
    training: tinkex.TrainingClient, task: Task, steps: int, learning_rate: float
) -> Generator[float]:
    """The mean negative log-likelihood of an answer's token, step by step."""
    order = random.Random(2)
    for _ in range(steps):
        batch = order.sample(task.training, BATCH)
        step = training.forward_backward(batch, "cross_entropy")
        training.optim_step(AdamParams(learning_rate=learning_rate)).result()
        yield nll(step)


def nll(step: tinkex.APIFuture[tinkex.ForwardBackwardOutput]) -> float:
    metrics = step.result().metrics
    return metrics["loss:sum"] / metrics["weights:sum"]


def held_out_nll(training: tinkex.TrainingClient, task: Task) -> float:
    return nll(training.forward(task.held_out, "cross_entropy"))


def answers(training: tinkex.TrainingClient, task: Task, count: int = 3) -> list[str]:
    sampler = training.save_weights_and_get_sampling_client()
    greedy = SamplingParams(max_tokens=20, temperature=0.0)
    waiting = [
        sampler.sample(ModelInput.from_ints(task.prompt(country)), 1, greedy)
        for country in task.asked[:count]
    ]
    texts = [task.tokenizer.decode(one.result().sequences[0].tokens) for one in waiting]
    return [text.removesuffix("<|im_end|>") for text in texts]


def main() -> int:
    parser = argparse.ArgumentParser(description="SmolLM2-135M learns to talk like a pirate.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--margin", type=float, default=0.9, help="by which held-out NLL must fall")
    options = parser.parse_args()
    with tinkex.ServiceClient() as service:
        training = service.create_lora_training_client(MODEL, rank=options.rank, seed=1)
        task = Task(training.get_tokenizer())
        before, first = held_out_nll(training, task), answers(training, task)
        losses = train(training, task, options.steps, options.learning_rate)
        for number, loss in enumerate(losses, start=1):
            print(f"step {number:2}/{options.steps}  training NLL {loss:.3f}", flush=True)
        after, last = held_out_nll(training, task), answers(training, task)
    for country, old, new in zip(task.asked, first, last, strict=False):
        print(f"\nWhat is the capital of {country}?\n  before  {old:.70}\n  after   {new:.70}")
    fell = after < (1 - options.margin) * before
    print(f"\n{'ok' if fell else 'NO'}: held-out NLL {before:.2f} -> {after:.2f} per token")
    return 0 if fell else 1


if __name__ == "__main__":
    sys.exit(main())
