"""On-policy distillation: a small adapter learns from a larger one by answering for itself.

    python examples/distill_smollm2.py      # a minute on two cores; needs tinkex[engine,server]

The student never sees an answer of the teacher's. It samples its own, the teacher says how likely
each of its tokens is, and the difference, the reverse KL, is the reward of that token.

Teacher and student must share a vocabulary. Here both adapt SmolLM2-135M, the teacher with rank 32
and trained on answers, the student with rank 1: 32 times fewer parameters, not another model. Where
a server has a larger base model of the same family, `--teacher` names it.
"""

from __future__ import annotations

import random
import sys
from argparse import ArgumentParser
from dataclasses import dataclass

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SamplingClient, SamplingParams
from tinkex.chat import ChatExample, Renderer

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
OPPOSITES = """hot cold, up down, big small, day night, left right, open closed, happy sad, wet dry,
old young, fast slow, high low, rich poor, black white, early late, hard soft, full empty,
strong weak, light dark, win lose, push pull, near far, thick thin, clean dirty, loud quiet"""
HELD_OUT, BATCH, GROUP, LENGTH = 8, 8, 2, 6


@dataclass(frozen=True)
class Rollout:
    """What the student said, and how likely each token was to the student and to the teacher."""

    prompt: list[int]
    tokens: list[int]
    student: list[float]
    teacher: list[float]

    @property
    def kl(self) -> float:
        """An estimate of the reverse KL of a whole answer, in nats."""
        return sum(self.student) - sum(self.teacher)

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
    question = f"What is the opposite of {word}?"
    return [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": question},
    ]


def rollouts(
    student: SamplingClient, teacher: SamplingClient, prompts: list[list[int]], group: int, seed: int
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
    return sum(one.kl for one in found) / len(found)


def trained_teacher(
    service: tinkex.ServiceClient, model: str, renderer: Renderer, words: list[list[str]]
) -> SamplingClient:
    """A large adapter that was shown the answers."""
    training = service.create_lora_training_client(model, rank=32, seed=1)
    order = random.Random(1)
    for _ in range(6):
        examples = [
            [*asking(word), {"role": "assistant", "content": f"{opposite.capitalize()}."}]
            for word, opposite in order.sample(words, BATCH)
        ]
        batch = [renderer.example(ChatExample(messages)).datum() for messages in examples]
        training.forward_backward(batch, "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-3))
    return training.save_weights_and_get_sampling_client()


def answers(sampler: SamplingClient, renderer: Renderer, prompts: list[list[int]]) -> list[str]:
    greedy = SamplingParams(max_tokens=LENGTH, temperature=0.0)
    waiting = [sampler.sample(ModelInput.from_ints(prompt), 1, greedy) for prompt in prompts]
    return [renderer.text(one.result().sequences[0].tokens) for one in waiting]


def main() -> int:
    parser = ArgumentParser(description="A rank 1 adapter learns from one of rank 32.")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--teacher", help="a base model with the same vocabulary")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()
    words = [entry.split() for entry in OPPOSITES.replace("\n", " ").split(", ")]
    random.Random(1).shuffle(words)
    held_out, known = words[:HELD_OUT], words[HELD_OUT:]
    with tinkex.ServiceClient() as service:
        training = service.create_lora_training_client(options.model, rank=1, seed=2)
        renderer = Renderer.of(training.get_tokenizer())
        if options.teacher:
            teacher = service.create_sampling_client(base_model=options.teacher)
        else:
            teacher = trained_teacher(service, options.model, renderer, known)
        unseen = [renderer.prompt(asking(word)) for word, _ in held_out]
        prompts = [renderer.prompt(asking(word)) for word, _ in known]
        student, order = training.save_weights_and_get_sampling_client(), random.Random(2)
        before, first = mean_kl(rollouts(student, teacher, unseen, 4, 0)), answers(student, renderer, unseen)
        for number in range(1, options.rounds + 1):
            found = rollouts(student, teacher, order.sample(prompts, BATCH), GROUP, number)
            training.forward_backward([one.datum() for one in found], "importance_sampling")
            training.optim_step(AdamParams(learning_rate=options.learning_rate))
            student = training.save_weights_and_get_sampling_client()
            print(f"round {number}/{options.rounds}  KL {mean_kl(found):.2f}", flush=True)
        after, last = mean_kl(rollouts(student, teacher, unseen, 4, 0)), answers(student, renderer, unseen)
        taught = answers(teacher, renderer, unseen)
    print(f"\n{'held-out word':<15}{'student before':<25}{'after':<20}teacher")
    for (word, _), *said in zip(held_out, first, last, taught, strict=True):
        print("{:<15}{!r:<25.24}{!r:<20.19}{!r:.19}".format(word, *said))
    agreed = [sum(a == b for a, b in zip(x, taught, strict=True)) for x in (first, last)]
    checks = {
        f"reverse KL to the teacher {before:.2f} -> {after:.2f} nats per answer": after < before / 2,
        f"says what the teacher says in {agreed[0]} -> {agreed[1]} of {HELD_OUT} answers": (
            agreed[1] > agreed[0]
        ),
    }
    print()
    for claim, holds in checks.items():
        print(f"{'ok' if holds else 'NO'}: {claim}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
