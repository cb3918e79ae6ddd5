"""On-policy distillation: a small adapter learns from a larger one by answering for itself.

    python examples/distill_smollm2.py      # a minute on two cores; needs tinkex[engine,server]

The student never sees an answer of the teacher's. It samples its own, the teacher says how likely
each of its tokens is, and the difference, the reverse KL, is the reward of that token.

Teacher and student must share a vocabulary. Here both adapt SmolLM2-135M, the teacher with rank 32
and shown answers, the student with rank 1: 32 times fewer parameters, not another model. Where a
server has a larger base model of the same family, `--teacher` names it.
"""

from __future__ import annotations

import random
import sys
from argparse import ArgumentParser
from dataclasses import dataclass

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SamplingClient, SamplingParams, TrainingClient
from tinkex.chat import ChatExample, Renderer

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
OPPOSITES = """hot cold, up down, big small, day night, left right, open closed, happy sad, wet dry,
old young, fast slow, high low, rich poor, black white, early late, hard soft, full empty,
strong weak, light dark, win lose, push pull, near far, thick thin, clean dirty, loud quiet"""
HELD_OUT, BATCH, GROUP, LENGTH = 8, 8, 2, 6
Prompts = list[list[int]]


@dataclass(frozen=True)
class Rollout:
    """What the student said, and how likely each token was to the student and to the teacher."""

    prompt: list[int]
    tokens: list[int]
    student: list[float]
    teacher: list[float]

    def datum(self) -> Datum:
        """Each token is rewarded by how much likelier it was to the teacher."""
        silent = [0.0] * (len(self.prompt) - 1)
        rewards = [t - s for s, t in zip(self.student, self.teacher, strict=True)]
        return Datum(
            ModelInput.from_ints([*self.prompt, *self.tokens[:-1]]),
            {
                "target_tokens": [*self.prompt[1:], *self.tokens],
                "logprobs": silent + self.student,
                "advantages": silent + rewards,
            },
        )


def asking(word: str) -> list[dict[str, str]]:
    system = {"role": "system", "content": "Answer in one word."}
    return [system, {"role": "user", "content": f"What is the opposite of {word}?"}]


def rollouts(
    student: SamplingClient, teacher: SamplingClient, prompts: Prompts, group: int, seed: int
) -> list[Rollout]:
    params = SamplingParams(max_tokens=LENGTH, seed=seed)
    waiting = [student.sample(ModelInput.from_ints(prompt), group, params) for prompt in prompts]
    said = [(p, s) for p, one in zip(prompts, waiting, strict=True) for s in one.result().sequences]
    scored = [teacher.compute_logprobs(ModelInput.from_ints([*p, *s.tokens])) for p, s in said]
    return [
        Rollout(p, s.tokens, s.logprobs or [], [value or 0.0 for value in one.result()[len(p) :]])
        for (p, s), one in zip(said, scored, strict=True)
    ]


def mean_kl(found: list[Rollout]) -> float:
    """An estimate of the reverse KL of an answer, in nats."""
    return sum(sum(one.student) - sum(one.teacher) for one in found) / len(found)


def step(
    training: TrainingClient, data: list[Datum], loss: tinkex.LossFnType, rate: float
) -> SamplingClient:
    """Train on a batch; a sampler of the new weights."""
    forward_backward = training.forward_backward(data, loss)
    training.optim_step(AdamParams(learning_rate=rate)).result()
    forward_backward.result()
    return training.save_weights_and_get_sampling_client()


def shown(renderer: Renderer, word: str, opposite: str) -> Datum:
    answer = {"role": "assistant", "content": f"{opposite}."}
    return renderer.example(ChatExample([*asking(word), answer])).datum()


def answers(sampler: SamplingClient, renderer: Renderer, prompts: Prompts) -> list[str]:
    """The likeliest ones, without regard to capitals and spaces."""
    greedy = SamplingParams(max_tokens=LENGTH, temperature=0.0)
    waiting = [sampler.sample(ModelInput.from_ints(prompt), 1, greedy) for prompt in prompts]
    return [renderer.text(one.result().sequences[0].tokens).strip().lower() for one in waiting]


def main() -> int:
    parser = ArgumentParser(description="A rank 1 adapter learns from one of rank 32.")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--teacher", help="a base model with the same vocabulary")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    options = parser.parse_args()
    words = [entry.split() for entry in OPPOSITES.replace("\n", " ").split(", ")]
    random.Random(1).shuffle(words)
    held_out, known, order = words[:HELD_OUT], words[HELD_OUT:], random.Random(2)
    with tinkex.ServiceClient() as service:
        training = service.create_lora_training_client(options.model, rank=1, seed=2)
        renderer = Renderer.of(training.get_tokenizer())
        if options.teacher:
            teacher = service.create_sampling_client(base_model=options.teacher)
        else:
            larger = service.create_lora_training_client(options.model, rank=32, seed=1)
            for _ in range(6):
                batch = [shown(renderer, *pair) for pair in order.sample(known, BATCH)]
                teacher = step(larger, batch, "cross_entropy", 5e-4)
        unseen = [renderer.prompt(asking(word)) for word, _ in held_out]
        prompts = [renderer.prompt(asking(word)) for word, _ in known]
        student = training.save_weights_and_get_sampling_client()
        before = mean_kl(rollouts(student, teacher, unseen, 4, seed=0))
        first, taught = [answers(one, renderer, unseen) for one in (student, teacher)]
        for number in range(1, options.rounds + 1):
            found = rollouts(student, teacher, order.sample(prompts, BATCH), GROUP, seed=number)
            print(f"round {number}/{options.rounds}  KL {mean_kl(found):5.2f}", flush=True)
            batch = [one.datum() for one in found]
            student = step(training, batch, "importance_sampling", options.learning_rate)
        after = mean_kl(rollouts(student, teacher, unseen, 4, seed=0))
        last = answers(student, renderer, unseen)
    print(f"\n{'held out':<10}{'student before':<31}{'after':<20}teacher")
    for (word, _), *said in zip(held_out, first, last, taught, strict=True):
        print("{:<10}{:<31.30}{:<20.19}{:.18}".format(word, *said))
    old, new = [sum(a == b for a, b in zip(x, taught, strict=True)) for x in (first, last)]
    checks = {
        f"reverse KL to the teacher {before:.2f} -> {after:.2f} nats an answer": 2 * after < before,
        f"says what the teacher says in {old} -> {new} of {HELD_OUT} answers": new > old,
    }
    print()
    for claim, holds in checks.items():
        print(f"{'ok' if holds else 'NO'}: {claim}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
