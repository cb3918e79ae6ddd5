"""Rollouts in processes of their own: workers sample and score, the main process trains.

    python examples/rollout_processes.py      # seconds on the embedded server; needs its extras

A sampling client can be pickled. What travels names the sampler and never holds a key; the copy
reaches the server by itself. Worth it when scoring costs CPU time: running tests, parsing, proving.
The reward here is only the share of vowels.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from argparse import ArgumentParser
from concurrent.futures import ProcessPoolExecutor
from statistics import mean
from typing import NamedTuple

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SamplingClient, SamplingParams

MODEL = "tinkex/tiny"  # its ids below 256 are bytes, so text needs no tokenizer
VOWELS = set(b"aeiou")
PROMPTS = [list(b"sing: "), list(b"hum: "), list(b"call: "), list(b"shout: ")]
GROUP, LENGTH = 16, 16


class Rollout(NamedTuple):
    """One scored sample, as plain values that travel well."""

    tokens: list[int]
    logprobs: list[float]
    reward: float


class Done(NamedTuple):
    """What a worker hands back: a group of one prompt, and which process made it."""

    prompt: list[int]
    rollouts: list[Rollout]
    process: int


def reward(tokens: list[int]) -> float:
    return sum(token in VOWELS for token in tokens) / len(tokens)


def work(sampler: SamplingClient, prompt: list[int], seed: int) -> Done:
    """Runs in a worker: sample a group and score it."""
    params = SamplingParams(max_tokens=LENGTH, seed=seed)
    answer = sampler.sample(ModelInput.from_ints(prompt), GROUP, params).result()
    rollouts = [Rollout(s.tokens, s.logprobs or [], reward(s.tokens)) for s in answer.sequences]
    return Done(prompt, rollouts, os.getpid())


def datum(prompt: list[int], rollout: Rollout, advantage: float) -> Datum:
    """The sampled tokens carry the advantage; the prompt's positions carry nothing."""
    silent = len(prompt) - 1
    return Datum(
        model_input=ModelInput.from_ints([*prompt, *rollout.tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": [*prompt[1:], *rollout.tokens],
            "logprobs": [0.0] * silent + rollout.logprobs,
            "advantages": [0.0] * silent + [advantage] * len(rollout.tokens),
        },
    )


def batch(groups: list[Done]) -> list[Datum]:
    """A sample is judged against the others of its prompt."""
    data: list[Datum] = []
    for group in groups:
        middle = mean(one.reward for one in group.rollouts)
        data += [datum(group.prompt, one, one.reward - middle) for one in group.rollouts]
    return data


def main() -> int:
    parser = ArgumentParser(description="Roll out in several processes, train in this one.")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    rewards: list[float] = []
    processes: set[int] = set()
    spawn = multiprocessing.get_context("spawn")  # a forked child would share our connections
    with tinkex.ServiceClient() as service, ProcessPoolExecutor(options.workers, spawn) as pool:
        training = service.create_lora_training_client(options.model, rank=8, seed=1)
        for number in range(options.rounds):
            sampler = training.save_weights_and_get_sampling_client()
            count = len(PROMPTS)
            groups = list(pool.map(work, [sampler] * count, PROMPTS, [number] * count))
            step = training.forward_backward(batch(groups), "importance_sampling")
            training.optim_step(AdamParams(learning_rate=0.003)).result()
            step.result()
            processes |= {group.process for group in groups}
            rewards.append(mean(one.reward for group in groups for one in group.rollouts))
            print(f"round {number + 1:2}  share of vowels {rewards[-1]:.2f}", flush=True)
        here = work(sampler, PROMPTS[0], options.rounds - 1)
    checks = {
        f"share of vowels {rewards[0]:.2f} -> {rewards[-1]:.2f}": rewards[-1] > 5 * rewards[0],
        f"rollouts came from {len(processes)} other processes": os.getpid() not in processes,
        "the same seed gives the same rollouts here and there": (
            here.rollouts == groups[0].rollouts
        ),
    }
    for claim, holds in checks.items():
        print(f"{'ok' if holds else 'NO'}: {claim}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
