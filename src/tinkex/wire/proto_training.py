"""Training batches and their results as protobuf."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

from tinkex.errors import InputError, InputTypeError, quoted
from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    TensorData,
)
from tinkex.wire.proto_scan import check_shapes, without_data
from tinkex.wire.proto_writer import write_datum
from tinkex.wire.values import (
    PACKED,
    construct,
    dtype_code,
    item_bytes,
    pack,
    pack_ints,
    parse,
    read_tensor,
    reshape,
    unpack,
    widen,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from tinkex.types import ModelInputChunk, ProvenanceSpans, TensorDtype
    from tinkex.wire import tinkex_pb2 as pb
    from tinkex.wire.proto_writer import Piece

    Span = PromptProvenanceSpan | SampledProvenanceSpan

_INT32_MAX = (1 << 31) - 1

# A record without fields says how many datums it stands for and nothing else; without a
# limit a few bytes could ask for any number of empty results.
_MAX_BARE_DATUMS = 1 << 20


@dataclass(frozen=True, slots=True)
class DecodedForwardBackward:
    """A training batch as the server sees it."""

    model_id: str
    seq_id: int | None
    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] = field(default_factory=dict[str, "float | str"])
    forward_only: bool = False

    def checked(self) -> ForwardBackwardInput:
        """The batch as an engine takes it; raises InputError for a loss or values it refuses."""
        return ForwardBackwardInput(
            data=self.data,
            loss_fn=cast("Any", self.loss_fn),
            loss_fn_config=self.loss_fn_config,
        )


def encode_forward_backward(
    *,
    model_id: str,
    seq_id: int | None,
    data: Sequence[Datum],
    loss_fn: str,
    loss_fn_config: Mapping[str, float | str] | None = None,
    forward_only: bool = False,
) -> bytes:
    """Serialize a batch, equal batches alike; InputError names the part that has no encoding."""
    from tinkex.wire import tinkex_pb2 as pb

    pieces: list[Piece] = [_before_data(model_id, seq_id)]
    try:
        # Only what stands before and after the data is small enough for message objects.
        after = pb.ForwardBackwardRequest(loss_fn=loss_fn, forward_only=forward_only)
        if loss_fn_config:
            _fill_config(after, loss_fn_config)
        for index, datum in enumerate(data):
            write_datum(pieces, datum, f"data[{index}]")
    except UnicodeEncodeError as error:
        raise _not_unicode(error) from error
    pieces.append(after.SerializeToString(deterministic=True))
    return b"".join(pieces)


def renumber_forward_backward(body: bytes, model_id: str, old: int, seq_id: int) -> bytes:
    """The batch that was written with the number `old`, with another one."""
    if seq_id == old:
        return body
    data = memoryview(body)[len(_before_data(model_id, old)) :]
    return b"".join([_before_data(model_id, seq_id), data])


def _before_data(model_id: str, seq_id: int | None) -> bytes:
    """What of a batch's encoding depends on its number."""
    from tinkex.wire import tinkex_pb2 as pb

    if seq_id is not None and not 0 <= seq_id <= _INT32_MAX:
        raise InputError(f"must be between 0 and {_INT32_MAX}, not {seq_id}", "seq_id")
    try:
        return pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id).SerializeToString()
    except UnicodeEncodeError as error:
        raise _not_unicode(error) from error


def _not_unicode(error: UnicodeEncodeError) -> InputError:
    return InputError(f"the text {quoted(error.object)} is not valid Unicode")


def decode_forward_backward(data: bytes) -> DecodedForwardBackward:
    """Read a batch; raises InputError for anything malformed."""
    from tinkex.wire import tinkex_pb2 as pb

    check_shapes(data)
    message = parse(pb.ForwardBackwardRequest, data)
    return DecodedForwardBackward(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=[_read_datum(datum, f"data[{i}]") for i, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        loss_fn_config=_read_config(message),
        forward_only=message.forward_only,
    )


def decode_head(data: bytes) -> DecodedForwardBackward:
    """A batch without its data; raises InputError where that much cannot be read."""
    return decode_forward_backward(without_data(data))


def encode_forward_backward_output(
    output: ForwardBackwardOutput, *, deterministic: bool = False
) -> bytes:
    """Serialize a result; datums in a row share a record while their shapes agree."""
    from tinkex.wire import tinkex_pb2 as pb

    message = pb.ForwardBackwardOutput(
        loss_fn_output_type=output.loss_fn_output_type, metrics=dict(output.metrics)
    )
    for run in _runs(output.loss_fn_outputs):
        _fill_record(message.loss_fn_outputs.add(), run)
    return message.SerializeToString(deterministic=deterministic)


def decode_forward_backward_output(data: bytes) -> ForwardBackwardOutput:
    """Read a result: one dict of tensors per datum, in order."""
    from tinkex.wire import tinkex_pb2 as pb

    message = parse(pb.ForwardBackwardOutput, data)
    records = message.loss_fn_outputs
    outputs: list[dict[str, TensorData]] = []
    for index, record in enumerate(records):
        path = f"loss_fn_outputs[{index}]"
        if index and set(record.fields) != set(records[0].fields):
            raise InputError("field names differ between records", path)
        outputs += _read_record(record, path)
    kind = message.loss_fn_output_type
    return ForwardBackwardOutput(
        # A qualified name is kept as the bare class name.
        loss_fn_output_type=kind.rsplit(":", 1)[-1] if records else kind or "ArrayRecord",
        loss_fn_outputs=outputs,
        metrics=dict(message.metrics),
    )


def _fill_config(message: pb.ForwardBackwardRequest, config: Mapping[str, float | str]) -> None:
    """Numbers go into both maps: servers before text values read only the first."""
    for key, value in config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        elif isinstance(value, (int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]  # checks what a caller passed
            message.loss_fn_config[key] = value
            message.loss_fn_config_v2[key].number = value
        else:
            raise InputTypeError(
                f"must be a number or a string, not {type(value).__name__}",
                f'loss_fn_config["{key}"]',
            )


def _read_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    config: dict[str, float | str] = {}
    for key, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise InputError("neither a number nor a text", f'loss_fn_config["{key}"]')
        config[key] = value.text if kind == "text" else value.number
    return config


def _read_datum(message: pb.Datum, path: str) -> Datum:
    chunks = [
        _read_chunk(chunk, f"{path}.model_input.chunks[{index}]")
        for index, chunk in enumerate(message.model_input)
    ]
    inputs = {
        name: read_tensor(tensor, f'{path}.loss_fn_inputs["{name}"]')
        for name, tensor in message.loss_fn_inputs.items()
    }
    model_input = construct(f"{path}.model_input", ModelInput, chunks=chunks)
    return construct(
        path,
        Datum,
        model_input=model_input,
        loss_fn_inputs=inputs,
        **_read_provenance(message, path),
    )


def _read_chunk(message: pb.Chunk, path: str) -> ModelInputChunk:
    kind = message.WhichOneof("chunk")
    if kind == "encoded_text":
        tokens = unpack(message.encoded_text.tokens, "<i4", f"{path}.tokens")
        return construct(path, EncodedTextChunk, tokens=tokens.tolist())
    if kind == "image":
        image = message.image
        expected = image.expected_tokens if image.HasField("expected_tokens") else None
        return construct(
            path, ImageChunk, data=image.data, format=image.format, expected_tokens=expected
        )
    if kind == "dmel":
        return construct(path, DmelChunk, dmel=message.dmel.dmel)
    raise InputError("unknown kind of chunk; known are encoded_text, image and dmel", path)


def _read_provenance(message: pb.Datum, path: str) -> dict[str, ProvenanceSpans]:
    """Both lists of spans, or neither."""
    if not message.model_input_spans and not message.loss_fn_input_spans:
        return {}
    return {
        name: [
            _read_span(span, f"{path}.{name}[{index}]")
            for index, span in enumerate(getattr(message, name))
        ]
        for name in ("model_input_spans", "loss_fn_input_spans")
    }


def _read_span(message: pb.ProvenanceSpan, path: str) -> Span:
    kind = message.WhichOneof("span")
    if kind is None:
        raise InputError("neither prompt_tokens nor sampled_tokens", path)
    make = PromptProvenanceSpan if kind == "prompt_tokens" else SampledProvenanceSpan
    span = message.prompt_tokens if kind == "prompt_tokens" else message.sampled_tokens
    return construct(
        path, make, sequence_id=span.sequence_id, offset=span.offset, length=span.length
    )


# What datums must share to sit in one record: per field its dtype and trailing shape.
_Layout = tuple[tuple[str, str, tuple[int, ...]], ...]
_Arrays = dict[str, "tuple[TensorDtype, npt.NDArray[Any]]"]


def _runs(outputs: Sequence[Mapping[str, TensorData]]) -> Iterator[list[_Arrays]]:
    """Cut the outputs wherever the layout changes."""
    run: list[_Arrays] = []
    previous: _Layout | None = None
    for index, output in enumerate(outputs):
        if output.keys() != outputs[0].keys():
            raise InputError(
                f"has the fields {sorted(output)}, the first datum {sorted(outputs[0])}",
                f"loss_fn_outputs[{index}]",
            )
        arrays: _Arrays = {
            name: (tensor.dtype, tensor.to_numpy()) for name, tensor in output.items()
        }
        layout = tuple((name, dtype, array.shape[1:]) for name, (dtype, array) in arrays.items())
        if run and layout != previous:
            yield run
            run = []
        previous = layout
        run.append(arrays)
    if run:
        yield run


def _fill_record(message: pb.ArrayRecord, run: list[_Arrays]) -> None:
    message.num_datums = len(run)
    for name, (dtype, first) in run[0].items():
        parts = [pack(arrays[name][1], PACKED[dtype]) for arrays in run]
        batched = message.fields[name]
        batched.data = b"".join(parts)
        batched.offsets = pack_ints(list(accumulate((len(part) for part in parts), initial=0)))
        batched.dtype = dtype_code(dtype)
        batched.trailing_shape.extend(first.shape[1:])


def _read_record(message: pb.ArrayRecord, path: str) -> list[dict[str, TensorData]]:
    columns: dict[str, list[TensorData]] = {}
    for name, tensor in message.fields.items():
        columns[name] = _read_batched(tensor, f'{path}.fields["{name}"]')
    count = message.num_datums
    if count == 0 and columns:
        count = len(next(iter(columns.values())))
    if count < 0 or (not columns and count > _MAX_BARE_DATUMS):
        raise InputError(f"{count} datums are not possible here", f"{path}.num_datums")
    for name, column in columns.items():
        if len(column) < count:
            raise InputError(f"{len(column)} values for {count} datums", f'{path}.fields["{name}"]')
    outputs: list[dict[str, TensorData]] = []
    for i in range(count):
        output: dict[str, TensorData] = {}
        for name, column in columns.items():
            output[name] = column[i]
        outputs.append(output)
    return outputs


def _read_batched(message: pb.BatchedTensor, path: str) -> list[TensorData]:
    trailing = list(message.trailing_shape)
    if trailing and min(trailing) < 0:
        raise InputError(f"trailing shape {trailing} has a negative size", path)
    width = item_bytes(message.dtype, path)
    bounds = unpack(message.offsets, "<i8", f"{path}.offsets")
    data = message.data
    _check_offsets(bounds, width, len(data), f"{path}.offsets")
    values, _ = widen(data, message.dtype, path)
    row = math.prod(trailing)
    tensors: list[TensorData] = []
    for begin, end in pairwise((bounds // width).tolist()):
        part, shape = values[begin:end], [end - begin]
        if trailing:
            shape = [(end - begin) // row if row else 0, *trailing]
            part = reshape(part, shape, path)
        tensors.append(TensorData._make(part, shape))  # pyright: ignore[reportPrivateUsage] - checked above
    return tensors


def _check_offsets(bounds: npt.NDArray[Any], width: int, size: int, path: str) -> None:
    if not bounds.size:
        raise InputError("missing; expected one more offset than datums", path)
    if bounds[0] != 0 or bounds[-1] > size or (bounds[1:] < bounds[:-1]).any():
        raise InputError(f"must grow from 0 to at most {size} bytes", path)
    if (bounds % width).any():
        raise InputError(f"must be multiples of the {width} bytes of one value", path)
