"""From the engine's thread to its callers' loops: answers at once, tokens once per sampler step.

Waking a loop for every token would cost more than drawing it. So the tokens of one step wait for
its end, and each loop is woken once for all of its own, in the order they were drawn.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable

    from tinkex.engine.protocol import Best, OnToken

    Drawn = tuple[OnToken, int, int, float, Best | None]

_log = logging.getLogger(__name__)


class TokenRelay:
    """Tokens on their way; touched by the engine's thread only."""

    def __init__(self) -> None:
        # Mutable state: what was drawn since the last `flush`.
        self._drawn: dict[AbstractEventLoop, list[Drawn]] = {}

    def to(self, loop: AbstractEventLoop, on_token: OnToken) -> OnToken:
        """What the sampler calls so that `on_token` is called on `loop`."""

        def relay(sample: int, token: int, logprob: float, best: Best | None) -> None:
            self._drawn.setdefault(loop, []).append((on_token, sample, token, logprob, best))

        return relay

    def flush(self) -> None:
        """Send everything; what is sent to a loop later comes after it."""
        drawn, self._drawn = self._drawn, {}
        for loop, tokens in drawn.items():
            hop(loop, lambda tokens=tokens: _hand_out(tokens))


def hop(loop: AbstractEventLoop, action: Callable[[], None]) -> None:
    """Run `action` on a caller's loop; one that has closed has nobody waiting."""
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:
        _log.debug("a caller's loop closed before its answer came")


def _hand_out(tokens: list[Drawn]) -> None:
    for on_token, sample, token, logprob, best in tokens:
        try:
            on_token(sample, token, logprob, best)
        except Exception:  # noqa: BLE001 - the caller's own code; others' tokens are in the list
            _log.exception("on_token failed")
