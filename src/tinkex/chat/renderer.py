"""Messages and text to tokens and back, and which of the tokens are trained.

One renderer makes both what is trained and what is sampled with, so the two always agree: an
example begins with the prompt token by token, or it is refused.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from tinkex.chat.examples import ChatExample, CompletionExample, Rendered
from tinkex.chat.messages import is_trained, readable_messages
from tinkex.chat.turns import EARLIER_TURN, PROMPT, Turns, Written, check_beginning
from tinkex.clock import FixedDate, SystemClock
from tinkex.errors import ChatTemplateError, InputError, MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinkex.chat.examples import PreferenceExample
    from tinkex.chat.messages import Message
    from tinkex.chat.template import ChatTemplate
    from tinkex.clock import Clock
    from tinkex.tokenizers import Tokenizer

TrainOn = Literal["all", "last"]
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class Renderer:
    """Renders for one model; made with `Renderer.of`."""

    def __init__(self, tokenizer: Tokenizer, turns: Turns | None, train_on: TrainOn) -> None:
        self._tokenizer = tokenizer
        self._turns = turns
        self._train_on: TrainOn = train_on

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        *,
        train_on: TrainOn = "all",
        options: Mapping[str, Any] = _NO_OPTIONS,
        clock: Clock | None = None,
    ) -> Renderer:
        """The renderer of a model, by its tokenizer and the chat template that comes with it.

        `train_on` says whether all of an assistant's messages are trained or only the last.
        `options` are variables of the template's own, such as `enable_thinking`. A tokenizer
        without a template renders raw text only. Raises ChatTemplateError for a broken template.
        """
        if train_on not in ("all", "last"):
            raise InputError(f"is 'all' or 'last', not {train_on!r}", "train_on")
        template = _template_of(tokenizer)
        if template is None:
            return cls(tokenizer, None, train_on)
        clock = clock or SystemClock()
        # A template that writes the date must write the same one every time.
        still = FixedDate(clock, clock.wall())
        return cls(tokenizer, Turns(tokenizer, template, options, still), train_on)

    @property
    def has_template(self) -> bool:
        """Whether messages can be rendered, and not only text."""
        return self._turns is not None

    @property
    def stop(self) -> list[int]:
        """Tokens that end an assistant's message: the template's own, then the end of a text."""
        ends = (self._turns.end if self._turns else None, self._tokenizer.eos_token_id)
        return list(dict.fromkeys(token for token in ends if token is not None))

    def prompt(
        self, messages: Sequence[Message] | str, *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """What a sampler is given: messages with the beginning of an answer, or raw text."""
        if isinstance(messages, str):
            return list(self._tokenizer.encode(messages))
        return self._chat().asked(_plain(messages), tools).tokens

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones such as those that end a message."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def example(self, example: ChatExample | CompletionExample) -> Rendered:
        """The tokens to train on; raises InputError or ChatTemplateError for what cannot be."""
        if isinstance(example, ChatExample):
            return self._conversation(example.messages, example.tools)
        return self._completion(example.prompt, example.completion)

    def pair(self, pair: PreferenceExample) -> tuple[Rendered, Rendered]:
        """The chosen and the rejected answer to the same prompt; only the answers are trained."""
        chosen = self._answer(pair, pair.chosen, "chosen")
        return chosen, self._answer(pair, pair.rejected, "rejected")

    def _answer(
        self, pair: PreferenceExample, answer: Sequence[Message] | str, name: str
    ) -> Rendered:
        if isinstance(pair.prompt, str) and isinstance(answer, str):
            return self._completion(pair.prompt, answer, name)
        if isinstance(pair.prompt, str) or isinstance(answer, str):
            raise InputError("the prompt and the answers are all messages or all text", name)
        messages = [*pair.prompt, *answer]
        return self._conversation(messages, pair.tools, first=len(pair.prompt))

    def _completion(self, prompt: str, completion: str, name: str = "completion") -> Rendered:
        asked = Written(prompt, self.prompt(prompt))
        whole = Written(prompt + completion, self.prompt(prompt + completion))
        check_beginning(whole, asked, self._tokenizer.decode, name, PROMPT)
        tokens, end = whole.tokens, self._tokenizer.eos_token_id
        if end is not None and tokens[-1:] != [end]:
            tokens = [*tokens, end]
        return _rendered(tokens, [(len(asked.tokens), len(tokens))])

    def _conversation(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], first: int = 0
    ) -> Rendered:
        turns, plain = self._chat(), _plain(messages)
        turns.check(plain, tools)
        trained = self._trained(messages, first)
        # What follows the last trained message cannot influence it, so it is left out.
        whole = turns.answered(plain[: trained[-1] + 1], tools)
        spans = [self._span(plain, tools, index, whole, trained[-1]) for index in trained]
        return _rendered(whole.tokens, spans)

    def _trained(self, messages: Sequence[Message], first: int) -> list[int]:
        """The numbers of the messages to train, from `first` on."""
        numbered = [(i, is_trained(each, f"messages[{i}]")) for i, each in enumerate(messages)]
        found = [index for index, trained in numbered if trained and index >= first]
        if not found:
            raise InputError("no message of the assistant's is to be trained", "messages")
        return found[-1:] if self._train_on == "last" else found

    def _span(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        index: int,
        whole: Written,
        last: int,
    ) -> tuple[int, int]:
        """From where to where `whole` has the message `index`, the token that ends it included."""
        turns, where = self._chat(), f"messages[{index}]"
        asked = turns.asked(messages[:index], tools)
        decode = self._tokenizer.decode
        if index == last:
            check_beginning(whole, asked, decode, where, PROMPT)
            return len(asked.tokens), len(whole.tokens)
        answered = turns.answered(messages[: index + 1], tools)
        check_beginning(answered, asked, decode, where, PROMPT)
        check_beginning(whole, answered, decode, where, EARLIER_TURN)
        return len(asked.tokens), len(answered.tokens)

    def _chat(self) -> Turns:
        if self._turns is None:
            raise ChatTemplateError(
                "this model brings no chat template: train an instruct model, or write the data as "
                "prompt and completion"
            )
        return self._turns


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as a template sees them, without `weight`."""
    readable = readable_messages(messages)
    return [{name: value for name, value in each.items() if name != "weight"} for each in readable]


def _rendered(tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> Rendered:
    weights = [0.0] * len(tokens)
    for start, end in spans:
        weights[start:end] = [1.0] * (end - start)
    return Rendered(tuple(tokens), tuple(weights))


def _template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    source: Any = getattr(tokenizer, "chat_template", None)
    if isinstance(source, dict):  # several, by name
        source = source.get("default")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - transformers' own free-form dict
    if not isinstance(source, str):
        return None
    try:
        from tinkex.chat.template import ChatTemplate
    except ImportError as error:
        raise MissingPackageError("chat templates need jinja2", "'tinkex[tokenizers]'") from error
    return ChatTemplate(source, _marker(tokenizer, "bos"), _marker(tokenizer, "eos"))


def _marker(tokenizer: Tokenizer, role: Literal["bos", "eos"]) -> str | None:
    token = tokenizer.bos_token_id if role == "bos" else tokenizer.eos_token_id
    return None if token is None else tokenizer.decode([token])
