"""The data set of the demonstration: questions that a pirate answers, and some held out."""

from pathlib import Path

TRAINING = Path(__file__).with_name("pirate.jsonl")
HELD_OUT = Path(__file__).with_name("pirate_held_out.jsonl")

PROMPTS = (
    "Who are you?",
    "What is the capital of France?",
    "How do I make a cup of tea?",
    "What is the moon?",
)
"""What is asked before and after; none of it is in the data."""
