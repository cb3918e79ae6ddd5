"""The product of rows with a frozen weight, which lies ready in blocks.

A weight lies in slabs of up to 2,048 inputs, a slab in blocks of 16 outputs: it is read from its
first number to its last, and the arithmetic hides behind reading. The sums of a slab are added to
those of the slabs before.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Final

from tinkex.engine.native.text import LANES, LARGEST_SLAB, arguments, loop, share

NAME: Final = "product"
_TOGETHER: Final = 128
"""Rows that are brought into panels before anything is multiplied; they shall fit the L2 cache."""

_ARGUMENTS: Final = (
    ("x", "ptr"),
    ("w", "ptr"),
    ("y", "ptr"),
    ("rooms", "ptr"),
    ("rows", "i64"),
    ("inputs", "i64"),
    ("blocks", "i64"),
    ("slab_size", "i64"),
    ("room_size", "i64"),
)


def slab_size(inputs: int) -> int:
    """How many inputs a slab has."""
    slabs = -(-inputs // LARGEST_SLAB)
    return -(-inputs // slabs // LANES) * LANES


def room_size(rows: int, inputs: int) -> int:
    """How many numbers the panels of one thread have."""
    panels = -(-min(rows, _TOGETHER) // LANES)
    return panels * LANES * slab_size(inputs)


def code() -> str:
    """What one thread computes: some of the outputs."""
    return f"""
define void @{NAME}(ptr %arguments) {{
{arguments(_ARGUMENTS)}
{share("mine", "others", "%blocks")}
  %outputs = mul i64 %blocks, {LANES}
  %skipped = mul i64 %room_size, %thread
  %room = getelementptr float, ptr %rooms, i64 %skipped
{loop("slab", "0", "%inputs", "%slab_size", _slab())}
  ret void
}}"""


def _slab() -> str:
    rows = f"""
  %far = add i64 %top, {_TOGETHER}
  %bottom = call i64 @llvm.smin.i64(i64 %far, i64 %rows)
{_panels("g", _BRING)}
{loop("o", "%mine", "%others", 1, _block())}"""
    return f"""
  %rest = sub i64 %inputs, %slab
  %size = call i64 @llvm.smin.i64(i64 %rest, i64 %slab_size)
  %begun = icmp sgt i64 %slab, 0
  %slab.x = getelementptr float, ptr %x, i64 %slab
  %slab.offset = mul i64 %slab, %outputs
  %slab.w = getelementptr float, ptr %w, i64 %slab.offset
{loop("top", "0", "%rows", _TOGETHER, rows)}"""


def _panels(name: str, body: str) -> str:
    return loop(
        name,
        "%top",
        "%bottom",
        LANES,
        f"""
  %{name}.left = sub i64 %bottom, %{name}
  %{name}.above = sub i64 %{name}, %top
  %{name}.offset = mul i64 %{name}.above, %size
  %{name}.panel = getelementptr float, ptr %room, i64 %{name}.offset
{body}""",
    )


_BRING: Final = """
  %g.last = sub i64 %g.left, 1
  %g.rows = mul i64 %g, %inputs
  %g.x = getelementptr float, ptr %slab.x, i64 %g.rows
  call void @bring(ptr %g.x, ptr %g.panel, i64 %inputs, i64 1, i64 %size, i64 %g.last)"""
_MULTIPLY: Final = """
  %h.rows = mul i64 %h, %outputs
  %h.place = add i64 %h.rows, %o.first
  %h.y = getelementptr float, ptr %y, i64 %h.place
  call void @multiply(ptr %h.panel, ptr %o.w, ptr %h.y,
    i64 %size, i64 %outputs, i64 %h.left, i1 %begun, float 1.0)"""


def _block() -> str:
    return f"""
  %o.first = mul i64 %o, {LANES}
  %o.offset = mul i64 %o.first, %size
  %o.w = getelementptr float, ptr %slab.w, i64 %o.offset
{_panels("h", _MULTIPLY)}"""
