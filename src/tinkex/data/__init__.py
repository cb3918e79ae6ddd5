"""Training data from files: JSON Lines as examples, with every bad line reported at once."""

from tinkex.chat.examples import ChatExample, CompletionExample, PreferenceExample
from tinkex.data.jsonl import kind_of, read_examples
from tinkex.data.rendering import render_all, render_pairs

__all__ = [
    "ChatExample",
    "CompletionExample",
    "PreferenceExample",
    "kind_of",
    "read_examples",
    "render_all",
    "render_pairs",
]
