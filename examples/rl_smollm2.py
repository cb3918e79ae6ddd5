"""Reinforcement learning on a real model, on this machine: SmolLM2-135M learns to say yes or no.

    python examples/rl_smollm2.py      # a minute or two on two cores; needs tinkex[engine,server]

The base model rambles. An answer is worth 1 when it is the right word and nothing else; every round
publishes the weights, samples a group of answers per question, and trains on them.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams, TrainingClient

if TYPE_CHECKING:
    from collections.abc import Generator

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTIONS = {
    "Do birds have wings?": "yes",
    "Can a fish drive a car?": "no",
    "Do dogs bark?": "yes",
    "Can stones talk?": "no",
    "Do cows eat grass?": "yes",
    "Can a spoon sing?": "no",
    "Do fish swim?": "yes",
    "Can a tree run?": "no",
}
LENGTH, LAST = 6, 3  # tokens of an answer at most; rounds that are judged
PROMPT = "<|im_start|>user\n{} Answer yes or no.<|im_end|>\n<|im_start|>assistant\n"


class Round(NamedTuple):
    """What one round came to: the mean reward, and an answer to each question."""

    reward: float
    gap: float | None  # the largest difference between sampled and trained log-probabilities
    answers: list[str]


def reward(text: str, right: str) -> float:
    """An answer that was cut off has no end marker, so it is never right."""
    return float(text.lower() in (f"{right}<|im_end|>", f"{right}.<|im_end|>"))


def datum(prompt: list[int], sequence: SampledSequence, advantage: float) -> Datum:
    """The sampled tokens carry the advantage; the prompt's positions carry nothing."""
    tokens, logprobs = sequence.tokens, sequence.logprobs
    assert logprobs is not None
    silent = len(prompt) - 1
    return Datum(
        model_input=ModelInput.from_ints([*prompt, *tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": [*prompt[1:], *tokens],
            "logprobs": [0.0] * silent + logprobs,
            "advantages": [0.0] * silent + [advantage] * len(tokens),
        },
    )


def rollouts(
    sampler: tinkex.SamplingClient, tokenizer: Any, options: Namespace, seed: int
) -> tuple[list[Datum], list[float], list[str]]:
    """Training data, rewards, and one answer per question; a group's mean is its own baseline."""
    asked = list(QUESTIONS.items())[: options.questions]
    prompts = [tokenizer.encode(PROMPT.format(question)) for question, _ in asked]
    params = SamplingParams(max_tokens=LENGTH, seed=seed)
    waiting = [sampler.sample(ModelInput.from_ints(p), options.group, params) for p in prompts]
    data: list[Datum] = []
    rewards: list[float] = []
    answers: list[str] = []
    for prompt, (_, right), future in zip(prompts, asked, waiting, strict=True):
        sequences = future.result().sequences
        said = [tokenizer.decode(sequence.tokens) for sequence in sequences]
        scores = [reward(text, right) for text in said]
        middle = mean(scores)
        if 0 < middle < 1:  # where all are alike, there is nothing to learn
            data += [datum(prompt, s, r - middle) for s, r in zip(sequences, scores, strict=True)]
        rewards += scores
        answers.append(said[0])
    return data, rewards, answers


def train(training: TrainingClient, tokenizer: Any, options: Namespace) -> Generator[Round]:
    for number in range(options.rounds):
        sampler = training.save_weights_and_get_sampling_client()
        data, rewards, answers = rollouts(sampler, tokenizer, options, seed=number)
        gap = None
        if data:
            step = training.forward_backward(data, "importance_sampling")
            training.optim_step(AdamParams(learning_rate=options.learning_rate)).result()
            gap = step.result().metrics["logprob_gap_abs:max"]
        yield Round(mean(rewards), gap, answers)


def main() -> int:
    parser = ArgumentParser(description="SmolLM2-135M learns to answer yes or no.")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--group", type=int, default=8, help="answers per question")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--goal", type=float, default=0.8, help="mean reward of the last rounds")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    done: list[Round] = []
    with tinkex.ServiceClient() as service:
        training = service.create_lora_training_client(MODEL, rank=options.rank, seed=1)
        for one in train(training, training.get_tokenizer(), options):
            done.append(one)
            gap = "" if one.gap is None else f"logprob_gap {one.gap:.0e}"
            bar = "#" * round(40 * one.reward)
            print(f"round {len(done):2}  {one.reward:.2f} {bar:<40}  {gap}", flush=True)
    for question, old, new in zip(QUESTIONS, done[0].answers, done[-1].answers, strict=False):
        print(f"{question:<24} {old!r:.30} -> {new.removesuffix('<|im_end|>')!r:.20}")
    first, last = done[0].reward, mean(one.reward for one in done[-LAST:])
    learned = first < 0.3 and last > options.goal
    print(f"{'ok' if learned else 'NO'}: mean reward {first:.2f} -> {last:.2f}")
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
