"""A small tokenizer whose tokens merge, and templates in the manners that models have."""

from __future__ import annotations

import functools
from typing import Any

import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from tinkex.tokenizers import FastTokenizer

SPECIALS = (
    "<|begin|>",
    "<|end_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|header|>",
    "<|/header|>",
    "<|eot|>",
)
BOS, EOS, IM_START, IM_END, HEADER, END_HEADER, EOT = range(7)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "\n{% else %}{{ m.content }}<|im_end|>\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# A text begins with a marker of its own, the day is written down, content is stripped.
HEADERS = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = 'Be kind.' %}{% set rest = messages %}"
    "{% endif %}<|header|>system<|/header|>Today is {{ strftime_now('%d %B') }}. {{ first }}<|eot|>"
    "{% for m in rest %}<|header|>{{ m.role }}<|/header|>\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>\n{% endif %}"
)

# Thinking is kept only after the last question; an answer without it gets an empty one.
THINKING = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>"
    "\n{% endif %}"
    "{% set last = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].replace('<think>', '').strip() "
    "if '</think>' in m.content else '' %}"
    "{% if loop.index0 > last.at %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)

# The prompt opens a thought that an answer of the data does not have.
OPENED = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

# A whole conversation also gets the end of a text.
CLOSED = (
    "{% for m in messages %}<|header|>{{ m.role }}<|/header|>{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>{% else %}{{ eos_token }}"
    "{% endif %}"
)

# Nothing but text between turns: "Bot: " ends in a space that merges with the word after it.
SPACED = (
    "{% for m in messages %}{{ 'Bot: ' if m.role == 'assistant' else 'Me: ' }}{{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}Bot: {% endif %}"
)

_CORPUS = (
    "hello there, how are you? I am well, thank you. What is the capital of France? Paris. "
    "Me: hello\nBot: hello there\nuser assistant system the cat sat on the mat and the dog too "
) * 4


@functools.cache
def _fast() -> tokenizers.Tokenizer:
    fast = tokenizers.Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator([_CORPUS], trainer)
    return fast


def theirs(template: str | None, **settings: Any) -> Any:
    """The tokenizer as `transformers` has it."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=_fast(),
        chat_template=template,
        bos_token=SPECIALS[BOS],
        eos_token=SPECIALS[EOS],
        **settings,
    )


def ours(template: str | None, **settings: Any) -> FastTokenizer:
    """The same without `transformers`."""
    special = {"bos_token": SPECIALS[BOS], "eos_token": SPECIALS[EOS]}
    return FastTokenizer("test", _fast(), {**special, "chat_template": template, **settings})


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Questions and answers in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns
