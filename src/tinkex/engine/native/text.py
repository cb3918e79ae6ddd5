"""Small helps for writing LLVM's language."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LANES: Final = 16
"""What a vector of AVX-512 holds."""
LARGEST_SLAB: Final = 2048
"""Terms that are summed one after the other before their sum is added to those before."""


def each(numbers: Iterable[int], line: str) -> str:
    """The line once for each number, which stands where it has a #."""
    return "\n".join(line.replace("#", str(number)) for number in numbers)


def loop(name: str, first: str, end: str, step: object, body: str) -> str:
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


def arguments(kinds: Sequence[tuple[str, str]]) -> str:
    """Read name and kind of everything that lies at `arguments`, eight bytes each."""
    return "\n".join(
        f"""
  %{name}.at = getelementptr i64, ptr %arguments, i64 {number}
  %{name} = load {kind}, ptr %{name}.at"""
        for number, (name, kind) in enumerate(kinds)
    )


def share(first: str, end: str, count: str) -> str:
    """Which of `count` things this thread does."""
    return f"""
  %thread.small = call i32 @omp_get_thread_num()
  %thread = zext i32 %thread.small to i64
  %threads.small = call i32 @omp_get_num_threads()
  %threads = zext i32 %threads.small to i64
  %before = mul i64 {count}, %thread
  %{first} = sdiv i64 %before, %threads
  %with_own = add i64 %before, {count}
  %{end} = sdiv i64 %with_own, %threads"""
