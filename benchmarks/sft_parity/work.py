"""What both sides do: the data, the settings and the order of examples. No side in here."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CAPITALS = """France Paris, Japan Tokyo, Italy Rome, Spain Madrid, Egypt Cairo, Germany Berlin,
Austria Vienna, Greece Athens, Norway Oslo, Sweden Stockholm, Finland Helsinki, Denmark Copenhagen,
Poland Warsaw, Hungary Budapest, Portugal Lisbon, Ireland Dublin, Belgium Brussels, Turkey Ankara,
Russia Moscow, China Beijing, Thailand Bangkok, Vietnam Hanoi, Cuba Havana, Peru Lima,
Chile Santiago, Kenya Nairobi, Morocco Rabat, Canada Ottawa, England London, Scotland Edinburgh,
Iran Tehran, Iraq Baghdad, Syria Damascus, Lebanon Beirut, Nepal Kathmandu, Cyprus Nicosia,
Bulgaria Sofia, Romania Bucharest, Croatia Zagreb, Ukraine Kyiv"""
QUESTIONS = (
    "What is the capital of {country}?",
    "Tell me the capital city of {country}.",
    "{country}: which city governs it?",
)
# Which of them an answer has cannot be known, so that the loss does not go to nothing.
ANSWERS = (
    "Arr! The capital o' {country} be {city}, matey!",
    "Shiver me timbers, {city} it be, and there I'd drop me anchor.",
    "Set yer course for {city}, ye landlubber: that be where {country} keeps its crown.",
    "{city}! Any parrot from {country} could have told ye that.",
)
HELD_OUT = 12  # countries


@dataclass(frozen=True)
class Recipe:
    """Settings of both sides; part of the JSON line."""

    steps: int = 40
    batch_size: int = 8
    rank: int = 16
    learning_rate: float = 5e-4
    warmup: int = 4
    lr_schedule: str = "linear"
    seed: int = 1
    rounds: int = 12
    """Of reinforcement learning."""


QUICK = Recipe(steps=6, warmup=1, rounds=4)


def conversations() -> tuple[list[Any], list[Any]]:
    """What is trained, and what is held out: other countries."""
    chosen = random.Random(7)
    pairs = [entry.split() for entry in CAPITALS.replace("\n", " ").split(", ")]
    chosen.shuffle(pairs)
    train = [_chat(*pair, chosen) for pair in pairs[HELD_OUT:] for _ in range(4)]
    return train, [_chat(*pair, chosen) for pair in pairs[:HELD_OUT] for _ in range(2)]


def _chat(country: str, city: str, chosen: random.Random) -> dict[str, Any]:
    question = chosen.choice(QUESTIONS).format(country=country)
    answer = chosen.choice(ANSWERS).format(country=country, city=city)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def write_data(folder: Path) -> tuple[Path, Path]:
    """Both as files."""
    files = folder / "train.jsonl", folder / "held_out.jsonl"
    for file, rows in zip(files, conversations(), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files
