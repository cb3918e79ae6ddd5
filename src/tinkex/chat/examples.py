"""What can be trained on, before it is tokens: conversations, completions and preferences.

`line` is the line of the file an example was read from, for messages; 0 for one made by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinkex.chat.messages import Message


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A conversation; its assistant's messages are trained, but for those with `"weight": 0`."""

    messages: Sequence[Message]
    line: int = 0
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class CompletionExample:
    """Raw text and how it goes on; no chat template is applied."""

    prompt: str
    completion: str
    line: int = 0


@dataclass(frozen=True, slots=True)
class PreferenceExample:
    """Two ways to go on, of which the first is better.

    With messages as the prompt both answers are messages, with text all three are raw text.
    """

    prompt: Sequence[Message] | str
    chosen: Sequence[Message] | str
    rejected: Sequence[Message] | str
    line: int = 0
    tools: Sequence[Mapping[str, Any]] = ()
