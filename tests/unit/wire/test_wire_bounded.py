"""Every member of every request has a bound, and what exceeds one is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import pytest
from msgspec.structs import fields as struct_fields

import tinkex
from tinkex import types
from tinkex.errors import InputError, quoted, shortened
from tinkex.types import bounds
from tinkex.wire import bodies
from tinkex.wire import tinkex_pb2 as pb
from tinkex.wire.bounded import _struct_check, check_bounds, integer_bounds, whole_number
from tinkex.wire.json_requests import (
    TRAINING_BODIES,
    decode_ids,
    decode_request,
    decode_training_head,
)
from tinkex.wire.json_scan import Counts, count_values
from tinkex.wire.proto_scan import check_shapes, without_data
from tinkex.wire.proto_training import (
    decode_forward_backward,
    decode_head,
    encode_forward_backward,
)
from tinkex.wire.routes import ROUTES


def plain(hint: Any) -> list[Any]:
    """The simple types in a hint, through lists, maps and unions; not those msgspec bounds."""
    if get_origin(hint) is Literal:
        return []
    if get_origin(hint) is Annotated:
        inner, meta = get_args(hint)[:2]
        token = isinstance(meta, msgspec.Meta) and meta.lt == 2**31
        return [] if token else plain(inner)
    parts = get_args(hint)
    return [kind for part in parts for kind in plain(part)] if parts else [hint]


def structs(kind: type[msgspec.Struct], seen: set[type[msgspec.Struct]]) -> None:
    if kind not in seen:
        seen.add(kind)
        for field in struct_fields(kind):
            for part in plain(field.type):
                if isinstance(part, type) and issubclass(part, msgspec.Struct):
                    structs(part, seen)


def requests() -> list[type[msgspec.Struct]]:
    seen: set[type[msgspec.Struct]] = set()
    for route in ROUTES:
        kind = TRAINING_BODIES.get(route.name, route.request)
        if kind is not None:
            structs(kind, seen)
    return sorted(seen, key=lambda kind: kind.__name__)


def members(wanted: type) -> list[Any]:
    return [
        pytest.param(kind, field.name, field.type, id=f"{kind.__name__}.{field.name}")
        for kind in requests()
        for field in struct_fields(kind)
        if wanted in plain(field.type)
    ]


def wrapped(hint: Any, value: object) -> object:
    """A value of a member in the lists and maps that its hint has around it."""
    text = str(hint)
    if "dict[" in text:
        return {"key": value}
    return [value] if "list[" in text or "Sequence[" in text else value


def problem(kind: type[msgspec.Struct], name: str, value: object) -> Any:
    check = _struct_check(kind)
    assert check is not None
    fields = {field.name: None for field in struct_fields(kind)}
    return check(SimpleNamespace(**{**fields, name: value}))


@pytest.mark.parametrize(("kind", "name", "hint"), members(int))
def test_every_integer_of_every_request_has_a_bound(kind: Any, name: str, hint: Any) -> None:
    least, most = integer_bounds(name)
    assert -(2**63) <= least <= most < 2**64
    for value in (most + 1, least - 1, 2**200):
        reason, place = problem(kind, name, wrapped(hint, value))
        assert str(most) in reason
        assert place.startswith(f".{name}")
        assert len(reason) < 200
    assert problem(kind, name, wrapped(hint, most)) is None
    assert problem(kind, name, wrapped(hint, least)) is None


@pytest.mark.parametrize(("kind", "name", "hint"), members(str))
def test_every_text_of_every_request_has_a_bound(kind: Any, name: str, hint: Any) -> None:
    if get_origin(hint) is dict or "dict[" in str(hint):
        longest = bounds.TEXT_CHARACTERS

        def make(length: int) -> Any:
            return {"x" * length: None}
    else:
        longest = bounds.TEXTS.get(name, bounds.TEXT_CHARACTERS)

        def make(length: int) -> Any:
            return wrapped(hint, "x" * length)

    reason, _ = problem(kind, name, make(longest + 1))
    assert str(longest) in reason
    assert len(reason) < 200
    if "dict[" not in str(hint):
        assert problem(kind, name, make(longest)) is None


def test_only_seeds_and_seq_ids_leave_the_numbers_that_json_readers_hold() -> None:
    outside = {name for name, (_, most) in bounds.INTEGERS.items() if most > bounds.LARGEST}
    assert outside == {"seed", "seq_id"}
    assert set(bounds.INTEGERS) <= {
        field.name for kind in requests() for field in struct_fields(kind)
    }


STEP: dict[str, Any] = {"model_id": "m", "adam_params": {"learning_rate": 1.0}}
SAMPLE: dict[str, Any] = {"prompt": {"chunks": []}, "sampling_params": {}, "num_samples": 1}


@pytest.mark.parametrize(
    ("kind", "body", "path"),
    [
        (types.OptimStepRequest, {**STEP, "seq_id": 2**62 + 1}, "seq_id"),
        (types.OptimStepRequest, {**STEP, "seq_id": -1}, "seq_id"),
        (
            types.SampleRequest,
            {**SAMPLE, "sampling_params": {"max_tokens": 2**31}},
            "sampling_params.max_tokens",
        ),
        (
            types.SampleRequest,
            {
                **SAMPLE,
                "prompt": {
                    "chunks": [
                        {"type": "encoded_text", "tokens": []},
                        {
                            "type": "image",
                            "data": "",
                            "format": "png",
                            "expected_tokens": 2**40,
                        },
                    ]
                },
            },
            "prompt.chunks[1].expected_tokens",
        ),
        (types.SampleRequest, {**SAMPLE, "prompt_alt_tokens_k": 10**7}, "prompt_alt_tokens_k"),
        (
            types.SampleRequest,
            {**SAMPLE, "sampling_params": {"stop": ["x"] * 65}},
            "sampling_params.stop",
        ),
        (
            types.SampleRequest,
            {**SAMPLE, "sampling_params": {"stop": ["a", "x" * 1025]}},
            "sampling_params.stop[1]",
        ),
        (
            types.SampleRequest,
            {**SAMPLE, "sampling_params": {"stop": "x" * 1025}},
            "sampling_params.stop",
        ),
        (
            types.FuturesRetrieveRequest,
            {"target": {"sampling_session_id": "s", "cloned_sampler_id": 2**60}},
            "target.cloned_sampler_id",
        ),
        (bodies.ReleaseNumbersRequest, {"model_id": "m", "seq_ids": [1, 2**60]}, "seq_ids[1]"),
        (bodies.ReleaseNumbersRequest, {"model_id": "m", "seq_ids": [1] * 10_001}, "seq_ids"),
        (types.GetInfoRequest, {"model_id": "m" * 257}, "model_id"),
        (
            types.CreateSessionRequest,
            {"tags": ["t"] * 65, "user_metadata": {}, "sdk_version": ""},
            "tags",
        ),
    ],
)
def test_what_is_out_of_bounds_is_refused_where_it_is_decoded(
    kind: Any, body: Any, path: str
) -> None:
    with pytest.raises(InputError) as refused:
        decode_request(kind, json.dumps(body))
    assert refused.value.path == path
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("depth", [65, 900, 100_000])
def test_free_form_members_are_not_nested_deeply(depth: int) -> None:
    deep = b'{"tags":[],"sdk_version":"","user_metadata":{"a":' + b"[" * depth + b"]" * depth
    with pytest.raises(InputError, match="nested"):
        decode_request(types.CreateSessionRequest, deep + b"}}")
    # Nor do members that nobody reads.
    with pytest.raises(InputError, match=r"nested|missing"):
        decode_request(types.GetInfoRequest, b'{"x":' + b"[" * depth + b"]" * depth + b"}")


def test_as_deep_as_allowed_is_fine() -> None:
    inner = "[" * 60 + "]" * 60
    body = f'{{"tags":[],"sdk_version":"","user_metadata":{{"a":{inner}}}}}'
    check_bounds(decode_request(types.CreateSessionRequest, body))


@pytest.mark.parametrize("digits", [20, 4_000, 5_000, 1_000_000])
def test_numbers_of_any_length_are_refused_shortly(digits: int) -> None:
    for member in ("seq_id", "other"):
        body = f'{{"model_id":"m","{member}":{"9" * digits}}}'
        if member == "other":
            assert decode_request(types.GetInfoRequest, body).model_id == "m"
            continue
        with pytest.raises(InputError) as refused:
            decode_request(types.OptimStepRequest, body)
        assert len(str(refused.value)) < 200


def test_whole_numbers_of_headers_and_queries() -> None:
    assert [whole_number(text) for text in ("0", "007", "12")] == [0, 7, 12]
    assert whole_number("0" * 9_000 + "5") == 5
    for text in ("", "-1", "+1", "1.0", "²", "٣", " 1", "9" * 17, "9" * 5_000):
        assert whole_number(text) is None


def test_values_are_shown_shortly() -> None:
    assert quoted("abc") == "'abc'"
    assert quoted([1, 2]) == "[1, 2]"
    for value in (
        "x" * 10**6,
        b"x" * 10**6,
        [1] * 10**6,
        10**5_000,
        ["x" * 10**6],
        {"a": "x" * 999},
    ):
        assert len(quoted(value)) <= 101
    assert shortened("x" * 10**6) == "x" * 100 + "…"


SOURCE = Path(tinkex.__file__).parent
SHOWN = {
    # Methods that show a value of ours, or the name of an attribute.
    "types/tensors.py": 1,
    "types/training.py": 1,
    "types/value.py": 1,
    "types/optimizers.py": 1,
    "types/sequences.py": 2,
    # Ids of the server's own, and its settings.
    "server/api/sessions.py": 1,
    "server/api/service.py": 1,
    # A group of routes on the command line of an operator is cut before it is quoted.
    "server/api/identity.py": 2,
    "server/api/access.py": 1,
    "server/api/models.py": 3,
}


def test_messages_quote_what_callers_sent_with_the_one_helper() -> None:
    found: dict[str, int] = {}
    for package in ("types", "wire", "server/api", "server/openai"):
        for file in (SOURCE / package).rglob("*.py"):
            count = len(re.findall(r"!r\}", file.read_text()))
            if count:
                found[str(file.relative_to(SOURCE))] = count
    assert {name: count for name, count in found.items() if count > SHOWN.get(name, 0)} == {}


# -- bodies, before they are decoded ----------------------------------------------------------


def test_signs_inside_of_texts_are_left_out_where_they_would_be_too_many() -> None:
    most = Counts(3, 10)
    text = json.dumps({"a": ",[{" * 50 + '\\"' * 9, "b": 'x"y'}).encode()
    assert count_values(text, most) == Counts(1, 3)
    assert count_values(b'{"a":[1,2,3]}', most) == Counts(2, 5)
    assert count_values(b"[" + b"1," * 20 + b"1]", most).values == 22
    # Leaving out very many texts would itself take long.
    many = b'["",' + b'"",' * 300_000 + b'"",""]'
    assert count_values(many, most).values > 300_000


def test_the_ids_of_a_batch_are_read_without_its_data() -> None:
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": [1, 2]},
    )
    body = encode_forward_backward(
        model_id="m",
        seq_id=7,
        data=[datum] * 3,
        loss_fn="custom",
        loss_fn_config={"loss_id": "x", "n": 1.0},
        forward_only=True,
    )
    head = decode_head(body)
    assert (head.model_id, head.seq_id, head.data, head.loss_fn) == ("m", 7, [], "custom")
    assert (head.loss_fn_config, head.forward_only) == ({"loss_id": "x", "n": 1.0}, True)
    assert len(without_data(body)) < len(body)
    for bad in (body[:-3], b"\xff", b"\x1a\x05x", body + b"\x0f"):
        with pytest.raises(InputError, match="not a valid ForwardBackwardRequest"):
            decode_head(bad)


def test_the_ids_of_a_batch_in_json_are_read_whatever_its_data_is() -> None:
    good = {"loss_fn": "custom", "loss_fn_config": {"loss_id": "x"}, "data": [{"odd": 1}]}
    head = decode_training_head(
        json.dumps({"model_id": "m", "seq_id": 3, "forward_backward_input": good})
    )
    assert (head.model_id, head.seq_id, head.loss_fn_config) == ("m", 3, {"loss_id": "x"})
    for batch in (None, 5, [], {"loss_fn": 1}):
        body = {"model_id": "m", "seq_id": 3, "forward_input": batch}
        head = decode_training_head(json.dumps(body), forward_only=True)
        assert (head.model_id, head.seq_id, head.loss_fn) == ("m", 3, "")
    for ids in ({}, {"model_id": 1}, {"model_id": "m", "seq_id": "1"}, {"model_id": "m" * 300}):
        with pytest.raises(InputError):
            decode_ids(json.dumps(ids))


def packed_shape(count: int) -> bytes:
    """A training request whose one tensor has `count` dimensions of 1."""

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2]) + varint(len(content)) + content

    def varint(value: int) -> bytes:
        parts = bytearray()
        while value > 127:
            parts.append(value & 127 | 128)
            value >>= 7
        return bytes([*parts, value])

    tensor = field(1, bytes(8)) + b"\x18\x02" + field(4, b"\x01" * count)
    entry = field(1, b"weights") + field(2, tensor)
    return field(1, b"m") + b"\x10\x01" + field(3, field(2, entry)) + field(4, b"cross_entropy")


def test_a_chunk_of_very_many_tokens_is_refused_before_it_is_parsed() -> None:
    most = bounds.LISTS["tokens"]
    for count, refused in ((most, False), (most + 1, True)):
        request = pb.ForwardBackwardRequest(model_id="m", loss_fn="cross_entropy")
        request.data.add()
        chunks = request.data.add().model_input
        chunks.add().encoded_text.tokens = b"\0" * 4
        chunks.add().encoded_text.tokens = b"\0" * (4 * count)
        data = request.SerializeToString()
        if not refused:
            check_shapes(data)
            continue
        for check in (check_shapes, decode_forward_backward):
            with pytest.raises(InputError) as caught:
                check(data)
            assert "data[1].model_input.chunks[1].tokens" in str(caught.value)
            assert str(most) in str(caught.value)


def test_a_tensor_of_very_many_dimensions_is_refused_before_it_is_parsed() -> None:
    check_shapes(packed_shape(8))
    with pytest.raises(InputError) as refused:
        check_shapes(packed_shape(1_000_000))
    assert refused.value.path == 'data[0].loss_fn_inputs["weights"]'
    assert "8 dimensions" in str(refused.value)
