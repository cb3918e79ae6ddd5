"""The arithmetic of products, in LLVM's language, for processors with AVX-512.

A *panel* has 16 rows, a *block* 16 outputs of a weight; both lie input by input, so that they are
read from their first number to their last. For each input, or term, the 16 numbers of a block are
one vector, which is multiplied with that term of up to 16 rows and added to the sums of those
rows, which stay in registers. A sum has its terms one after the other, whatever happens to other
rows.
"""

from __future__ import annotations

from typing import Final

from tinkex.engine.native.text import LANES, each, loop

_ROWS: Final = (16, 12, 8, 4)
_AHEAD: Final = 1024
"""How many numbers ahead of the arithmetic a block is asked for: it may lie in main memory."""

DECLARED: Final = """
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare i64 @llvm.smin.i64(i64, i64)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
"""


def kernels() -> str:
    """`multiply` a panel with a block, and `bring` rows into a panel."""
    return "\n".join((*map(_multiply_rows, _ROWS), _multiply(), _bring()))


def _multiply() -> str:
    """`left` rows, or 16; their number is filled up to a multiple of 4."""
    given = (
        "ptr %panel, ptr %block, ptr %y, i64 %terms, i64 %width, i64 %last, i1 %add, float %scale"
    )
    cases = "\n".join(f"    i64 {count}, label %with_{count}" for count in _ROWS[1:])
    calls = "\n".join(
        f"""
with_{count}:
  call void @multiply_{count}({given})
  ret void"""
        for count in _ROWS
    )
    return f"""
define internal void @multiply({given.replace("%last", "%left")}) {{
  %last = sub i64 %left, 1
  %up = add i64 %left, 3
  %fours = and i64 %up, -4
  switch i64 %fours, label %with_{_ROWS[0]} [
{cases}
  ]
{calls}
}}"""


def _multiply_rows(count: int) -> str:
    """Write the product to y, or add it; rows after the last are that once more."""
    rows = range(count)
    return f"""
define internal void @multiply_{count}(
    ptr %panel, ptr %block, ptr %y, i64 %terms, i64 %width, i64 %last, i1 %add, float %scale
) noinline {{
start:
  %scale.one = insertelement <16 x float> poison, float %scale, i64 0
  %scales = shufflevector <16 x float> %scale.one, <16 x float> poison, <16 x i32> zeroinitializer
  br label %term
term:
  %i = phi i64 [0, %start], [%next, %term]
{each(rows, "  %sum# = phi <16 x float> [zeroinitializer, %start], [%more#, %term]")}
  %before = mul i64 %i, {LANES}
  %from = getelementptr float, ptr %block, i64 %before
  %ahead = getelementptr float, ptr %from, i64 {_AHEAD}
  call void @llvm.prefetch.p0(ptr %ahead, i32 0, i32 3, i32 1)
  %columns = load <16 x float>, ptr %from, align 64
  %rows = getelementptr float, ptr %panel, i64 %before
{each(rows, _TERM)}
  %next = add i64 %i, 1
  %on = icmp slt i64 %next, %terms
  br i1 %on, label %term, label %write
write:
{each(rows, _SUM)}
{each(rows, "  store <16 x float> %new#, ptr %to#, align 4")}
  ret void
}}"""


_TERM: Final = """
  %from# = getelementptr float, ptr %rows, i64 #
  %x# = load float, ptr %from#
  %one# = insertelement <16 x float> poison, float %x#, i64 0
  %all# = shufflevector <16 x float> %one#, <16 x float> poison, <16 x i32> zeroinitializer
  %more# = call <16 x float>
    @llvm.fma.v16f32(<16 x float> %all#, <16 x float> %columns, <16 x float> %sum#)"""
# Of all rows before the first is stored: the last one may be among them more than once.
_SUM: Final = """
  %row# = call i64 @llvm.smin.i64(i64 #, i64 %last)
  %offset# = mul i64 %width, %row#
  %to# = getelementptr float, ptr %y, i64 %offset#
  %old# = load <16 x float>, ptr %to#, align 4
  %scaled# = fmul <16 x float> %more#, %scales
  %both# = fadd <16 x float> %old#, %scaled#
  %new# = select i1 %add, <16 x float> %both#, <16 x float> %scaled#"""


def _bring() -> str:
    """Bring numbers together: 16 lanes, term by term. Lanes, or else terms, lie side by side.

    Terms that lie side by side are a multiple of 16; lanes after the last are that once more.
    """
    lanes = range(LANES)
    copy = loop(
        "c",
        "0",
        "%terms",
        1,
        f"""
  %c.offset = mul i64 %c, %term_step
  %c.from = getelementptr float, ptr %x, i64 %c.offset
  %c.lanes = load <16 x float>, ptr %c.from, align 4
  %c.before = mul i64 %c, {LANES}
  %c.to = getelementptr float, ptr %panel, i64 %c.before
  store <16 x float> %c.lanes, ptr %c.to, align 64""",
    )
    turn = loop(
        "i",
        "0",
        "%terms",
        LANES,
        f"""
{each(lanes, _READ)}
{_turned()}
  %i.before = mul i64 %i, {LANES}
  %i.to = getelementptr float, ptr %panel, i64 %i.before
{each(lanes, _KEEP)}""",
    )
    return f"""
define internal void @bring(
    ptr %x, ptr %panel, i64 %lane_step, i64 %term_step, i64 %terms, i64 %last
) noinline {{
  %lanes_lie = icmp eq i64 %lane_step, 1
  br i1 %lanes_lie, label %copy, label %turn
copy:
{copy}
  ret void
turn:
{each(lanes, _ROW)}
{turn}
  ret void
}}"""


_ROW: Final = """
  %row# = call i64 @llvm.smin.i64(i64 #, i64 %last)
  %offset# = mul i64 %row#, %lane_step
  %x# = getelementptr float, ptr %x, i64 %offset#"""
_READ: Final = """
  %i.from# = getelementptr float, ptr %x#, i64 %i
  %turn16.# = load <16 x float>, ptr %i.from#, align 4"""
_KEEP: Final = """
  %i.to# = getelementptr <16 x float>, ptr %i.to, i64 #
  store <16 x float> %turn1.#, ptr %i.to#, align 64"""


def _turned() -> str:
    """Of 16 vectors the 16 columns: halves change places, then quarters, and so on."""
    lines: list[str] = []
    for size in (8, 4, 2, 1):
        for one in (row for row in range(LANES) if not row & size):
            pair = f"<16 x float> %turn{2 * size}.{one}, <16 x float> %turn{2 * size}.{one + size}"
            upper = [16 + lane - size if lane & size else lane for lane in range(LANES)]
            lower = [16 + lane if lane & size else lane + size for lane in range(LANES)]
            for row, places in ((one, upper), (one + size, lower)):
                mask = ", ".join(f"i32 {place}" for place in places)
                lines.append(f"  %turn{size}.{row} = shufflevector {pair}, <16 x i32> <{mask}>")
    return "\n".join(lines)
