"""The product of rows with a weight, in LLVM's language, for processors with AVX-512.

A weight lies in slabs of up to 2,048 inputs, a slab in blocks of 16 outputs, a block input by
input, so that a weight is read from its first number to its last. For each input the 16 numbers of
a block are one vector, which is multiplied with that input of up to 16 rows and added to the sums
of those rows, which stay in registers: the arithmetic hides behind reading. Rows are first turned:
a panel has an input of 16 rows side by side, as they will be read.

A sum has the terms of a slab, one after the other; those of further slabs are added to it. So the
bits of a row depend neither on other rows nor on the number of threads.

Shapes: T rows, R of them at a time, I inputs, O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

LANES: Final = 16
"""What a vector of AVX-512 holds: outputs of a block, rows of a panel. Inputs are a multiple."""
TOGETHER: Final = 128
"""Rows that are turned before anything is multiplied; they shall fit the L2 cache."""
ENTRY: Final = "share"
CALLED: Final = ("omp_get_thread_num", "omp_get_num_threads")
ARGUMENTS: Final = ("x", "w", "y", "rooms", "rows", "inputs", "blocks", "slab_size", "room_size")
"""x_TI, the slabs, y_TO, a room for each thread, T, I, O/16, and the sizes of slabs and rooms."""

_POINTERS: Final = 4
_ROWS: Final = (16, 12, 8, 4)
_LARGEST_SLAB: Final = 2048
_AHEAD: Final = 1024
"""How many numbers ahead of the arithmetic a weight is asked for."""

_DECLARED: Final = """
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare i64 @llvm.smin.i64(i64, i64)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
"""


def slab_size(inputs: int) -> int:
    """How many inputs a slab has."""
    slabs = -(-inputs // _LARGEST_SLAB)
    return -(-inputs // slabs // LANES) * LANES


def room_size(rows: int, inputs: int) -> int:
    """How many numbers the panels of one thread have."""
    panels = -(-min(rows, TOGETHER) // LANES)
    return panels * LANES * slab_size(inputs)


def text() -> str:
    """The module: `share` computes one thread's share of the outputs."""
    return "\n".join((_DECLARED, *map(_block_of_rows, _ROWS), _share()))


def _each(rows: Iterable[int], line: str) -> str:
    return "\n".join(line.replace("#", str(row)) for row in rows)


def _block_of_rows(count: int) -> str:
    """The first `count` rows of a panel with one block of the weight."""
    rows = range(count)
    return f"""
define internal void
@rows_{count}(ptr %x, ptr %w, ptr %y, i64 %inputs, i64 %outputs, i64 %last, i1 %begun) noinline {{
start:
  br label %multiply
multiply:
  %i = phi i64 [0, %start], [%next, %multiply]
{_each(rows, "  %sum# = phi <16 x float> [zeroinitializer, %start], [%more#, %multiply]")}
  %before = mul i64 %i, {LANES}
  %block = getelementptr float, ptr %w, i64 %before
  %ahead = getelementptr float, ptr %block, i64 {_AHEAD}
  call void @llvm.prefetch.p0(ptr %ahead, i32 0, i32 3, i32 1)
  %weights = load <16 x float>, ptr %block, align 64
  %column = getelementptr float, ptr %x, i64 %before
{_each(rows, _MULTIPLY)}
  %next = add i64 %i, 1
  %on = icmp slt i64 %next, %inputs
  br i1 %on, label %multiply, label %write
write:
{_each(rows, _ADD)}
{_each(rows, "  store <16 x float> %new#, ptr %to#, align 4")}
  ret void
}}"""


_MULTIPLY: Final = """
  %from# = getelementptr float, ptr %column, i64 #
  %x# = load float, ptr %from#
  %one# = insertelement <16 x float> poison, float %x#, i64 0
  %all# = shufflevector <16 x float> %one#, <16 x float> poison, <16 x i32> zeroinitializer
  %more# = call <16 x float>
    @llvm.fma.v16f32(<16 x float> %all#, <16 x float> %weights, <16 x float> %sum#)"""
# All of them before the first is stored: rows after the last are the last once more.
_ADD: Final = """
  %row# = call i64 @llvm.smin.i64(i64 #, i64 %last)
  %offset# = mul i64 %outputs, %row#
  %to# = getelementptr float, ptr %y, i64 %offset#
  %old# = load <16 x float>, ptr %to#, align 4
  %both# = fadd <16 x float> %old#, %more#
  %new# = select i1 %begun, <16 x float> %both#, <16 x float> %more#"""


def _loop(name: str, first: str, end: str, step: object, body: str) -> str:
    """`for name in range(first, end, step)`."""
    return f"""
  br label %{name}.start
{name}.start:
  br label %{name}.head
{name}.head:
  %{name} = phi i64 [{first}, %{name}.start], [%{name}.next, %{name}.step]
  %{name}.on = icmp slt i64 %{name}, {end}
  br i1 %{name}.on, label %{name}.body, label %{name}.end
{name}.body:
{body}
  br label %{name}.step
{name}.step:
  %{name}.next = add i64 %{name}, {step}
  br label %{name}.head
{name}.end:"""


def _groups(name: str, body: str) -> str:
    """The rows from `top` to `bottom`, 16 at a time; the last are filled up to a multiple of 4."""
    return _loop(
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


def _turn_group() -> str:
    """Fill a panel; rows after the last are the last once more."""
    rows = range(LANES)
    return f"""
  %g.lowest = sub i64 %bottom, 1
{_each(rows, _ROW)}""" + _loop(
        "i",
        "0",
        "%size",
        LANES,
        f"""
{_each(rows, _READ)}
{_turned()}
  %i.offset = mul i64 %i, {LANES}
  %i.to = getelementptr float, ptr %g.panel, i64 %i.offset
{_each(rows, _KEEP)}""",
    )


_ROW: Final = """
  %g.far# = add i64 %g, #
  %g.row# = call i64 @llvm.smin.i64(i64 %g.far#, i64 %g.lowest)
  %g.offset# = mul i64 %g.row#, %inputs
  %g.x# = getelementptr float, ptr %slab.x, i64 %g.offset#"""
_READ: Final = """
  %i.from# = getelementptr float, ptr %g.x#, i64 %i
  %turn16.# = load <16 x float>, ptr %i.from#, align 4"""
_KEEP: Final = """
  %i.offset# = getelementptr <16 x float>, ptr %i.to, i64 #
  store <16 x float> %turn1.#, ptr %i.offset#, align 64"""


def _turned() -> str:
    """Of 16 vectors the 16 columns: halves change places, then quarters, and so on."""
    lines: list[str] = []
    for size in (8, 4, 2, 1):
        for one in (row for row in range(LANES) if not row & size):
            pair = f"<16 x float> %turn{2 * size}.{one}, <16 x float> %turn{2 * size}.{one + size}"
            upper = [16 + lane - size if lane & size else lane for lane in range(LANES)]
            lower = [16 + lane if lane & size else lane + size for lane in range(LANES)]
            for row, lanes in ((one, upper), (one + size, lower)):
                mask = ", ".join(f"i32 {lane}" for lane in lanes)
                lines.append(f"  %turn{size}.{row} = shufflevector {pair}, <16 x i32> <{mask}>")
    return "\n".join(lines)


def _multiply_group() -> str:
    cases = "\n".join(f"    i64 {count}, label %with_{count}" for count in _ROWS[1:])
    calls = "\n".join(
        f"""
with_{count}:
  call void @rows_{count}(
    ptr %h.panel, ptr %o.w, ptr %h.y, i64 %size, i64 %outputs, i64 %h.last, i1 %begun)
  br label %multiplied"""
        for count in _ROWS
    )
    return f"""
  %h.last = sub i64 %h.left, 1
  %h.rows = mul i64 %h, %outputs
  %h.place = add i64 %h.rows, %o.first
  %h.y = getelementptr float, ptr %y, i64 %h.place
  %h.up = add i64 %h.left, 3
  %h.fours = and i64 %h.up, -4
  switch i64 %h.fours, label %with_{_ROWS[0]} [
{cases}
  ]
{calls}
multiplied:"""


def _share() -> str:
    read = "\n".join(
        f"""
  %{name}.at = getelementptr i64, ptr %arguments, i64 {number}
  %{name} = load {"ptr" if number < _POINTERS else "i64"}, ptr %{name}.at"""
        for number, name in enumerate(ARGUMENTS)
    )
    return f"""
define void @{ENTRY}(ptr %arguments) {{
{read}
  %outputs = mul i64 %blocks, {LANES}
  %thread.small = call i32 @omp_get_thread_num()
  %thread = zext i32 %thread.small to i64
  %threads.small = call i32 @omp_get_num_threads()
  %threads = zext i32 %threads.small to i64
  %before = mul i64 %blocks, %thread
  %mine = sdiv i64 %before, %threads
  %with_mine = add i64 %before, %blocks
  %others = sdiv i64 %with_mine, %threads
  %skipped = mul i64 %room_size, %thread
  %room = getelementptr float, ptr %rooms, i64 %skipped
{_loop("slab", "0", "%inputs", "%slab_size", _slab())}
  ret void
}}"""


def _slab() -> str:
    body = f"""
  %far = add i64 %top, {TOGETHER}
  %bottom = call i64 @llvm.smin.i64(i64 %far, i64 %rows)
{_groups("g", _turn_group())}
{_loop("o", "%mine", "%others", 1, _block())}"""
    return f"""
  %left = sub i64 %inputs, %slab
  %size = call i64 @llvm.smin.i64(i64 %left, i64 %slab_size)
  %begun = icmp sgt i64 %slab, 0
  %slab.x = getelementptr float, ptr %x, i64 %slab
  %slab.offset = mul i64 %slab, %outputs
  %slab.w = getelementptr float, ptr %w, i64 %slab.offset
{_loop("top", "0", "%rows", TOGETHER, body)}"""


def _block() -> str:
    return f"""
  %o.first = mul i64 %o, {LANES}
  %o.offset = mul i64 %o.first, %size
  %o.w = getelementptr float, ptr %slab.w, i64 %o.offset
{_groups("h", _multiply_group())}"""
