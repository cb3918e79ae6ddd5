"""Whether tensors lie in memory as parts of one, so that nothing need be copied to join them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """The parts as one tensor along their second dimension, or None where they lie otherwise."""
    first = parts[0]
    memory, strides, start = _memory(first), first.stride(), first.storage_offset()
    for part in parts:
        if (_memory(part), part.stride(), part.storage_offset()) != (memory, strides, start):
            return None
        start += part.shape[1] * strides[1]
    tokens, _, *rest = first.shape
    return first.as_strided((tokens, sum(part.shape[1] for part in parts), *rest), strides)


def _memory(part: Tensor) -> int:
    """Where the memory begins that the tensor is a part of."""
    # Asking the tensor for its storage takes several times as long.
    return part.data_ptr() - int(part.storage_offset()) * part.itemsize
