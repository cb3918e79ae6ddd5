"""Cutting a batch into requests."""

from __future__ import annotations

import pytest

from tinkex.clients.training_requests import chunk, datum_bytes, input_bytes, text_tokens
from tinkex.types import Datum, EncodedTextChunk, ImageAssetPointerChunk, ImageChunk, ModelInput


def datum(tokens: int) -> Datum:
    ids = list(range(tokens))
    return Datum(
        model_input=ModelInput.from_ints(ids),
        loss_fn_inputs={"target_tokens": ids, "weights": [1.0] * tokens},
    )


def test_a_datum_is_estimated_as_the_protocol_says():
    assert datum_bytes(datum(10)) == 10 * 4 + 10 * 8 + 10 * 4


def test_pictures_count_their_bytes_and_pointers_their_location():
    mixed = ModelInput(
        chunks=[
            EncodedTextChunk(tokens=[1, 2]),
            ImageChunk(data=b"12345", format="png"),
            ImageAssetPointerChunk(format="png", location="s3://x"),
        ]
    )
    assert input_bytes(mixed, per_token=10) == 20 + 5 + 6
    assert text_tokens(mixed) == 2


@pytest.mark.req("S20")
@pytest.mark.parametrize(
    ("max_datums", "max_bytes", "sizes"),
    [
        (1024, 5_000_000, [5]),
        (2, 5_000_000, [2, 2, 1]),
        (1024, 2 * 160, [2, 2, 1]),  # a datum of ten tokens is 160 bytes
        (1024, 159, [1, 1, 1, 1, 1]),
        (1, 1, [1, 1, 1, 1, 1]),
    ],
)
def test_both_limits_close_a_chunk(max_datums: int, max_bytes: int, sizes: list[int]):
    data = [datum(10) for _ in range(5)]
    chunks = chunk(data, max_datums=max_datums, max_bytes=max_bytes)
    assert [len(part) for part, _ in chunks] == sizes
    assert [item for part, _ in chunks for item in part] == data
    assert [size for _, size in chunks] == [160 * n for n in sizes]
