"""Whether tensors lie in memory as parts of one, so that nothing need be copied to join them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """The parts as one tensor along their second dimension, or None where they lie otherwise."""
    first = parts[0]
    memory, strides = first.untyped_storage().data_ptr(), first.stride()
    start = first.storage_offset()
    for part in parts:
        here = part.untyped_storage().data_ptr(), part.stride(), part.storage_offset()
        if here != (memory, strides, start):
            return None
        start += part.shape[1] * strides[1]
    tokens, _, *rest = first.shape
    return first.as_strided((tokens, sum(part.shape[1] for part in parts), *rest), strides)
