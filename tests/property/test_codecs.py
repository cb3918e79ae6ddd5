"""Whatever is sent arrives: every type, through every codec it travels in."""

import contextlib
import types as builtin_types
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields as struct_fields

from tinkex import types
from tinkex.errors import InputError
from tinkex.wire import bodies, json_codec
from tinkex.wire import tinkex_pb2 as pb
from tinkex.wire.bounded import check_bounds
from tinkex.wire.compression import compress, decompress
from tinkex.wire.json_requests import decode_request
from tinkex.wire.proto_sampling import decode_sample_response, encode_sample_response
from tinkex.wire.proto_training import (
    decode_forward_backward,
    decode_forward_backward_output,
    encode_forward_backward,
    encode_forward_backward_output,
)
from tinkex.wire.results import ReadyResult, decode_result, encode_result
from tinkex.wire.routes import MEDIA_JSON

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
int64 = st.integers(-(2**63), 2**63 - 1)
float32 = st.floats(width=32)
finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | int64 | finite | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)


def arrays(elements: st.SearchStrategy[Any], dtype: str, shape: tuple[int, ...]):
    size = int(np.prod(shape))
    flat = st.lists(elements, min_size=size, max_size=size)
    return flat.map(lambda values: np.array(values, dtype).reshape(shape))


@st.composite
def tensors(draw: st.DrawFn, *, min_rank: int = 0, floats: st.SearchStrategy[float] = float32):
    """Dense or sparse, of either dtype. A trailing size of 0 says nothing about the leading one."""
    dtype, elements = draw(st.sampled_from([("int64", int64), ("float32", floats)]))
    if draw(st.booleans()):
        leading, trailing = st.integers(0, 3), st.lists(st.integers(1, 3), max_size=2)
        shape = (draw(leading), *draw(trailing)) if min_rank or draw(st.booleans()) else ()
        return types.TensorData(draw(arrays(elements, dtype, shape)), dtype, list(shape))
    rows, cols = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(0, cols), min_size=rows, max_size=rows))
    col = [c for n in counts for c in sorted(draw(st.permutations(range(cols)))[:n])]
    return types.TensorData(
        draw(arrays(elements, dtype, (len(col),))),
        dtype,
        [rows, cols],
        np.concatenate([[0], np.cumsum(counts, dtype="i8")]).astype("i8"),
        np.array(col, "i8"),
    )


# RFC 3339 writes offsets in whole minutes.
times = st.datetimes(
    timezones=st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
)
finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
open_families = st.builds(
    lambda kind, extra: {"type": kind, **extra},
    st.text("abcd", min_size=1, max_size=4).map("x-".__add__),
    st.dictionaries(st.text("efgh", min_size=1), json_values, max_size=2),
)

# Members whose declared type says less than what they hold.
SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "optimizer_config": st.just(types.AdamOptimizerConfig())
    | st.just(types.DimuonOptimizerConfig())
    | open_families.map(lambda fields: types.optimizers.OptimizerConfigBase(**fields)),
    "stop": st.none() | text | st.lists(text) | st.lists(st.integers(0, 2**31 - 1)),
    "usage": st.none(),
}


@cache
def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a declared type."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _constrained(parts[0], [m for m in parts[1:] if isinstance(m, msgspec.Meta)])
    if origin is Literal:
        return st.sampled_from(parts)
    if origin in (Union, builtin_types.UnionType):
        return st.one_of([values(part) for part in parts])
    if origin in (list, Sequence):
        return st.lists(values(parts[0]), max_size=3)
    if origin in (dict, Mapping):
        return st.dictionaries(values(parts[0]), values(parts[1]), max_size=3)
    return _plain(hint)


def _constrained(hint: Any, metas: list[msgspec.Meta]) -> st.SearchStrategy[Any]:
    def accepted(value: Any) -> bool:
        try:
            msgspec.convert(value, Annotated[hint, *metas])  # type: ignore[valid-type]
        except msgspec.ValidationError:
            return False
        return True

    if hint is int:
        low = max([m.ge for m in metas if m.ge is not None], default=-(2**63))
        high = min(
            [m.le for m in metas if m.le is not None]
            + [m.lt - 1 for m in metas if m.lt is not None],
            default=2**63 - 1,
        )
        return st.integers(low, high)
    if hint is float:
        low = max([m.ge for m in metas if m.ge is not None], default=None)
        high = min([m.le for m in metas if m.le is not None], default=None)
        return st.floats(low, high, allow_nan=False, allow_infinity=False).filter(accepted)
    if get_origin(hint) is list:
        least = max([m.min_length for m in metas if m.min_length is not None], default=0)
        most = max(least, 3)
        return st.lists(values(get_args(hint)[0]), min_size=least, max_size=most)
    if hint is str:
        return text.filter(accepted)
    return values(hint).filter(accepted)


def _plain(hint: Any) -> st.SearchStrategy[Any]:
    known: dict[Any, st.SearchStrategy[Any]] = {
        str: text,
        int: int64,
        float: finite,
        bool: st.booleans(),
        bytes: st.binary(max_size=8),
        type(None): st.none(),
        Any: json_values,
        object: json_values,
        datetime: times,
        types.TensorData: tensors(floats=finite32),
    }
    if hint in known:
        return known[hint]
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    assert issubclass(hint, msgspec.Struct), hint
    return instances(hint)


@st.composite
def instances(draw: st.DrawFn, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Instances of a struct, each member from its declaration."""
    members = {}
    for field in struct_fields(kind):
        if field.required or draw(st.booleans()):
            special = SPECIAL.get(field.name)
            members[field.name] = draw(values(field.type) if special is None else special)
    if kind is types.OptimStepRequest:
        members.pop("optimizer_params", None)
        members["adam_params"] = draw(instances(types.AdamParams))
    try:
        return kind(**members)
    except InputError:
        # A rule that spans members; rare enough to draw again.
        from hypothesis import reject

        reject()


STRUCTS = sorted(
    {
        value
        for module in (types, bodies)
        for name in dir(module)  # names of `types` are loaded when they are first used
        for value in (getattr(module, name),)
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value not in (bodies.WireBody, types.Usage)
    },
    key=lambda kind: kind.__name__,
)


@pytest.mark.req("S6")
@pytest.mark.req("S12")
@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_every_struct_survives_json_and_writes_null_only_where_it_says_something(
    kind: type[msgspec.Struct], data: st.DataObject
):
    value = data.draw(instances(kind))
    encoded = json_codec.encode(value)
    try:
        check_bounds(value)
    except InputError:
        with pytest.raises(InputError):
            decode_request(kind, encoded)
    else:
        assert decode_request(kind, encoded) == value
    if kind is not types.CreateSessionRequest:  # leaves out what its constructor requires
        assert json_codec.decode(kind, encoded) == value
    written = msgspec.json.decode(encoded)
    explicit = bodies.EXPLICIT_NULLS.get(kind, frozenset())
    for name in kind.__struct_fields__:
        if getattr(value, name) is None:
            assert (name in written) == (name in explicit)


tokens = st.lists(st.integers(0, 2**31 - 1), max_size=5)
chunks = st.one_of(
    st.builds(types.EncodedTextChunk, tokens=tokens),
    st.builds(
        types.ImageChunk,
        data=st.binary(max_size=9),
        format=st.sampled_from(["png", "jpeg"]),
        expected_tokens=st.none() | st.integers(0, 2**31 - 1),
    ),
    st.builds(types.DmelChunk, dmel=st.binary(max_size=9)),
)
counts = st.integers(0, 2**63 - 1)
span_fields = {"sequence_id": text.filter(bool), "offset": counts, "length": counts}
spans = st.builds(types.PromptProvenanceSpan, **span_fields) | st.builds(
    types.SampledProvenanceSpan, **span_fields
)
span_lists = st.none() | st.lists(spans, min_size=1, max_size=3)


@st.composite
def datums(draw: st.DrawFn) -> types.Datum:
    own, targets = draw(span_lists), None
    if own is not None:
        targets = draw(st.lists(spans, max_size=3))
    # Names the protocol does not know keep the dtype they have.
    names = text.map("x".__add__)
    return types.Datum(
        types.ModelInput(chunks=draw(st.lists(chunks, max_size=3))),
        draw(st.dictionaries(names, tensors(min_rank=1), max_size=3)),
        own,
        targets,
    )


@settings(max_examples=40, deadline=None)
@given(
    data=st.lists(datums(), max_size=3),
    config=st.dictionaries(text, finite | text, max_size=3),
    seq_id=st.integers(0, 2**31 - 1),
    names=st.tuples(text, text),
    forward_only=st.booleans(),
)
def test_training_batches_survive_protobuf_and_compression(
    data: list[types.Datum],
    config: dict[str, float | str],
    seq_id: int,
    names: tuple[str, str],
    forward_only: bool,
):
    encoded = encode_forward_backward(
        model_id=names[0],
        seq_id=seq_id,
        data=data,
        loss_fn=names[1],
        loss_fn_config=config,
        forward_only=forward_only,
    )
    decoded = decode_forward_backward(decompress(compress(encoded), len(encoded)))
    assert decoded.data == data
    assert (decoded.model_id, decoded.loss_fn) == names
    assert decoded.seq_id == seq_id
    assert decoded.loss_fn_config == config
    assert decoded.forward_only == forward_only


# Lengths around those where one more byte is needed to write them.
long_texts = st.sampled_from([31, 32, 33, 4095, 4096]).map(
    lambda size: types.EncodedTextChunk(tokens=range(size))
)
odd_tensors = st.sampled_from(
    [
        types.TensorData([], "float32"),
        types.TensorData([1, 2], "int64"),
        types.TensorData([1, 2], "int64", [-1, 1]),
        types.TensorData([], "int64", [0, 2**40]),
        types.TensorData([], "float32", [3, 0, 1]),
        types.TensorData(np.array(2.5, "f4"), "float32", []),
        types.TensorData(np.zeros((40, 50), "f4"), "float32", [40, 50]),
    ]
)
# Where one name begins with another, their order is a matter of protobuf's version.
distinct_names = text.map(lambda name: f"{len(name)}{name}")
odd_inputs = st.dictionaries(distinct_names, tensors() | odd_tensors, max_size=4) | st.builds(
    lambda tensor: {"": tensor}, odd_tensors
)


@st.composite
def odd_datums(draw: st.DrawFn) -> types.Datum:
    """Also what a server would refuse: protobuf has bytes for it all the same."""
    own = draw(span_lists)
    return types.Datum(
        types.ModelInput(chunks=draw(st.lists(chunks | long_texts, max_size=3))),
        draw(odd_inputs),
        own,
        None if own is None else draw(st.lists(spans, max_size=3)),
    )


def as_message(datum: types.Datum) -> pb.Datum:
    """The same datum by way of protobuf's own objects."""
    message = pb.Datum()
    for chunk in datum.model_input.chunks:
        added = message.model_input.add()
        if isinstance(chunk, types.EncodedTextChunk):
            added.encoded_text.tokens = np.array(chunk.tokens, "<i4").tobytes()
        elif isinstance(chunk, types.ImageChunk):
            added.image.data = chunk.data
            added.image.format = chunk.format
            if chunk.expected_tokens is not None:
                added.image.expected_tokens = chunk.expected_tokens
        else:
            added.dmel.dmel = chunk.dmel
    for name, tensor in datum.loss_fn_inputs.items():
        entry = message.loss_fn_inputs[name]
        numbers = np.array(tensor.data, "<i8" if tensor.dtype == "int64" else "<f4").tobytes()
        if tensor.sparse_crow_indices is None:
            entry.dense = numbers
        else:
            entry.sparse_csr.values = numbers
            entry.sparse_csr.crow_indices = np.array(tensor.sparse_crow_indices, "<i8").tobytes()
            entry.sparse_csr.col_indices = np.array(tensor.sparse_col_indices, "<i8").tobytes()
        entry.dtype = pb.DTYPE_INT64 if tensor.dtype == "int64" else pb.DTYPE_FLOAT32
        entry.shape.extend(tensor.shape or ())
    for field in ("model_input_spans", "loss_fn_input_spans"):
        for span in getattr(datum, field) or ():
            added = getattr(message, field).add()
            kind = "prompt" if isinstance(span, types.PromptProvenanceSpan) else "sampled"
            target = getattr(added, f"{kind}_tokens")
            target.sequence_id, target.offset = span.sequence_id, span.offset
            target.length = span.length
    return message


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(odd_datums(), max_size=3),
    config=st.dictionaries(text, finite | text, max_size=3),
    seq_id=st.none() | st.integers(0, 2**31 - 1),
    names=st.tuples(text, text),
    forward_only=st.booleans(),
)
def test_training_batches_are_byte_for_byte_what_protobuf_itself_writes(
    data: list[types.Datum],
    config: dict[str, float | str],
    seq_id: int | None,
    names: tuple[str, str],
    forward_only: bool,
):
    message = pb.ForwardBackwardRequest(
        model_id=names[0],
        seq_id=seq_id,
        data=map(as_message, data),
        loss_fn=names[1],
        forward_only=forward_only,
    )
    for key, value in config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config[key] = value
            message.loss_fn_config_v2[key].number = value
    encoded = encode_forward_backward(
        model_id=names[0],
        seq_id=seq_id,
        data=data,
        loss_fn=names[1],
        loss_fn_config=config,
        forward_only=forward_only,
    )
    assert encoded == message.SerializeToString(deterministic=True)


@st.composite
def outputs(draw: st.DrawFn, floats: st.SearchStrategy[float] = float32):
    names = draw(st.lists(text, max_size=3, unique=True))
    one = st.fixed_dictionaries({name: tensors(min_rank=1, floats=floats) for name in names})
    return types.ForwardBackwardOutput(
        draw(st.text("abc", min_size=1)),
        draw(st.lists(one, max_size=4)),
        draw(st.dictionaries(text, st.floats(allow_nan=False), max_size=3)),
    )


def dense(output: types.ForwardBackwardOutput) -> types.ForwardBackwardOutput:
    """Results travel dense."""
    return types.ForwardBackwardOutput(
        output.loss_fn_output_type,
        [
            {name: types.TensorData.from_numpy(tensor.to_numpy()) for name, tensor in each.items()}
            for each in output.loss_fn_outputs
        ],
        output.metrics,
    )


@settings(max_examples=40, deadline=None)
@given(output=outputs())
def test_training_results_survive_protobuf(output: types.ForwardBackwardOutput):
    decoded = decode_forward_backward_output(encode_forward_backward_output(output))
    assert decoded == dense(output)


@settings(max_examples=40, deadline=None)
@given(output=outputs(finite32))
def test_training_results_survive_json(output: types.ForwardBackwardOutput):
    media, body = encode_result("Forward", ReadyResult(output), accept=MEDIA_JSON)
    assert decode_result("Forward", media, body) == ReadyResult(output)


@st.composite
def topk(draw: st.DrawFn) -> types.TopkLogprobs:
    """Rows as a server makes them: empty cells only at the end."""
    cells = st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 0, width=32))
    width = draw(st.integers(1, 3))
    full = st.lists(cells, min_size=width, max_size=width)
    rows = draw(st.lists(st.none() | st.lists(cells, min_size=1, max_size=width), max_size=3))
    return types.TopkLogprobs.from_lists([*rows, draw(full)])


@st.composite
def sequences(draw: st.DrawFn) -> types.SampledSequence:
    ids = draw(tokens)
    logprobs = st.lists(st.floats(width=32, allow_nan=False), min_size=len(ids), max_size=len(ids))
    return types.SampledSequence(
        draw(st.sampled_from(["stop", "length"])),
        draw(text),
        tokens=ids,
        # Log-probabilities of no tokens cannot be told from none.
        logprobs=draw(st.none() | logprobs) if ids else None,
        topk_logprobs_np=draw(st.none() | topk()),
    )


@st.composite
def samples(draw: st.DrawFn, *, old: bool = False) -> types.SampleResponse:
    size = draw(st.integers(1, 4))
    shape = (size, draw(st.integers(1, 2)))
    alternatives = types.PromptAltTokens(
        types.TensorData(draw(arrays(int64, "i8", shape)), "int64", list(shape)),
        types.TensorData(draw(arrays(float32, "f4", shape)), "float32", list(shape)),
    )
    return types.SampleResponse(
        draw(st.lists(sequences(), max_size=3)),
        prompt_logprobs_np=draw(st.none() | arrays(float32, "f4", (size,))),
        topk_prompt_logprobs_np=draw(st.none() | topk()),
        target_prompt_logprobs=draw(
            st.none() | tensors(min_rank=1, floats=finite32 if old else float32)
        ),
        prompt_cache_hit_tokens=draw(st.integers(0, 2**31 - 1)),
        prompt_alt_tokens=None if old else draw(st.none() | st.just(alternatives)),
    )


def ids_of(response: types.SampleResponse) -> list[str]:
    return [sequence.sequence_id for sequence in response.sequences]


@settings(max_examples=40, deadline=None)
@given(response=samples())
def test_samples_survive_protobuf(response: types.SampleResponse):
    decoded = decode_sample_response(encode_sample_response(response), ids_of(response))
    assert decoded == response


@settings(max_examples=40, deadline=None)
@given(response=samples(old=True))
def test_samples_survive_json(response: types.SampleResponse):
    media, body = encode_result("Sample", ReadyResult(response), accept=MEDIA_JSON)
    assert decode_result("Sample", media, body, ids_of(response)) == ReadyResult(response)


@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=200))
def test_random_bytes_decode_or_raise_input_error(body: bytes):
    for decode in (
        decode_forward_backward,
        decode_forward_backward_output,
        lambda data: decode_sample_response(data, []),
        lambda data: decode_request(types.SampleRequest, data),
        lambda data: decode_result("OptimStep", MEDIA_JSON, data),
        lambda data: decompress(data, 1000),
    ):
        with contextlib.suppress(InputError):
            decode(body)


@settings(max_examples=100, deadline=None)
@given(body=json_values)
def test_random_json_decodes_or_raises_input_error(body: object):
    data = msgspec.json.encode(body)
    for kind in (types.SampleRequest, types.OptimStepRequest, types.TelemetrySendRequest):
        with contextlib.suppress(InputError):
            decode_request(kind, data)
