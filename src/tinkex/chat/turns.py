"""A conversation as tokens, at each of its turns, by a model's own template and tokenizer.

Which tokens an assistant's message gets is found by rendering the conversation up to it and
including it, never by searching for markers in the text, which differ between templates.

A training example must begin, token by token, with what a sampler would be given; otherwise it
trains an answer to a prompt that is never used. The two differ when a template writes earlier turns
differently once more follow (most drop their thinking), when it begins an answer with something
that the answer lacks, or when tokens merge over the boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex.errors import ChatTemplateError, InputError, whole_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tinkex.chat.template import ChatTemplate
    from tinkex.clock import Clock
    from tinkex.tokenizers import Tokenizer

# A word that no template writes by itself.
_PROBE = "quokka"
_TOKENS_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Written:
    """A text and its tokens."""

    text: str
    tokens: list[int]


class Turns:
    """Renders conversations and knows what ends a message."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        options: Mapping[str, Any],
        clock: Clock,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._options = options
        self._clock = clock
        probe = self._probe()
        self.end = self._first_special(probe.text.rpartition(_PROBE)[2])
        """The token that ends an assistant's message; None where the template writes only text."""
        special = sorted({token for token in probe.tokens if self._is_special(token)})
        self._markers = [tokenizer.decode([token]) for token in special]

    def asked(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> Written:
        """What a sampler is given: the conversation and the beginning of an answer."""
        return self._write(messages, tools, add_generation_prompt=True)

    def answered(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> Written:
        """The conversation up to what ends its last message, an assistant's."""
        whole = self._write(messages, tools, add_generation_prompt=False)
        closed = [at for at, token in enumerate(whole.tokens, 1) if token == self.end]
        return Written(whole.text, whole.tokens[: closed[-1]] if closed else whole.tokens)

    def check(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> None:
        """Refuse what the template would drop, and text that would be taken for structure."""
        source = self._template.source
        if tools and "tools" not in source:
            raise ChatTemplateError("this model's chat template has no place for tools")
        for index, message in enumerate(messages):
            if message.get("tool_calls") and "tool_calls" not in source:
                raise ChatTemplateError(
                    f"messages[{index}].tool_calls: this model's chat template has no place for it"
                )
            self._check_text(message["content"], f"messages[{index}].content")

    def _check_text(self, text: str, path: str) -> None:
        found = next((marker for marker in self._markers if marker in text), None)
        if found is not None:
            raise InputError(
                f"contains {found}, which this model's template uses to tell messages apart; "
                "take it out of the text",
                path,
            )

    def _write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        *,
        add_generation_prompt: bool,
    ) -> Written:
        text = self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            options=self._options,
            tools=list(tools) or None,
            clock=self._clock,
        )
        tokens = self._tokenizer.encode(whole_text(text, "messages"), add_special_tokens=False)
        return Written(text, tokens)

    def _probe(self) -> Written:
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        return self._write(chat, (), add_generation_prompt=False)

    def _first_special(self, text: str) -> int | None:
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return next(filter(self._is_special, tokens), None)

    def _is_special(self, token: int) -> bool:
        decode = self._tokenizer.decode
        return decode([token], skip_special_tokens=True) == "" != decode([token])


@dataclass(frozen=True, slots=True)
class Difference:
    """The text that an example is compared with, and the advice where the two differ."""

    other: str
    advice: str


EARLIER_TURN = Difference(
    "what the model answers",
    "its template writes this message differently once others follow: train only on the last "
    'answer (train_on="last", --train-on last), or give each answer a line of its own',
)
PROMPT = Difference(
    "what the model is asked with",
    "its template begins an answer in another way than this one begins (with thinking, for "
    "example): write the answer as the model would",
)
_MERGED = (
    "tokens merge where the prompt ends: let the prompt end at the end of a word, and the answer "
    "begin with the space or line break between them"
)


def first_difference(whole: Sequence[int], beginning: Sequence[int]) -> int | None:
    """The first index at which `whole` differs from `beginning`; None if it begins with it."""
    if whole[: len(beginning)] == beginning:
        return None
    pairs = zip(whole, beginning, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(whole))


def check_beginning(
    whole: Written,
    beginning: Written,
    decode: Callable[[Sequence[int]], str],
    where: str,
    difference: Difference,
) -> None:
    """Raise ChatTemplateError where `whole` does not begin with `beginning`."""
    at = first_difference(whole.tokens, beginning.tokens)
    if at is None:
        return
    advice = _MERGED if whole.text.startswith(beginning.text) else difference.advice
    trained, other = (decode(one.tokens[at : at + _TOKENS_SHOWN]) for one in (whole, beginning))
    raise ChatTemplateError(
        f"{where}: at token {at} what is trained ({trained!r}) differs from {difference.other} "
        f"({other!r}); {advice}"
    )
