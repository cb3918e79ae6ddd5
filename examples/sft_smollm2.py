"""Supervised fine-tuning on conversations: SmolLM2-135M talks like a pirate.

    python examples/sft_smollm2.py      # half a minute on two cores; needs tinkex[engine,server]

Messages become tokens by the model's own chat template, and only the assistant's are trained. It
learns from 28 capitals and is judged by 12 others, so what it learns is the manner of speaking.
"""

from __future__ import annotations

import random
import sys
from argparse import ArgumentParser
from itertools import groupby
from typing import TYPE_CHECKING, Any

import tinkex
from tinkex import AdamParams, ModelInput, SamplingParams
from tinkex.chat import ChatExample, Rendered, Renderer

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
HELD_OUT, BATCH = 12, 4  # capitals, conversations


class Task:
    """Conversations of two questions each, rendered for one model."""

    def __init__(self, tokenizer: Any) -> None:
        self.renderer = Renderer.of(tokenizer)
        self.tokenizer = tokenizer
        pairs = [entry.split() for entry in CAPITALS.replace("\n", " ").split(", ")]
        random.Random(1).shuffle(pairs)
        self.asked = [country for country, _ in pairs[:HELD_OUT]]
        examples = [self.example(pairs[at : at + 2]) for at in range(0, len(pairs), 2)]
        self.held_out, self.training = examples[: HELD_OUT // 2], examples[HELD_OUT // 2 :]

    def example(self, pairs: list[list[str]]) -> Rendered:
        messages: list[dict[str, str]] = []
        for country, city in pairs:
            answer = f"Arr! The capital o' {country} be {city}, matey!"
            messages += [question(country), {"role": "assistant", "content": answer}]
        return self.renderer.example(ChatExample(messages))

    def marked(self, example: Rendered) -> str:
        """An example as text, with what is trained in double brackets."""
        text = ""
        tokens = zip(example.tokens, example.weights, strict=True)
        for weight, group in groupby(tokens, key=lambda pair: pair[1]):
            part = self.tokenizer.decode([token for token, _ in group])
            text += f"[[{part}]]" if weight else part
        return text


def question(country: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is the capital of {country}?"}


def train(
    training: tinkex.TrainingClient, task: Task, steps: int, learning_rate: float
) -> Generator[float]:
    """The mean negative log-likelihood of a trained token, step by step."""
    order = random.Random(2)
    for _ in range(steps):
        batch = [example.datum() for example in order.sample(task.training, BATCH)]
        step = training.forward_backward(batch, "cross_entropy")
        training.optim_step(AdamParams(learning_rate=learning_rate)).result()
        yield nll(step)


def nll(step: tinkex.APIFuture[tinkex.ForwardBackwardOutput]) -> float:
    metrics = step.result().metrics
    return metrics["loss:sum"] / metrics["weights:sum"]


def held_out_nll(training: tinkex.TrainingClient, task: Task) -> float:
    return nll(training.forward([one.datum() for one in task.held_out], "cross_entropy"))


def answers(training: tinkex.TrainingClient, task: Task, count: int = 3) -> list[str]:
    sampler = training.save_weights_and_get_sampling_client()
    greedy = SamplingParams(max_tokens=20, temperature=0.0, stop=task.renderer.stop)
    prompts = [task.renderer.prompt([question(country)]) for country in task.asked[:count]]
    waiting = [sampler.sample(ModelInput.from_ints(prompt), 1, greedy) for prompt in prompts]
    return [task.renderer.text(one.result().sequences[0].tokens) for one in waiting]


def main() -> int:
    parser = ArgumentParser(description="SmolLM2-135M learns to talk like a pirate.")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--margin", type=float, default=0.9, help="by which held-out NLL must fall")
    options = parser.parse_args()
    with tinkex.ServiceClient() as service:
        training = service.create_lora_training_client(options.model, rank=options.rank, seed=1)
        task = Task(training.get_tokenizer())
        print(f"What is trained is in brackets:\n\n{task.marked(task.training[0])}\n")
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
