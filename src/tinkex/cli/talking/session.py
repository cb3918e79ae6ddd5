"""A chat: who takes part, what was said, and what happens with a line that was typed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.cli import target as targets
from tinkex.cli.failures import CommandError, misuse
from tinkex.cli.talking.conversation import Conversation
from tinkex.cli.talking.speaker import Speaker, hear_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinkex.cli.talking.speaker import Begin, Manner
    from tinkex.clients.service import ServiceClient

HELP = """\
/compare OTHER    let OTHER answer, too, side by side: a model, a path, a run's
                  folder, or `base` for the model underneath; `off` ends it
/reset            forget what was said
/system TEXT      set the system message and begin anew; without TEXT remove it
/temperature T    0 takes the likeliest token
/save FILE        add the conversation to FILE, as a line to train on
/help             this list
/quit             leave; Ctrl-D does, too
Ctrl-C stops an answer. Write two slashes to begin a message with one."""


class Leave(Exception):
    """The person wants to go."""


class ChatSession:
    """Speakers with their conversations; the second pair is there while two are compared."""

    def __init__(
        self, service: ServiceClient, first: Speaker, manner: Manner, system: str | None
    ) -> None:
        self._service = service
        # Mutable state: the pairs, and how answers are drawn.
        self.pairs = [(first, Conversation(system))]
        self._manner = manner

    @property
    def names(self) -> list[str]:
        """Who takes part."""
        return [speaker.name for speaker, _ in self.pairs]

    def answers(self, question: str, texts: list[str]) -> Iterator[tuple[int, str | None]]:
        """The answers of everybody, piece by piece; `texts` grows to the whole of each.

        However the iterator ends, what was said until then is remembered, if it was anything.
        """
        texts[:] = [""] * len(self.pairs)
        try:
            for index, piece in hear_all([self._begin(*pair, question) for pair in self.pairs]):
                texts[index] += piece or ""
                yield index, piece
        finally:
            for (_, conversation), text in zip(self.pairs, texts, strict=True):
                if text.strip():
                    conversation.add(question, text.strip())

    def _begin(self, speaker: Speaker, conversation: Conversation, question: str) -> Begin:
        messages = conversation.asking(question)
        return lambda hear: speaker.begin(messages, self._manner, hear)

    # -- commands -----------------------------------------------------------------------------

    def command(self, line: str) -> str:
        """Do what a line with a slash says; returns what to tell the person."""
        name, _, rest = line.removeprefix("/").partition(" ")
        run = self._commands().get(name.lower())
        if run is None:
            raise misuse(f"There is no /{name}", "/help lists what there is.")
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
            raise misuse("/compare needs to know with whom", "/compare MODEL, or /compare off")
        first, conversation = self.pairs[0]
        if other == "off":
            del self.pairs[1:]
            return f"Only {first.name} answers."
        target = first.base if other == "base" else targets.find(other)
        speaker = Speaker(self._service, target)
        # Both begin anew: what one has said would lead the other.
        conversation.reset()
        self.pairs[1:] = [(speaker, conversation.copy())]
        return f"{first.name} on the left, {speaker.name} on the right; both begin anew."

    def _reset(self, _: str) -> str:
        for pair in self.pairs:
            pair[1].reset()
        return "Forgot what was said."

    def _system(self, text: str) -> str:
        for _, conversation in self.pairs:
            conversation.system = text or None
            conversation.reset()
        return "The system message is set; begun anew." if text else "No system message."

    def _temperature(self, text: str) -> str:
        try:
            temperature = float(text)
        except ValueError:
            temperature = -1.0
        if not 0 <= temperature <= 100:
            raise misuse(f"/temperature takes a number from 0 on, not {text!r}", "/temperature 0.7")
        self._manner = replace(self._manner, temperature=temperature)
        return f"The temperature is {temperature:g}."

    def _save(self, name: str) -> str:
        if not name:
            raise misuse("/save needs a file", "/save chat.jsonl")
        if not self.pairs[0][1].turns:
            raise CommandError("Nothing was said yet")
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
