"""Message classes of `proto/tinkex.proto`. Written by `python tools/generate_proto.py`."""

from collections.abc import Iterable, MutableMapping, MutableSequence
from typing import Final, TypeVar

from google.protobuf.message import Message

_M = TypeVar("_M", bound=Message)

class _Messages(MutableSequence[_M]):
    def add(self) -> _M: ...

class _MessageMap(MutableMapping[str, _M]): ...

STOP_REASON_STOP: Final = 0
STOP_REASON_LENGTH: Final = 1
DTYPE_UNSPECIFIED: Final = 0
DTYPE_FLOAT32: Final = 1
DTYPE_INT64: Final = 2
DTYPE_INT32: Final = 3
DTYPE_BFLOAT16: Final = 4

class SampleResponse(Message):
    sequences: _Messages[SampledSequence]
    prompt_logprobs: bytes
    topk_prompt_logprobs: TopkLogprobs
    prompt_cache_hit_tokens: int
    target_prompt_logprobs: Tensor
    prompt_alt_tokens: PromptAltTokens
    def __init__(
        self,
        *,
        sequences: Iterable[SampledSequence] | None = ...,
        prompt_logprobs: bytes | None = ...,
        topk_prompt_logprobs: TopkLogprobs | None = ...,
        prompt_cache_hit_tokens: int | None = ...,
        target_prompt_logprobs: Tensor | None = ...,
        prompt_alt_tokens: PromptAltTokens | None = ...,
    ) -> None: ...

class PromptAltTokens(Message):
    tokens: Tensor
    logprobs: Tensor
    def __init__(
        self,
        *,
        tokens: Tensor | None = ...,
        logprobs: Tensor | None = ...,
    ) -> None: ...

class SampledSequence(Message):
    stop_reason: int
    tokens: bytes
    logprobs: bytes
    topk_sampled_logprobs: TopkLogprobs
    def __init__(
        self,
        *,
        stop_reason: int | None = ...,
        tokens: bytes | None = ...,
        logprobs: bytes | None = ...,
        topk_sampled_logprobs: TopkLogprobs | None = ...,
    ) -> None: ...

class TopkLogprobs(Message):
    token_ids: bytes
    logprobs: bytes
    k: int
    length: int
    def __init__(
        self,
        *,
        token_ids: bytes | None = ...,
        logprobs: bytes | None = ...,
        k: int | None = ...,
        length: int | None = ...,
    ) -> None: ...

class ForwardBackwardOutput(Message):
    loss_fn_output_type: str
    loss_fn_outputs: _Messages[ArrayRecord]
    metrics: MutableMapping[str, float]
    def __init__(
        self,
        *,
        loss_fn_output_type: str | None = ...,
        loss_fn_outputs: Iterable[ArrayRecord] | None = ...,
        metrics: MutableMapping[str, float] | None = ...,
    ) -> None: ...

class ArrayRecord(Message):
    type_tag: str
    fields: _MessageMap[BatchedTensor]
    num_datums: int
    def __init__(
        self,
        *,
        type_tag: str | None = ...,
        fields: MutableMapping[str, BatchedTensor] | None = ...,
        num_datums: int | None = ...,
    ) -> None: ...

class BatchedTensor(Message):
    data: bytes
    offsets: bytes
    dtype: int
    trailing_shape: MutableSequence[int]
    def __init__(
        self,
        *,
        data: bytes | None = ...,
        offsets: bytes | None = ...,
        dtype: int | None = ...,
        trailing_shape: Iterable[int] | None = ...,
    ) -> None: ...

class Tensor(Message):
    dense: bytes
    sparse_csr: SparseCsr
    dtype: int
    shape: MutableSequence[int]
    def __init__(
        self,
        *,
        dense: bytes | None = ...,
        sparse_csr: SparseCsr | None = ...,
        dtype: int | None = ...,
        shape: Iterable[int] | None = ...,
    ) -> None: ...

class SparseCsr(Message):
    values: bytes
    crow_indices: bytes
    col_indices: bytes
    def __init__(
        self,
        *,
        values: bytes | None = ...,
        crow_indices: bytes | None = ...,
        col_indices: bytes | None = ...,
    ) -> None: ...

class ForwardBackwardRequest(Message):
    model_id: str
    seq_id: int
    data: _Messages[Datum]
    loss_fn: str
    loss_fn_config: MutableMapping[str, float]
    forward_only: bool
    loss_fn_config_v2: _MessageMap[LossConfigValue]
    def __init__(
        self,
        *,
        model_id: str | None = ...,
        seq_id: int | None = ...,
        data: Iterable[Datum] | None = ...,
        loss_fn: str | None = ...,
        loss_fn_config: MutableMapping[str, float] | None = ...,
        forward_only: bool | None = ...,
        loss_fn_config_v2: MutableMapping[str, LossConfigValue] | None = ...,
    ) -> None: ...

class LossConfigValue(Message):
    number: float
    text: str
    def __init__(
        self,
        *,
        number: float | None = ...,
        text: str | None = ...,
    ) -> None: ...

class Datum(Message):
    model_input: _Messages[Chunk]
    loss_fn_inputs: _MessageMap[Tensor]
    model_input_spans: _Messages[ProvenanceSpan]
    loss_fn_input_spans: _Messages[ProvenanceSpan]
    def __init__(
        self,
        *,
        model_input: Iterable[Chunk] | None = ...,
        loss_fn_inputs: MutableMapping[str, Tensor] | None = ...,
        model_input_spans: Iterable[ProvenanceSpan] | None = ...,
        loss_fn_input_spans: Iterable[ProvenanceSpan] | None = ...,
    ) -> None: ...

class ProvenanceSpan(Message):
    prompt_tokens: PromptProvenanceSpan
    sampled_tokens: SampledProvenanceSpan
    def __init__(
        self,
        *,
        prompt_tokens: PromptProvenanceSpan | None = ...,
        sampled_tokens: SampledProvenanceSpan | None = ...,
    ) -> None: ...

class PromptProvenanceSpan(Message):
    sequence_id: str
    offset: int
    length: int
    def __init__(
        self,
        *,
        sequence_id: str | None = ...,
        offset: int | None = ...,
        length: int | None = ...,
    ) -> None: ...

class SampledProvenanceSpan(Message):
    sequence_id: str
    offset: int
    length: int
    def __init__(
        self,
        *,
        sequence_id: str | None = ...,
        offset: int | None = ...,
        length: int | None = ...,
    ) -> None: ...

class Chunk(Message):
    encoded_text: EncodedTextChunk
    image: ImageChunk
    dmel: DmelChunk
    def __init__(
        self,
        *,
        encoded_text: EncodedTextChunk | None = ...,
        image: ImageChunk | None = ...,
        dmel: DmelChunk | None = ...,
    ) -> None: ...

class EncodedTextChunk(Message):
    tokens: bytes
    def __init__(
        self,
        *,
        tokens: bytes | None = ...,
    ) -> None: ...

class ImageChunk(Message):
    data: bytes
    format: str
    expected_tokens: int
    override_dimensions: ImageDimensions
    def __init__(
        self,
        *,
        data: bytes | None = ...,
        format: str | None = ...,
        expected_tokens: int | None = ...,
        override_dimensions: ImageDimensions | None = ...,
    ) -> None: ...

class ImageDimensions(Message):
    width: int
    height: int
    def __init__(
        self,
        *,
        width: int | None = ...,
        height: int | None = ...,
    ) -> None: ...

class DmelChunk(Message):
    dmel: bytes
    def __init__(
        self,
        *,
        dmel: bytes | None = ...,
    ) -> None: ...
