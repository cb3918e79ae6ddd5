"""A chat: its models and their conversations, and the slash commands."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.cli import target as targets
from tinkex.cli.chat.speaker import Speaker, stream_all
from tinkex.cli.command_errors import CommandError, misuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinkex.cli.chat.speaker import ChatSampling, StartAnswer
    from tinkex.clients.service import ServiceClient

HELP = """\
/compare OTHER    show the answers of OTHER in a second column: a model, a path,
                  a run's folder, or `base` for the base model; `off` ends it
/reset            forget the conversation
/system TEXT      set the system message and start over; without TEXT remove it
/temperature T    sampling temperature; 0 is greedy
/save FILE        append the conversation to FILE, as a line of training data
/help             this list
/quit             leave; so does Ctrl-D
Ctrl-C stops an answer. Write // for a message that begins with a slash."""


class Leave(Exception):
    """The user leaves the chat."""


@dataclass(slots=True)
class Conversation:
    """The messages of a chat, an optional system message first."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def messages(self) -> list[dict[str, str]]:
        """All messages, as a chat template takes them."""
        first = [] if self.system is None else [_message("system", self.system)]
        return [*first, *self.turns]

    def asking(self, text: str) -> list[dict[str, str]]:
        """All messages and one more question."""
        return [*self.messages(), _message("user", text)]

    def add(self, question: str, answer: str) -> None:
        """Add a question and its answer."""
        self.turns += [_message("user", question), _message("assistant", answer)]

    def reset(self) -> None:
        """Remove all messages but the system message."""
        self.turns.clear()

    def copy(self) -> Conversation:
        """An independent copy."""
        return replace(self, turns=list(self.turns))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class ChatSession:
    """Models with their conversations; there is a second pair while two are compared."""

    def __init__(
        self, service: ServiceClient, first: Speaker, sampling: ChatSampling, system: str | None
    ) -> None:
        self._service = service
        # Mutable state: the pairs, and the sampling settings.
        self.pairs = [(first, Conversation(system))]
        self._sampling = sampling

    @property
    def names(self) -> list[str]:
        """The names of the models."""
        return [speaker.name for speaker, _ in self.pairs]

    def answers(self, question: str, texts: list[str]) -> Iterator[tuple[int, str | None]]:
        """The answers of all models, piece by piece; `texts` grows to the whole of each.

        However the iterator ends, the conversations keep the text up to then, unless it is empty.
        """
        texts[:] = [""] * len(self.pairs)
        try:
            for index, piece in stream_all([self._start(*pair, question) for pair in self.pairs]):
                texts[index] += piece or ""
                yield index, piece
        finally:
            for (_, conversation), text in zip(self.pairs, texts, strict=True):
                if text.strip():
                    conversation.add(question, text.strip())

    def _start(self, speaker: Speaker, conversation: Conversation, question: str) -> StartAnswer:
        messages = conversation.asking(question)
        return lambda on_piece: speaker.start(messages, self._sampling, on_piece)

    # -- commands -----------------------------------------------------------------------------

    def command(self, line: str) -> str:
        """Run a slash command; returns its message."""
        name, _, rest = line.removeprefix("/").partition(" ")
        run = self._commands().get(name.lower())
        if run is None:
            raise misuse(f"There is no /{name}", "/help lists the commands.")
        return run(rest.strip())

    def _commands(self) -> dict[str, Callable[[str], str]]:
        return {
            "compare": self._compare,
            "help": lambda _: HELP,
            "quit": _leave,
            "exit": _leave,
            "reset": self._reset,
            "save": self._save,
            "system": self._system,
            "temperature": self._temperature,
        }

    def _compare(self, other: str) -> str:
        if not other:
            raise misuse("/compare needs a model", "/compare MODEL, or /compare off")
        first, conversation = self.pairs[0]
        if other == "off":
            del self.pairs[1:]
            return f"Only {first.name} answers."
        target = first.base if other == "base" else targets.find(other)
        speaker = Speaker(self._service, target)
        # Both start over: an earlier answer of one would influence the other.
        conversation.reset()
        self.pairs[1:] = [(speaker, conversation.copy())]
        return f"{first.name} on the left, {speaker.name} on the right; both start over."

    def _reset(self, _: str) -> str:
        for pair in self.pairs:
            pair[1].reset()
        return "The conversation is forgotten."

    def _system(self, text: str) -> str:
        for _, conversation in self.pairs:
            conversation.system = text or None
            conversation.reset()
        return (
            "The system message is set; the conversation starts over."
            if text
            else "No system message."
        )

    def _temperature(self, text: str) -> str:
        try:
            temperature = float(text)
        except ValueError:
            temperature = -1.0
        if not 0 <= temperature <= 100:
            raise misuse(f"/temperature takes a number from 0 on, not {text!r}", "/temperature 0.7")
        self._sampling["temperature"] = temperature
        return f"The temperature is {temperature:g}."

    def _save(self, name: str) -> str:
        if not name:
            raise misuse("/save needs a file", "/save chat.jsonl")
        if not self.pairs[0][1].turns:
            raise CommandError("The conversation is empty")
        path = Path(name).expanduser()
        lines = [_line(speaker.name, conversation) for speaker, conversation in self.pairs]
        with path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
        return f"Added {len(lines)} conversation{'s' * (len(lines) > 1)} to {path}."


def _line(model: str, conversation: Conversation) -> str:
    said: dict[str, Any] = {"messages": conversation.messages(), "model": model}
    return json.dumps(said, ensure_ascii=False) + "\n"


def _leave(_: str) -> str:
    raise Leave
