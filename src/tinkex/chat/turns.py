"""A conversation as tokens, at each of its turns, by a model's own template and tokenizer.

Which tokens an assistant's message gets is found by rendering the conversation up to it and
including it, never by looking for markers in the text: what stands there is the template's affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex.chat.messages import whole_text
from tinkex.errors import ChatTemplateError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinkex.chat.template import ChatTemplate
    from tinkex.clock import Clock
    from tinkex.tokenizers import Tokenizer

# A word that no template writes by itself.
_PROBE = "quokka"


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
