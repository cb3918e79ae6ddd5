"""The protocol between the server and an engine: calls, operations, results.

An engine owns weights, optimizer state, snapshots and caches. It knows no HTTP, no
sessions and no owners; the server hands it operations in the right order per model.
`LocalEngine`, `ProcessEngine` and `tinkex.testing.FakeEngine` implement `Engine`; what they all
must do is in tests/contracts/engine_suite.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tinkex.errors import RequestFailedError
    from tinkex.types import (
        CustomLossGraph,
        CustomLossInput,
        Datum,
        ForwardBackwardOutput,
        LoraConfig,
        ModelInput,
        OptimizerConfig,
        OptimParams,
        SampleResponse,
        SamplingParams,
        TensorData,
    )

MAX_RANK: Final = 256
"""The largest rank of an adapter, for every engine."""
Layout = Literal["peft", "tinker"]
"""How exported files name the unembedding: `lm_head`, which PEFT loads, or `model.unembed_tokens`,
as the archives of hosted Tinker do. Everything else is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """What turns text into a base model's tokens, and messages into text."""

    tokenizer_json: bytes
    """The content of its `tokenizer.json`."""
    chat_template: str | None = None
    """The model's own Jinja text, if it brings one, and what that calls its two markers."""
    bos_token: str | None = None
    eos_token: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    """The tokens that end a text; `eos_token` is usually one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A base model the engine serves."""

    name: str
    max_context_length: int
    vocab_size: int
    tokenizer_id: str | None = None
    arch: str | None = None
    text: ModelText | None = field(default=None, repr=False)
    """None for a model without a tokenizer, which takes and gives tokens only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """What a fresh adapter looks like; `model_id` names it from then on."""

    model_id: str
    base_model: str
    lora: LoraConfig
    optimizer: OptimizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """What lies at a location after a save."""

    size_bytes: int
    has_optimizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedAdapter:
    """What lies at a location after an import, and how to make a model that fits it."""

    size_bytes: int
    lora: LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLoss:
    """A loss uploaded by a client, as a traced graph."""

    inputs: Sequence[CustomLossInput]
    graph: CustomLossGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOp:
    """One forward or forward_backward over the data of one adapter."""

    op_id: str
    model_id: str
    data: Sequence[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] = field(default_factory=dict[str, "float | str"])
    backward: bool = True
    custom_loss: CustomLoss | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTrainOp:
    """A `TrainOp` whose data is still in the body of its request.

    Only engines whose `takes_bodies` is true take one: their process has a decoder.
    """

    op_id: str
    model_id: str
    body: bytes
    media: str = ""
    backward: bool = True
    custom_loss: CustomLoss | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Loss outputs in the order of the data; `device_s` is this operation's share."""

    output: ForwardBackwardOutput
    tokens: int
    device_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimOp:
    """Apply the accumulated gradient of one adapter and clear it."""

    op_id: str
    model_id: str
    params: OptimParams


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimResult:
    """Step metrics: at least gradient norm before and after clipping, update norm, step."""

    metrics: dict[str, float]
    device_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Which weights to sample from.

    With neither snapshot nor location it is the base model. A snapshot was published from
    a training adapter; a location was saved and is loaded when it is not resident.
    """

    base_model: str
    snapshot: str | None = None
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOp:
    """One sampling request; the fields mean what they mean in the protocol."""

    op_id: str
    weights: Weights
    prompt: ModelInput
    params: SamplingParams
    sequence_ids: Sequence[str]
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool = False
    cache_salt: str = ""
    """Requests share cached prompts only with requests of the same salt; the server uses the owner.

    Otherwise `cached_tokens` would tell a tenant how another one's prompt began.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """Finished sequences, one per requested id and in that order."""

    response: SampleResponse
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    device_s: float
    version: str = ""
    """The weights it came from: the snapshot's name, the location, or "base"."""


if TYPE_CHECKING:
    # The likeliest tokens of one position and their log-probabilities.
    Best = tuple[Sequence[int], Sequence[float]]
    # Called as (sample index, token, log-probability, likeliest) while a sequence grows; the last
    # is None unless `topk_sample_logprobs` asks for it.
    OnToken = Callable[[int, int, float, Best | None], None]


GAUGES = (
    "adapters_resident",
    "adapters_parked",
    "adapters_resident_bytes",
    "adapters_parked_bytes",
    "adapters_capacity_bytes",
    "samples_running",
    "kv_blocks_used",
    "kv_blocks_total",
    "tokens_trained_total",
    "tokens_scored_total",
    "tokens_prompt_total",
    "tokens_generated_total",
)
"""What `stats` says: adapters and snapshots on the device and off it, their bytes and how many may
be on the device (0 is no limit), sampling requests, blocks of the key/value cache, and tokens since
the start: of forward_backward, of forward alone, of prompts and of completions."""


class Engine(Protocol):
    """What the server needs of an engine.

    Every method may be cancelled. A batch answers operation by operation, in order: one
    bad operation is a `RequestFailedError` in its place and leaves the others alone.
    What cannot be written or read because of the storage raises `StorageError`.
    Calls for one `model_id` are never made concurrently; calls for different ones are.
    Where the engine lives in another process, every call raises `EngineDiedError` once that has
    ended, also those under way.
    """

    @property
    def models(self) -> Sequence[ModelSpec]:
        """The base models, the same ones for the engine's whole life."""
        ...

    async def create_adapter(self, spec: AdapterSpec) -> None: ...

    async def load_adapter(self, model_id: str, location: str, *, optimizer: bool) -> None:
        """Replace an adapter's weights, and its optimizer state too when asked."""
        ...

    async def save_adapter(self, model_id: str, location: str, *, optimizer: bool) -> SavedAdapter:
        """Write an adapter; complete and durable when it returns."""
        ...

    async def drop_adapter(self, model_id: str) -> None:
        """Free an adapter; unknown names are fine."""
        ...

    async def train(self, batch: Sequence[TrainOp]) -> Sequence[TrainResult | RequestFailedError]:
        """Run forward or forward_backward of many operations at once."""
        ...

    async def optim_step(
        self, batch: Sequence[OptimOp]
    ) -> Sequence[OptimResult | RequestFailedError]: ...

    async def publish(self, model_id: str, snapshot: str) -> None:
        """Freeze a copy of an adapter for sampling under the name `snapshot`."""
        ...

    async def save_snapshot(self, snapshot: str, location: str) -> SavedAdapter:
        """Write what was published; complete and durable when it returns."""
        ...

    async def drop_snapshot(self, snapshot: str) -> None: ...

    async def sample(self, op: SampleOp, on_token: OnToken | None = None) -> SampleResult:
        """Sample; cancelling the call frees its place."""
        ...

    async def copy_saved(self, source: str, target: str) -> None:
        """Copy what was saved at one location to another."""
        ...

    async def delete_saved(self, location: str) -> None: ...

    async def export_saved(self, location: str, layout: Layout = "peft") -> Mapping[str, bytes]:
        """The two files of a saved adapter, by name."""
        ...

    async def import_saved(self, base_model: str, folder: Path, location: str) -> ImportedAdapter:
        """Save the PEFT adapter in a folder of this machine; complete and durable when it returns.

        What is no adapter for the base model is refused, and nothing is saved.
        """
        ...

    async def stats(self) -> Mapping[str, float]:
        """Gauges, and counters whose names end in `_total`; does not wait for what runs.

        At least `GAUGES`; an engine may have more.
        """
        ...
