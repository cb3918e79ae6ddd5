"""Whether the server can do its work now, and why not.

Parts of the server say what they wait for; `/readyz` repeats it. A server that is not ready still
answers: requests are accepted and wait, unless the store itself fails.
"""

from __future__ import annotations


class Readiness:
    """Reasons against being ready, one per part."""

    def __init__(self) -> None:
        # Mutable state: what each part waits for; a part that is well is not in here.
        self._reasons: dict[str, str] = {}

    def waits(self, part: str, reason: str) -> None:
        """A part such as "engine" or "store" cannot work now."""
        self._reasons[part] = reason

    def ready(self, part: str) -> None:
        """A part works."""
        self._reasons.pop(part, None)

    @property
    def reasons(self) -> dict[str, str]:
        """What each part that is not ready waits for."""
        return dict(self._reasons)
