"""What the doctor says about one thing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `todo` is the next step where it is not ok."""

    name: str
    status: Status
    found: str
    todo: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON's own values."""
        return asdict(self)
