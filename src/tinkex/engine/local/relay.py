"""From the engine's thread to its callers' loops: answers at once, tokens once per sampler step.

Waking a loop for every token would take longer than sampling it. So the tokens of a step are
collected, and at its end each loop is woken once for all of its tokens, in the order of sampling.
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
    """Collects tokens; used by the engine's thread only, so it needs no lock."""

    def __init__(self) -> None:
        # Mutable state: the tokens since the last `flush`.
        self._drawn: dict[AbstractEventLoop, list[Drawn]] = {}

    def to(self, loop: AbstractEventLoop, on_token: OnToken) -> OnToken:
        """A callback for the sampler that calls `on_token` on `loop`."""

        def relay(sample: int, token: int, logprob: float, best: Best | None) -> None:
            self._drawn.setdefault(loop, []).append((on_token, sample, token, logprob, best))

        return relay

    def flush(self) -> None:
        """Send all tokens; a later `call_on_loop` for the same loop runs after them."""
        drawn, self._drawn = self._drawn, {}
        for loop, tokens in drawn.items():
            call_on_loop(loop, lambda tokens=tokens: _call_all(tokens))


def call_on_loop(loop: AbstractEventLoop, action: Callable[[], None]) -> None:
    """Run `action` on a caller's loop; a closed loop has no callers left."""
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:
        _log.debug("a caller's loop closed before its answer came")


def _call_all(tokens: list[Drawn]) -> None:
    for on_token, sample, token, logprob, best in tokens:
        try:
            on_token(sample, token, logprob, best)
        except Exception:  # noqa: BLE001 - the caller's code; other callers' tokens follow in the list
            _log.exception("on_token failed")
