"""Prompts and their chunks."""

import array
import pickle

import numpy as np
import pytest
import torch

from tinkex import types
from tinkex.errors import InputError, InputTypeError


@pytest.mark.req("B12")
@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], np.uint8),
        np.array([1.0, 2.0, 3.0]),
        torch.tensor([1, 2, 3]),
        torch.tensor([1, 2, 3], dtype=torch.int32),
        array.array("i", [1, 2, 3]),
        [np.int32(1), np.int64(2), torch.tensor(3)],
        [1.0, 2, 3],
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', '')}",
)
def test_every_kind_of_integer_sequence_makes_the_same_input(tokens: object) -> None:
    made = types.ModelInput.from_ints(tokens)
    assert made == types.ModelInput.from_ints([1, 2, 3])
    assert made.to_ints() == [1, 2, 3]
    assert type(made.chunks[0].tokens) is list  # pyright: ignore[reportAttributeAccessIssue]
    assert all(type(token) is int for token in made.to_ints())


@pytest.mark.parametrize(
    ("tokens", "path"),
    [
        ([1, True], "tokens[1]"),
        ([1, 2.5], "tokens[1]"),
        ([1, "2"], "tokens[1]"),
        ([1, None], "tokens[1]"),
        ([1, -2], "tokens[1]"),
        ([1, 2**31], "tokens[1]"),
        ([1, 2**70], "tokens[1]"),
        ([[1, 2]], "tokens[0]"),
        ("abc", "tokens"),
        (b"abc", "tokens"),
        ({1, 2}, "tokens"),
        ({1: 2}, "tokens"),
        (None, "tokens"),
        (7, "tokens"),
        (iter([1]), "tokens"),
        (np.array([1.5]), "tokens"),
        (np.array([True]), "tokens"),
        (np.array([[1]]), "tokens"),
        (np.array(1), "tokens"),
        (np.array([-1]), "tokens[0]"),
        (np.array(["a"]), "tokens"),
        (torch.tensor([[1]]), "tokens"),
        (torch.tensor([float("nan")]), "tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_bad_tokens_are_refused_and_named(tokens: object, path: str) -> None:
    with pytest.raises(InputError) as caught:
        types.ModelInput.from_ints(tokens)
    assert caught.value.path == path


@pytest.mark.req("B12")
def test_inputs_have_a_length_and_grow_by_copying() -> None:
    one = types.ModelInput.from_ints([1, 2])
    two = one.append_int(3)
    three = two.append(types.ImageChunk(data=b"", format="png", expected_tokens=5))
    assert (len(one), len(two), three.length, types.ModelInput.empty().length) == (2, 3, 8, 0)
    assert two.to_ints() == [1, 2, 3]
    assert len(two.chunks) == 2
    assert bool(types.ModelInput.empty())


def test_what_is_not_text_has_no_ids_and_maybe_no_length() -> None:
    picture = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")])
    with pytest.raises(InputError) as caught:
        picture.to_ints()
    assert caught.value.path == "ModelInput.chunks[0]"
    with pytest.raises(InputError, match="expected_tokens"):
        _ = picture.length


def test_dicts_of_the_right_shape_count_as_chunks() -> None:
    made = types.ModelInput(
        chunks=[
            {"tokens": (1, 2)},
            {"type": "image", "data": "aGk=", "format": "png"},
            {"location": "l", "format": "png"},
            {"dmel": "AA=="},
        ]  # pyright: ignore[reportArgumentType]
    )
    assert [chunk.type for chunk in made.chunks] == [
        "encoded_text",
        "image",
        "image_asset_pointer",
        "dmel",
    ]


@pytest.mark.parametrize("chunk", [5, None, "x", [1], {"a": 1}, {"tokens": ["x"]}, {}])
def test_bad_chunks_are_refused_and_named(chunk: object) -> None:
    with pytest.raises(InputError) as caught:
        types.ModelInput(chunks=[chunk])  # pyright: ignore[reportArgumentType]
    assert caught.value.path.startswith("ModelInput.chunks[0]")
    with pytest.raises(InputError):
        types.ModelInput.empty().append(chunk)  # pyright: ignore[reportArgumentType]


def test_packed_tokens_are_little_endian_32_bit() -> None:
    assert types.EncodedTextChunk(tokens=[5, 6]).packed().hex() == "0500000006000000"


def test_tokens_are_a_list_whatever_they_were_given_as() -> None:
    chunk = types.EncodedTextChunk(tokens=(1, 2))
    assert chunk.tokens + [3] == [1, 2, 3]  # pyright: ignore[reportOperatorIssue]  # noqa: RUF005 -- adding lists is the point
    assert chunk == types.EncodedTextChunk(tokens=[1, 2])
    with pytest.raises(InputTypeError):
        types.EncodedTextChunk(tokens={1, 2})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (bytes([0, 2, 3, 4]), 3),
        (bytes([254, 7, 1, 9]), 9),
        (bytes([1, 1, 0x80, 0x01]), 128),
    ],
)
def test_audio_length_is_read_from_the_header(header: bytes, length: int) -> None:
    assert types.DmelChunk(dmel=header + b"payload").length == length


@pytest.mark.parametrize(
    "header", [b"", b"\xfe", b"\x08\x01\x01", b"\x00", b"\x00\x00", b"\x00\x01", b"\x00\x01\x80"]
)
def test_a_bad_audio_header_is_an_input_error(header: bytes) -> None:
    with pytest.raises(InputError) as caught:
        _ = types.DmelChunk(dmel=header).length
    assert caught.value.path == "DmelChunk.dmel"


def test_reprs_of_pictures_stay_short() -> None:
    assert repr(types.ImageChunk(data=b"x" * 10**6, format="png")).startswith(
        "ImageChunk(data=<1000000 bytes>"
    )


def test_inputs_pickle() -> None:
    made = types.ModelInput.from_ints([1, 2]).append(types.DmelChunk(dmel=b"\x00\x01\x02"))
    assert pickle.loads(pickle.dumps(made)) == made
