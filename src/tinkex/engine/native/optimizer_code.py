"""AdamW in one walk over everything: what a step writes is not read into the caches first.

The changes of every `BLOCK` parameters are squared and summed on the way, for their norm.
"""

from __future__ import annotations

from typing import Final

from tinkex.engine.native.text import LANES, arguments, loop, share

NAME: Final = "adamw"
BLOCK: Final = 4096

VECTORS: Final = ("old_p", "gradient", "old_m", "old_v", "new_p", "new_m", "new_v")
FACTORS: Final = ("clip", "beta1", "rest1", "beta2", "rest2", "decay", "step", "root2", "eps")
"""What gradient, moments and parameters are multiplied with; see `optimizer`."""
_ARGUMENTS: Final = (
    *((name, "ptr") for name in VECTORS),
    ("squares", "ptr"),
    ("count", "i64"),
    *((name, "float") for name in FACTORS),
)


def code() -> str:
    """What one thread computes: some of the blocks."""
    return f"""
declare <16 x float> @llvm.sqrt.v16f32(<16 x float>)
declare float @llvm.vector.reduce.fadd.v16f32(float, <16 x float>)

define void @{NAME}(ptr %arguments) {{
{arguments(_ARGUMENTS)}
  %up = add i64 %count, {BLOCK - 1}
  %blocks = sdiv i64 %up, {BLOCK}
{share("mine", "others", "%blocks")}
  %sum.at = alloca <16 x float>
{"".join(map(_spread, FACTORS))}
{loop("block", "%mine", "%others", 1, _block())}
  ret void
}}
!0 = !{{i32 1}}"""


def _spread(name: str) -> str:
    return f"""
  %{name}.one = insertelement <16 x float> poison, float %{name}, i64 0
  %{name}s = shufflevector <16 x float> %{name}.one, <16 x float> poison,
    <16 x i32> zeroinitializer"""


def _block() -> str:
    return f"""
  %first = mul i64 %block, {BLOCK}
  %far = add i64 %first, {BLOCK}
  %end = call i64 @llvm.smin.i64(i64 %far, i64 %count)
  store <16 x float> zeroinitializer, ptr %sum.at
{loop("i", "%first", "%end", LANES, _lanes())}
  %sums = load <16 x float>, ptr %sum.at
  %sum = call float @llvm.vector.reduce.fadd.v16f32(float 0.0, <16 x float> %sums)
  %square.at = getelementptr float, ptr %squares, i64 %block
  store float %sum, ptr %square.at"""


def _lanes() -> str:
    places = "".join(
        f"""
  %i.{name} = getelementptr float, ptr %{name}, i64 %i"""
        for name in VECTORS
    )
    read = "".join(
        f"""
  %{name}s = load <16 x float>, ptr %i.{name}, align 4"""
        for name in VECTORS[:4]
    )
    write = "".join(
        f"""
  store <16 x float> %{name}s, ptr %i.{name}, align 64, !nontemporal !0"""
        for name in VECTORS[4:]
    )
    return f"""
{places}
{read}
  %g = fmul <16 x float> %gradients, %clips
  %m.kept = fmul <16 x float> %old_ms, %beta1s
  %m.more = fmul <16 x float> %g, %rest1s
  %new_ms = fadd <16 x float> %m.kept, %m.more
  %g.square = fmul <16 x float> %g, %g
  %v.kept = fmul <16 x float> %old_vs, %beta2s
  %v.more = fmul <16 x float> %g.square, %rest2s
  %new_vs = fadd <16 x float> %v.kept, %v.more
  %root = call <16 x float> @llvm.sqrt.v16f32(<16 x float> %new_vs)
  %root.true = fdiv <16 x float> %root, %root2s
  %below = fadd <16 x float> %root.true, %epss
  %m.step = fmul <16 x float> %new_ms, %steps
  %change = fdiv <16 x float> %m.step, %below
  %p.kept = fmul <16 x float> %old_ps, %decays
  %new_ps = fsub <16 x float> %p.kept, %change
{write}
  %moved = fsub <16 x float> %new_ps, %old_ps
  %moved.square = fmul <16 x float> %moved, %moved
  %sum.old = load <16 x float>, ptr %sum.at
  %sum.new = fadd <16 x float> %sum.old, %moved.square
  store <16 x float> %sum.new, ptr %sum.at"""
