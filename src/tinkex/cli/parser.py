"""An argument parser that suggests the nearest known word for an unknown one.

Imports nothing but argparse, as `tinkex.cli.main` does; `difflib` is loaded for a misspelt word.
"""

from __future__ import annotations

import argparse

from tinkex.cli.commands import NOUNS, verbs_of

TYPE_CHECKING = False  # importing `typing` would cost as much as half of argparse
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, NoReturn

COMMAND = "COMMAND"


class Parser(argparse.ArgumentParser):
    """Reports unknown commands, options and choices with the nearest known one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - one body for its overloads
        """Like argparse, but reports a misspelt option before a missing one."""
        if self.get_default("handler"):
            self._refuse_unknown_options(args)
        return super().parse_known_args(args, namespace)

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """End the program because of unexpected words."""
        options = [word for word in words if word.startswith("-")]
        if options:
            self.error(self._no_option(options[0]))
        self.error(f"unexpected argument{'s' * (len(words) > 1)}: {' '.join(words)}")

    def _refuse_unknown_options(self, words: Iterable[str]) -> None:
        for word in words:
            if word == "--":
                return
            if word.startswith("--") and word.partition("=")[0] not in self._option_string_actions:
                self.error(self._no_option(word))

    def _no_option(self, word: str) -> str:
        name = word.partition("=")[0]
        return f"there is no option {name}{_suggestion(name, self._option_string_actions)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        if action.metavar == COMMAND:
            raise argparse.ArgumentError(None, self._no_command(value, choices))
        raise argparse.ArgumentError(
            action, f"{value!r} is none of {', '.join(choices)}{_suggestion(value, choices)}"
        )

    def _no_command(self, word: str, known: Sequence[str]) -> str:
        """Names the nearest command; a verb without its noun gets the noun."""
        missing = f"there is no command {word!r}"
        nouns = [noun for noun in NOUNS if self.prog == "tinkex" and word in verbs_of(noun)]
        if nouns:
            return f"{missing}{_question([f'{noun} {word}' for noun in nouns])}"
        every = f". `{self.prog} --help` lists the commands."
        return f"{missing}{_suggestion(word, known) or every}"


def _suggestion(word: str, known: Iterable[str]) -> str:
    import difflib

    # Without dashes, which would make all options similar.
    names = {name.lstrip("-"): name for name in known}
    typed = word.lstrip("-")
    near = difflib.get_close_matches(typed, names, n=1) or [
        name for name in names if len(typed) > 2 and name.startswith(typed)
    ]
    return _question([names[name] for name in near[:1]])


def _question(meant: Sequence[str]) -> str:
    """The question whether one of these was meant; empty without any."""
    if not meant:
        return ""
    *first, last = (f"`{one}`" for one in meant)
    return f". Did you mean {' or '.join((', '.join(first), last)) if first else last}?"
