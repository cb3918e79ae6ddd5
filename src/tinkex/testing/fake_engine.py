"""An engine for tests: the whole protocol without torch, deterministic.

`FakeEngine` trains and samples the toy model. It is small, not random: repeated training
on the same data lowers the loss, a loaded checkpoint continues bit for bit, and sampling
depends on (seed, sample, position) alone.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.clock import SystemClock
from tinkex.engine.models.byte_text import byte_text
from tinkex.engine.protocol import (
    GAUGES,
    ImportedAdapter,
    ModelSpec,
    OptimResult,
    SavedAdapter,
    TrainResult,
)
from tinkex.errors import InputError, RequestFailedError
from tinkex.testing.toy_losses import LOSSES
from tinkex.testing.toy_model import DEVICE_S_PER_TOKEN, ToyModel, input_tokens, user_error
from tinkex.testing.toy_peft import read_toy, write_toy
from tinkex.testing.toy_sampler import sample
from tinkex.types import AdamParams, ForwardBackwardOutput, LoraConfig, TensorData

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from tinkex.clock import Clock
    from tinkex.engine.protocol import (
        AdapterSpec,
        Layout,
        OnToken,
        OptimOp,
        SampleOp,
        SampleResult,
        TrainOp,
    )
    from tinkex.testing.toy_model import Head
    from tinkex.types import Datum

    Floats = npt.NDArray[np.float64]

TINY = ModelSpec(
    name="tinkex/tiny",
    max_context_length=8192,
    vocab_size=1024,
    tokenizer_id="tinkex/tiny",
    arch="toy",
    text=byte_text(),
)
OTHER = replace(TINY, name="tinkex/tiny-2", text=replace(byte_text(), chat_template=None))


@dataclass(frozen=True, slots=True)
class Delays:
    """How long the fake engine takes, in seconds of its clock."""

    train_s: float = 0.0
    optim_s: float = 0.0
    sample_s: float = 0.0
    token_s: float = 0.0
    save_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _State:
    """Everything an adapter is; replaced, never changed in place."""

    toy: ToyModel
    lora: LoraConfig
    head: Head
    first: Floats
    second: Floats
    step: int = 0
    gradient: Floats | None = None

    @property
    def bias(self) -> Floats:
        return self.head.bias


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One call the engine got, for tests that look at batching."""

    name: str
    ids: tuple[str, ...] = field(default=())


class FakeEngine:
    """An `Engine` for tests; `delays` and `fail_next` shape what it does.

    `calls` lists what it was asked, in order.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        models: Sequence[ModelSpec] = (TINY, OTHER),
        delays: Delays | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._toys = {spec.name: ToyModel(spec) for spec in models}
        self.delays = delays or Delays()
        # Mutable state: adapters, published snapshots, saved adapters, scripted failures, counts.
        self.calls: list[EngineCall] = []
        self._adapters: dict[str, _State] = {}
        self._snapshots: dict[str, _State] = {}
        self._saved: dict[str, tuple[_State, bool]] = {}
        self._failures: dict[str, list[Exception]] = {}
        self._counts: Counter[str] = Counter()
        self._seen_prompts: set[int] = set()

    @property
    def models(self) -> Sequence[ModelSpec]:
        """The base models."""
        return tuple(toy.spec for toy in self._toys.values())

    @property
    def adapters(self) -> tuple[str, ...]:
        """The models that are loaded."""
        return tuple(self._adapters)

    @property
    def snapshots(self) -> tuple[str, ...]:
        """The published snapshots that are held."""
        return tuple(self._snapshots)

    def fail_next(self, method: str, error: Exception) -> None:
        """Make the next call of an engine method raise."""
        self._failures.setdefault(method, []).append(error)

    async def create_adapter(self, spec: AdapterSpec) -> None:
        await self._enter("create_adapter", (spec.model_id,), self.delays.load_s)
        toy = self._toy(spec.base_model)
        self._adapters[spec.model_id] = _State(toy, spec.lora, toy.base, toy.zeros, toy.zeros)

    async def load_adapter(self, model_id: str, location: str, *, optimizer: bool) -> None:
        await self._enter("load_adapter", (model_id,), self.delays.load_s)
        saved, has_optimizer = self._at(location)
        state = self._adapter(model_id)
        if saved.lora.rank != state.lora.rank:
            raise user_error(
                f"the checkpoint has rank {saved.lora.rank}, the model rank {state.lora.rank}"
            )
        if optimizer and not has_optimizer:
            raise user_error("the checkpoint has no optimizer state")
        zeros = saved.toy.zeros
        fresh = replace(saved, first=zeros, second=zeros, step=0, gradient=None)
        self._adapters[model_id] = saved if optimizer else fresh

    async def save_adapter(self, model_id: str, location: str, *, optimizer: bool) -> SavedAdapter:
        await self._enter("save_adapter", (model_id,), self.delays.save_s)
        state = self._adapter(model_id)
        self._saved[location] = (state, optimizer)
        size = state.bias.nbytes * (3 if optimizer else 1)
        return SavedAdapter(size_bytes=size, has_optimizer=optimizer)

    async def drop_adapter(self, model_id: str) -> None:
        await self._enter("drop_adapter", (model_id,), 0.0)
        self._adapters.pop(model_id, None)

    async def publish(self, model_id: str, snapshot: str) -> None:
        await self._enter("publish", (model_id, snapshot), 0.0)
        self._snapshots[snapshot] = self._adapter(model_id)

    async def save_snapshot(self, snapshot: str, location: str) -> SavedAdapter:
        await self._enter("save_snapshot", (snapshot,), self.delays.save_s)
        state = self._snapshot(snapshot)
        self._saved[location] = (state, False)
        return SavedAdapter(size_bytes=state.bias.nbytes, has_optimizer=False)

    async def drop_snapshot(self, snapshot: str) -> None:
        await self._enter("drop_snapshot", (snapshot,), 0.0)
        self._snapshots.pop(snapshot, None)

    async def copy_saved(self, source: str, target: str) -> None:
        await self._enter("copy_saved", (source, target), self.delays.save_s)
        self._saved[target] = self._at(source)

    async def delete_saved(self, location: str) -> None:
        await self._enter("delete_saved", (location,), 0.0)
        self._saved.pop(location, None)

    async def export_saved(self, location: str, layout: Layout = "peft") -> Mapping[str, bytes]:
        await self._enter("export_saved", (location,), 0.0)
        state = self._at(location)[0]
        return write_toy(state.toy.spec.name, state.lora.rank, state.bias, layout)

    async def import_saved(self, base_model: str, folder: Path, location: str) -> ImportedAdapter:
        await self._enter("import_saved", (location,), self.delays.save_s)
        toy = self._toy(base_model)
        try:
            rank, bias = read_toy(folder, base_model, toy.spec.vocab_size)
        except InputError as error:
            raise user_error(str(error)) from error
        lora = LoraConfig(rank=rank, train_attn=False, train_mlp=False)
        self._saved[location] = (_State(toy, lora, toy.head(bias), toy.zeros, toy.zeros), False)
        return ImportedAdapter(size_bytes=bias.nbytes, lora=lora)

    async def stats(self) -> Mapping[str, float]:
        states = [*self._adapters.values(), *self._snapshots.values()]
        held = {
            "adapters_resident": len(states),
            "adapters_resident_bytes": sum(state.bias.nbytes for state in states),
        }
        return {**dict.fromkeys(GAUGES, 0.0), **held, **self._counts}

    async def train(self, batch: Sequence[TrainOp]) -> Sequence[TrainResult | RequestFailedError]:
        ids = tuple(op.op_id for op in batch)
        await self._enter("train", ids, self.delays.train_s)
        return [self._train_one(op, self.delays.train_s / len(batch)) for op in batch]

    async def optim_step(
        self, batch: Sequence[OptimOp]
    ) -> Sequence[OptimResult | RequestFailedError]:
        ids = tuple(op.op_id for op in batch)
        await self._enter("optim_step", ids, self.delays.optim_s)
        return [self._step_one(op, self.delays.optim_s / len(batch)) for op in batch]

    async def sample(self, op: SampleOp, on_token: OnToken | None = None) -> SampleResult:
        await self._enter("sample", (op.op_id,), self.delays.sample_s)
        toy = self._toy(op.weights.base_model)
        prompt = input_tokens(op.prompt)
        key = zlib.crc32(repr((op.weights, op.cache_salt, prompt)).encode())
        cached = len(prompt) - 1 if key in self._seen_prompts else 0
        if len(self._seen_prompts) > 100_000:
            self._seen_prompts.clear()
        self._seen_prompts.add(key)
        head = self._sampling_head(op, toy)
        self._counts["samples_running"] += 1
        try:
            result = await sample(
                op,
                head,
                prompt,
                toy.spec,
                self._clock,
                token_s=self.delays.token_s,
                cached_tokens=cached,
                on_token=on_token,
            )
        finally:
            self._counts["samples_running"] -= 1
        self._counts["tokens_prompt_total"] += result.prompt_tokens
        self._counts["tokens_generated_total"] += result.generated_tokens
        return replace(result, device_s=result.device_s + self.delays.sample_s)

    def _sampling_head(self, op: SampleOp, toy: ToyModel) -> Head:
        if op.weights.snapshot is not None:
            return self._snapshot(op.weights.snapshot).head
        if op.weights.location is not None:
            return self._at(op.weights.location)[0].head
        return toy.base

    def _train_one(self, op: TrainOp, share_s: float) -> TrainResult | RequestFailedError:
        try:
            return self._pass(op, share_s)
        except RequestFailedError as error:
            return error
        except InputError as error:
            return user_error(str(error))

    def _pass(self, op: TrainOp, share_s: float) -> TrainResult:
        state = self._adapter(op.model_id)
        toy, head = state.toy, state.head
        loss_fn = LOSSES.get(op.loss_fn)
        if loss_fn is None:
            raise user_error(f"loss_fn {op.loss_fn!r} is unknown; there is: {', '.join(LOSSES)}")
        if not op.data:
            raise user_error("data is empty")
        total, tokens = 0.0, 0
        outputs: list[dict[str, TensorData]] = []
        gradient = toy.zeros.copy()
        for index, datum in enumerate(op.data):
            rows, targets = self._targets(datum, toy, f"data[{index}]")
            spread = rows if targets.ndim == 1 else rows[:, None]
            p = head.logprobs[spread, targets]
            inputs = {k: v.to_numpy() for k, v in datum.loss_fn_inputs.items()}
            try:
                loss, derivative = loss_fn(p, inputs, op.loss_fn_config)
            except InputError as error:
                raise user_error(f"data[{index}].{error}") from error
            total += loss
            tokens += len(rows)
            outputs.append({"logprobs": TensorData.from_numpy(p.astype(np.float32))})
            gradient += _gradient(head, rows, targets, derivative)
        if op.backward:
            before = 0.0 if state.gradient is None else state.gradient
            self._adapters[op.model_id] = replace(state, gradient=before + gradient)
        self._counts["tokens_trained_total" if op.backward else "tokens_scored_total"] += tokens
        output = ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord", loss_fn_outputs=outputs, metrics={"loss:sum": total}
        )
        device_s = share_s + tokens * DEVICE_S_PER_TOKEN
        return TrainResult(output=output, tokens=tokens, device_s=device_s)

    def _targets(self, datum: Datum, toy: ToyModel, path: str) -> tuple[Any, Any]:
        tokens = input_tokens(datum.model_input)
        if not tokens:
            raise user_error(f"{path}.model_input is empty")
        wanted = datum.loss_fn_inputs.get("target_tokens")
        if wanted is None:
            raise user_error(f'{path}.loss_fn_inputs["target_tokens"] is missing')
        targets = wanted.to_numpy()
        if targets.ndim not in (1, 2) or len(targets) != len(tokens):
            raise user_error(
                f'{path}.loss_fn_inputs["target_tokens"] has shape {list(targets.shape)}, '
                f"the input has {len(tokens)} tokens"
            )
        for name, ids in (("model_input", np.asarray(tokens)), ("target_tokens", targets)):
            if ids.size and (ids.min() < 0 or ids.max() >= toy.spec.vocab_size):
                raise user_error(f"{path}: {name} has a token outside 0..{toy.spec.vocab_size - 1}")
        return toy.rows(tokens), targets

    def _step_one(self, op: OptimOp, share_s: float) -> OptimResult | RequestFailedError:
        try:
            state = self._adapter(op.model_id)
        except RequestFailedError as error:
            return error
        stepped, metrics = _optimize(state, op.params)
        self._adapters[op.model_id] = stepped
        return OptimResult(metrics=metrics, device_s=share_s + DEVICE_S_PER_TOKEN)

    def _toy(self, name: str) -> ToyModel:
        if name not in self._toys:
            raise user_error(f"no base model {name!r} here; there are: {', '.join(self._toys)}")
        return self._toys[name]

    def _adapter(self, model_id: str) -> _State:
        state = self._adapters.get(model_id)
        if state is None:
            raise user_error(f"model {model_id!r} is not loaded")
        return state

    def _snapshot(self, snapshot: str) -> _State:
        state = self._snapshots.get(snapshot)
        if state is None:
            raise user_error("these sampling weights are gone: their session has ended")
        return state

    def _at(self, location: str) -> tuple[_State, bool]:
        saved = self._saved.get(location)
        if saved is None:
            raise user_error("these weights have been deleted")
        return saved

    async def _enter(self, name: str, ids: tuple[str, ...], delay_s: float) -> None:
        self.calls.append(EngineCall(name, ids))
        if delay_s > 0:
            await self._clock.sleep(delay_s)
        failures = self._failures.get(name)
        if failures:
            raise failures.pop(0)


def _gradient(head: Head, rows: Any, targets: Any, derivative: Any) -> Floats:
    """The derivative of a loss by the bias: each target up, what its row expects down."""
    vocab_size = head.logprobs.shape[1]
    gradient = np.bincount(targets.ravel(), weights=derivative.ravel(), minlength=vocab_size)
    per_position = derivative if derivative.ndim == 1 else derivative.sum(axis=1)
    per_row = np.bincount(rows, weights=per_position, minlength=len(head.logprobs))
    expected = np.dot(per_row.astype(np.float64), np.exp(head.logprobs))
    return gradient.astype(np.float64) - expected


def _optimize(state: _State, params: Any) -> tuple[_State, dict[str, float]]:
    """One step of AdamW; other families borrow its numbers where they have none."""
    adam = params if isinstance(params, AdamParams) else AdamParams()
    rate = float(getattr(params, "learning_rate", adam.learning_rate))
    limit = float(getattr(params, "grad_clip_norm", 0.0))
    bias, gradient = state.bias, state.gradient
    gradient = state.toy.zeros if gradient is None else gradient
    norm = float(np.linalg.norm(gradient))
    if 0 < limit < norm:
        gradient = gradient * (limit / norm)
    step = state.step + 1
    first = adam.beta1 * state.first + (1 - adam.beta1) * gradient
    second = adam.beta2 * state.second + (1 - adam.beta2) * gradient**2
    scale = np.sqrt(second / (1 - adam.beta2**step)) + adam.eps
    update = rate * (first / (1 - adam.beta1**step) / scale + adam.weight_decay * bias)
    head = state.toy.head(bias - update)
    stepped = replace(state, head=head, first=first, second=second, step=step, gradient=None)
    return stepped, {
        "grad_norm": norm,
        "grad_norm_clipped": float(np.linalg.norm(gradient)),
        "update_norm": float(np.linalg.norm(update)),
        "learning_rate": rate,
        "step": float(step),
    }
