"""How many values a JSON body has, found before it is decoded.

A value takes many times its bytes once it is decoded, and the decoder lets no other thread run
meanwhile. Counting its signs is fast, and other threads run between two windows.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_WINDOW = 1 << 20
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
# Leaving out the texts of a body costs so many small steps at most.
_MOST_STEPS = 1 << 18


class Counts(NamedTuple):
    """Lists and objects, and values of every kind."""

    parts: int
    values: int


def count_values(body: bytes, most: Counts) -> Counts:
    """At least as many as there are; exact where the signs inside of texts would exceed `most`."""
    counts = _signs(body)
    if counts.parts <= most.parts and counts.values <= most.values:
        return counts
    if body.count(b'"') + body.count(b"\\") > _MOST_STEPS:
        return counts
    return _signs(_TEXT.sub(b"", body))


def _signs(body: bytes) -> Counts:
    parts = commas = 0
    for start in range(0, len(body), _WINDOW):
        end = start + _WINDOW
        parts += body.count(b"[", start, end) + body.count(b"{", start, end)
        commas += body.count(b",", start, end)
    return Counts(parts, parts + commas + 1)
