"""What was said so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Conversation:
    """The messages of a chat, an optional system message first."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def messages(self) -> list[dict[str, str]]:
        """All of it, as a template wants it."""
        first = [] if self.system is None else [_message("system", self.system)]
        return [*first, *self.turns]

    def asking(self, text: str) -> list[dict[str, str]]:
        """All of it and one more question."""
        return [*self.messages(), _message("user", text)]

    def add(self, question: str, answer: str) -> None:
        """Remember a question that was answered."""
        self.turns += [_message("user", question), _message("assistant", answer)]

    def reset(self) -> None:
        """Forget what was said; the system message stays."""
        self.turns.clear()

    def copy(self) -> Conversation:
        """One that goes on by itself."""
        return replace(self, turns=list(self.turns))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
