"""Cuts a batch into requests by the protocol's two limits. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.types import DmelChunk, EncodedTextChunk, ImageChunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.types import Datum, ModelInput


def chunk(
    data: Sequence[Datum], *, max_datums: int, max_bytes: int
) -> list[tuple[list[Datum], int]]:
    """Greedy runs of datums with their estimated bytes; an oversized datum stands alone."""
    chunks: list[tuple[list[Datum], int]] = []
    current: list[Datum] = []
    total = 0
    for datum in data:
        size = datum_bytes(datum)
        if current and (total + size > max_bytes or len(current) >= max_datums):
            chunks.append((current, total))
            current, total = [], 0
        current.append(datum)
        total += size
    chunks.append((current, total))
    return chunks


def datum_bytes(datum: Datum) -> int:
    """The protocol's estimate of a datum's uncompressed size."""
    tensors = sum(tensor.size_bytes for tensor in datum.loss_fn_inputs.values())
    return input_bytes(datum.model_input, per_token=4) + tensors


def input_bytes(model_input: ModelInput, *, per_token: int) -> int:
    """The protocol's estimate of an input's size, at so many bytes for each text token."""
    total = 0
    for part in model_input.chunks:
        if isinstance(part, EncodedTextChunk):
            total += per_token * len(part.tokens)
        elif isinstance(part, ImageChunk):
            total += len(part.data)
        elif isinstance(part, DmelChunk):
            total += len(part.dmel)
        else:
            total += len(part.location)
    return total


def text_tokens(model_input: ModelInput) -> int:
    """How many tokens of text there are; pictures and sound are counted by the server."""
    return sum(
        len(part.tokens) for part in model_input.chunks if isinstance(part, EncodedTextChunk)
    )
