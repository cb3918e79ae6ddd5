"""Whatever people write: an example begins with the prompt, and exactly the answers are trained."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tinkex.chat import ChatExample, CompletionExample, Rendered, Renderer
from tinkex.data import read_examples
from tinkex.engine.models.tokenizer import byte_tokenizer
from tinkex.errors import DataError
from tinkex.tokenizers import FastTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

END = "<|im_end|>"


def tiny() -> FastTokenizer:
    import tokenizers

    made = byte_tokenizer()
    settings = {"eos_token": made.eos_token, "chat_template": made.chat_template}
    return FastTokenizer("tinkex/tiny", tokenizers.Tokenizer.from_str(made.json), settings)


TOKENIZER = tiny()
RENDERER = Renderer.of(TOKENIZER)
TEXTS = st.text(max_size=20).filter(lambda text: "<|" not in text)
TURNS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS), max_size=6)


def runs(rendered: Rendered) -> list[str]:
    pairs = zip(rendered.tokens, rendered.weights, strict=True)
    grouped = [(weight, list(run)) for weight, run in groupby(pairs, lambda pair: pair[1])]
    return [TOKENIZER.decode([token for token, _ in run]) for weight, run in grouped if weight]


@given(turns=TURNS, asked=TEXTS, answer=TEXTS)
@settings(deadline=None)
def test_exactly_the_answers_are_trained_and_each_follows_its_prompt(
    turns: list[tuple[str, str]], asked: str, answer: str
):
    every = [*turns, ("user", asked), ("assistant", answer)]
    messages = [{"role": role, "content": text} for role, text in every]
    made = RENDERER.example(ChatExample(messages))
    assert runs(made) == [text + END for role, text in every if role == "assistant"]
    for index, (role, _) in enumerate(every):
        if role == "assistant":
            prompt = RENDERER.prompt(messages[:index])
            assert list(made.tokens[: len(prompt)]) == prompt


@given(prompt=TEXTS, completion=TEXTS)
@settings(deadline=None)
def test_a_completion_is_trained_whole(prompt: str, completion: str):
    assume(prompt or completion)
    made = RENDERER.example(CompletionExample(prompt, completion))
    assert TOKENIZER.decode(made.tokens) == prompt + completion + "<|endoftext|>"
    assert made.weights.count(0.0) == len(prompt.encode())


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["messages", "prompt", "completion", "chosen", "rejected", "input", "tools", "role", "content"]
)
OBJECTS = st.dictionaries(
    NAMES, JSON | st.lists(st.dictionaries(NAMES, JSON, max_size=3), max_size=3), max_size=4
)


def lines_of(file: Path, kind: Any) -> list[int]:
    """The lines that became examples, or those that are refused: never another error."""
    try:
        return [example.line for example in read_examples(file, kind)]
    except DataError as error:
        return [problem.line for problem in error.problems]


@given(found=OBJECTS, kind=st.sampled_from(["sft", "preference"]))
@settings(deadline=None)
def test_any_object_is_an_example_or_a_problem(
    tmp_path_factory: pytest.TempPathFactory, found: Any, kind: Any
):
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    file.write_text(json.dumps(found) + "\n")
    assert lines_of(file, kind) == [1]


@given(line=st.binary(max_size=60))
@settings(deadline=None)
def test_any_bytes_are_problems_or_nothing(tmp_path_factory: pytest.TempPathFactory, line: bytes):
    file = tmp_path_factory.getbasetemp() / "bytes.jsonl"
    file.write_bytes(line)
    parts = line.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    lines = [number for number, each in enumerate(parts, 1) if each.strip()]
    assert lines_of(file, "sft") in (lines, [0])
