"""The product of two matrices that are both new, as an adapter's factors are after every step.

Both are brought into panels and blocks, some rows and columns at a time. The sums of up to 2,048
terms are added to those of the terms before.

Shapes: M rows, N columns, K terms.
"""

from __future__ import annotations

from typing import Final

from tinkex.engine.native.text import LANES, LARGEST_SLAB, arguments, loop, share

NAME: Final = "passing"
_ROWS: Final = 128
_COLUMNS: Final = 256

_PRODUCT: Final = (
    ("left", "ptr"),
    ("right", "ptr"),
    ("out", "ptr"),
    ("rows", "i64"),
    ("columns", "i64"),
    ("terms", "i64"),
    ("left_row", "i64"),
    ("left_term", "i64"),
    ("right_term", "i64"),
    ("right_column", "i64"),
    ("width", "i64"),
    ("add", "i64"),
    ("scale", "float"),
)
_ARGUMENTS: Final = (("products", "ptr"), ("rooms", "ptr"), ("room_size", "i64"), ("count", "i64"))


def room_size(rows: int, columns: int, terms: int) -> int:
    """How many numbers the panels and blocks of one thread have."""
    lanes = min(_up(rows), _ROWS) + min(_up(columns), _COLUMNS)
    return lanes * min(terms, LARGEST_SLAB)


def _up(count: int) -> int:
    return -(-count // LANES) * LANES


def code() -> str:
    """What one thread computes of each product, one product after the other."""
    step = f"""
  %step.offset = mul i64 %number, {len(_PRODUCT)}
  %step.at = getelementptr i64, ptr %products, i64 %step.offset
  call void @pass(ptr %step.at, ptr %room)
  call void @GOMP_barrier()"""
    return f"""
declare void @GOMP_barrier()

define void @{NAME}(ptr %arguments) {{
{arguments(_ARGUMENTS)}
  %thread.small = call i32 @omp_get_thread_num()
  %thread = zext i32 %thread.small to i64
  %skipped = mul i64 %room_size, %thread
  %room = getelementptr float, ptr %rooms, i64 %skipped
{loop("number", "0", "%count", 1, step)}
  ret void
}}

define internal void @pass(ptr %arguments, ptr %room) {{
{arguments(_PRODUCT)}
  %skip_rows = icmp sge i64 %rows, %columns
  %many = select i1 %skip_rows, i64 %rows, i64 %columns
  %many.up = add i64 %many, {LANES - 1}
  %groups = sdiv i64 %many.up, {LANES}
{share("mine.groups", "others.groups", "%groups")}
  %mine = mul i64 %mine.groups, {LANES}
  %others.far = mul i64 %others.groups, {LANES}
  %others = call i64 @llvm.smin.i64(i64 %others.far, i64 %many)
  %first_row = select i1 %skip_rows, i64 %mine, i64 0
  %end_row = select i1 %skip_rows, i64 %others, i64 %rows
  %first_column = select i1 %skip_rows, i64 0, i64 %mine
  %end_column = select i1 %skip_rows, i64 %columns, i64 %others
  %adds = icmp ne i64 %add, 0
{loop("slab", "0", "%terms", LARGEST_SLAB, _slab())}
  ret void
}}"""


def _slab() -> str:
    return f"""
  %rest = sub i64 %terms, %slab
  %size = call i64 @llvm.smin.i64(i64 %rest, i64 {LARGEST_SLAB})
  %later = icmp sgt i64 %slab, 0
  %begun = or i1 %adds, %later
  %slab.left_offset = mul i64 %slab, %left_term
  %slab.left = getelementptr float, ptr %left, i64 %slab.left_offset
  %slab.right_offset = mul i64 %slab, %right_term
  %slab.right = getelementptr float, ptr %right, i64 %slab.right_offset
{loop("side", "%first_column", "%end_column", _COLUMNS, _columns())}"""


def _columns() -> str:
    bring_rows = _bring("g", "rows", "left", "left_row", "left_term")
    bring_columns = _bring("b", "columns", "right", "right_column", "right_term")
    rows = f"""
  %top.far = add i64 %top, {_ROWS}
  %bottom = call i64 @llvm.smin.i64(i64 %top.far, i64 %end_row)
{_groups("g", "top", "bottom", "panels", bring_rows)}
{_groups("c", "side", "right_side", "room", _groups("h", "top", "bottom", "panels", _MULTIPLY))}"""
    return f"""
  %side.far = add i64 %side, {_COLUMNS}
  %right_side = call i64 @llvm.smin.i64(i64 %side.far, i64 %end_column)
  %side.count = sub i64 %right_side, %side
  %blocks.size = mul i64 %side.count, %size
  %panels = getelementptr float, ptr %room, i64 %blocks.size
{_groups("b", "side", "right_side", "room", bring_columns)}
{loop("top", "%first_row", "%end_row", _ROWS, rows)}"""


def _groups(name: str, first: str, end: str, room: str, body: str) -> str:
    """Sixteen at a time, each with its place in a room."""
    return loop(
        name,
        f"%{first}",
        f"%{end}",
        LANES,
        f"""
  %{name}.left = sub i64 %{end}, %{name}
  %{name}.before = sub i64 %{name}, %{first}
  %{name}.offset = mul i64 %{name}.before, %size
  %{name}.lanes = getelementptr float, ptr %{room}, i64 %{name}.offset
{body}""",
    )


def _bring(name: str, lanes: str, factor: str, lane_step: str, term_step: str) -> str:
    """Sixteen rows of the left factor into a panel, or columns of the right one into a block."""
    return f"""
  %{name}.last = sub i64 %{name}.left, 1
  %{name}.{lanes} = mul i64 %{name}, %{lane_step}
  %{name}.from = getelementptr float, ptr %slab.{factor}, i64 %{name}.{lanes}
  call void @bring(ptr %{name}.from, ptr %{name}.lanes,
    i64 %{lane_step}, i64 %{term_step}, i64 %size, i64 %{name}.last)"""


_MULTIPLY: Final = """
  %h.rows = mul i64 %h, %width
  %h.place = add i64 %h.rows, %c
  %h.to = getelementptr float, ptr %out, i64 %h.place
  call void @multiply(ptr %h.lanes, ptr %c.lanes, ptr %h.to,
    i64 %size, i64 %width, i64 %h.left, i1 %begun, float %scale)"""
