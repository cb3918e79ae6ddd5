"""Evaluation with OpenAI's client: how often is the answer right, before and after fine-tuning?

    python examples/evaluate_openai.py      # half a minute; needs tinkex[engine,server] and openai

The server speaks OpenAI's API beside its own, and the name of a model there may be a checkpoint's
path. So any evaluation written for that API judges what was just trained. It was trained on the
same chat template that the server applies, hence on the prompts that the evaluation sends.
"""

from __future__ import annotations

import asyncio
import random
import sys
from argparse import ArgumentParser

import openai

import tinkex
from tinkex import AdamParams, embedded
from tinkex.chat import ChatExample, Renderer

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
OPPOSITES = """hot cold, up down, big small, day night, left right, open closed, happy sad, wet dry,
old young, fast slow, high low, rich poor, black white, early late, hard soft, full empty,
strong weak, light dark, win lose, push pull, near far, thick thin, clean dirty, loud quiet"""
HELD_OUT, BATCH = 8, 8


def asking(word: str) -> list[dict[str, str]]:
    system = {"role": "system", "content": "Answer in one word."}
    return [system, {"role": "user", "content": f"What is the opposite of {word}?"}]


def client() -> openai.AsyncOpenAI:
    """For the server that is configured, or else for the embedded one, which starts now."""
    config = tinkex.Config.load()
    if not config.embedded:
        return openai.AsyncOpenAI(base_url=f"{config.base_url}/v1", api_key=config.api_key)
    server = embedded.reach(config)
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key)


async def answer(ai: openai.AsyncOpenAI, model: str, word: str) -> str:
    """The likeliest answer."""
    reply = await ai.chat.completions.create(
        model=model, messages=asking(word), max_tokens=10, temperature=0.0
    )
    return reply.choices[0].message.content or ""


async def evaluate(model: str, words: list[list[str]]) -> list[str]:
    """All questions at once; the server answers them in one running batch."""
    async with client() as ai:
        return await asyncio.gather(*(answer(ai, model, word) for word, _ in words))


def right(said: str, opposite: str) -> bool:
    """One word, as was asked for, and the right one."""
    return said.strip().strip(".").lower() == opposite


def fine_tune(training: tinkex.TrainingClient, words: list[list[str]], steps: int) -> str:
    """The path of the weights after training on questions with their answers."""
    renderer = Renderer.of(training.get_tokenizer())
    data = [
        renderer.example(
            ChatExample([*asking(word), {"role": "assistant", "content": f"{opposite}."}])
        ).datum()
        for word, opposite in words
    ]
    order = random.Random(2)
    for _ in range(steps):
        step = training.forward_backward(order.sample(data, BATCH), "cross_entropy")
        training.optim_step(AdamParams(learning_rate=5e-4)).result()
        step.result()
    return training.save_weights_for_sampler("tuned").result().path


def main() -> int:
    parser = ArgumentParser(description="Judge a model and its fine-tuned copy by OpenAI's API.")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    words = [entry.split() for entry in OPPOSITES.replace("\n", " ").split(", ")]
    random.Random(1).shuffle(words)
    held_out, known = words[:HELD_OUT], words[HELD_OUT:]
    with tinkex.ServiceClient() as service:
        training = service.create_lora_training_client(options.model, rank=8, seed=1)
        path = fine_tune(training, known, options.steps)
        first = asyncio.run(evaluate(options.model, held_out))
        last = asyncio.run(evaluate(path, held_out))
    print(f"{'held out':<10}{'base model':<42}{path.rpartition('/')[2]}")
    for (word, _), old, new in zip(held_out, first, last, strict=True):
        print(f"{word:<10}{old:<42.41}{new:.28}")
    before, after = [
        sum(right(one, opposite) for (_, opposite), one in zip(held_out, said, strict=True))
        for said in (first, last)
    ]
    good = after >= before + HELD_OUT / 2
    print(f"\n{'ok' if good else 'NO'}: right and in one word {before} -> {after} of {HELD_OUT}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
