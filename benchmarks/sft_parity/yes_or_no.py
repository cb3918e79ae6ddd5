"""A task for `tinkex train rl`: the right word, and nothing else."""

from __future__ import annotations

RIGHT = {
    "Do birds have wings?": "yes",
    "Can a fish drive a car?": "no",
    "Do dogs bark?": "yes",
    "Can stones talk?": "no",
    "Do cows eat grass?": "yes",
    "Can a spoon sing?": "no",
    "Do fish swim?": "yes",
    "Can a tree run?": "no",
}
Message = dict[str, str]


def prompts() -> list[list[Message]]:
    """One question each."""
    return [[{"role": "user", "content": f"{each} Answer yes or no."}] for each in RIGHT]


def reward(prompt: list[Message], answer: str) -> float:
    """1 for the right word, with or without a full stop."""
    question = prompt[0]["content"].removesuffix(" Answer yes or no.")
    return float(answer.lower() in (RIGHT[question], f"{RIGHT[question]}."))
