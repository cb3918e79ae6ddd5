"""Reinforcement learning: sample in parallel, score, train with importance sampling.

    python examples/rl_loop.py

The reward is the share of vowels in a completion. Runs on the built-in fake server.
"""

from __future__ import annotations

import asyncio
import sys

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams
from tinkex.testing import API_KEY, FakeServer

VOWELS = set(b"aeiou")
PROMPTS = [list(b"sing: "), list(b"hum: "), list(b"call: ")]
ROUNDS, GROUP, LENGTH = 16, 16, 24


def reward(tokens: list[int]) -> float:
    return sum(token in VOWELS for token in tokens) / len(tokens)


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


async def rollouts(sampler: tinkex.SamplingClient, seed: int) -> tuple[list[Datum], float]:
    """All prompts at once; a completion is judged against the others of its prompt."""
    params = SamplingParams(max_tokens=LENGTH, seed=seed, stop=[])
    answers = await asyncio.gather(
        *(sampler.sample_async(ModelInput.from_ints(p), GROUP, params) for p in PROMPTS)
    )
    data: list[Datum] = []
    rewards: list[float] = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        scores = [reward(sequence.tokens) for sequence in answer.sequences]
        mean = sum(scores) / len(scores)
        rewards += scores
        for sequence, score in zip(answer.sequences, scores, strict=True):
            data.append(datum(prompt, sequence, score - mean))
    return data, sum(rewards) / len(rewards)


async def main() -> int:
    with FakeServer().serve() as server:
        async with tinkex.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            training = await service.create_lora_training_client_async("tinkex/tiny", rank=8)
            means: list[float] = []
            for number in range(ROUNDS):
                sampler = await training.save_weights_and_get_sampling_client_async()
                data, mean = await rollouts(sampler, seed=number)
                means.append(mean)
                step = training.forward_backward(data, "importance_sampling")
                update = training.optim_step(AdamParams(learning_rate=0.5))
                await step
                await update
                print(f"round {number + 1:2}/{ROUNDS}  reward {mean:.3f}")
    learned = means[-1] > 5 * max(means[0], 0.01)
    print(f"{'ok' if learned else 'NO'}: share of vowels {means[0]:.3f} -> {means[-1]:.3f}")
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
