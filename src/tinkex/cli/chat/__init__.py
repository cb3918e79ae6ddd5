"""`tinkex chat`."""

from tinkex.cli.chat.command import ARGUMENTS, chat

__all__ = ["ARGUMENTS", "chat"]
