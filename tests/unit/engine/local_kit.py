"""A small engine for the tests of `LocalEngine`, and a decoder that notes its passes."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.patience import PATIENCE_S
from tinkex.engine.local import LocalEngine, LocalSettings
from tinkex.engine.models.loader import BaseModel, load_model
from tinkex.engine.protocol import AdapterSpec, OptimOp, SampleOp, TrainOp, TrainResult, Weights
from tinkex.types import (
    AdamOptimizerConfig,
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    SamplingParams,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

TINY = "tinkex/tiny"
CACHE_BYTES = 8 << 20  # 8,192 tokens


class NotingDecoder:
    """Notes every pass as "train" or "sample"; a gate holds a training pass until it opens."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.notes: list[str] = []
        self.tokens: list[int] = []
        self.gates: dict[int, tuple[threading.Event, threading.Event]] = {}
        self._watched: list[tuple[Callable[[], int], list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def gate(self, number: int) -> tuple[threading.Event, threading.Event]:
        """Events for the training pass of this number: it has come, and it may go."""
        self.gates[number] = threading.Event(), threading.Event()
        return self.gates[number]

    def watch(self, read: Callable[[], int]) -> list[int]:
        """What `read` gives in every pass from now on."""
        found: list[int] = []
        self._watched.append((read, found))
        return found

    def hidden(self, tokens_T: Any, *others: Any) -> Any:
        # Only training says how blocks are to be run.
        kind = "train" if len(others) == 4 else "sample"
        self.notes.append(kind)
        for read, found in self._watched:
            found.append(read())
        if kind == "train":
            self.tokens.append(len(tokens_T))
            came, go = self.gates.get(self.notes.count("train"), (None, None))
            if came is not None and go is not None:
                came.set()
                assert go.wait(PATIENCE_S), "nobody opened the gate"
        return self._inner.hidden(tokens_T, *others)


def noting_model() -> tuple[BaseModel, NotingDecoder]:
    model = load_model(TINY)
    decoder: Any = NotingDecoder(model.decoder)
    return replace(model, decoder=decoder), decoder


def engine(folder: Path, model: BaseModel | None = None, **settings: Any) -> LocalEngine:
    chosen = LocalSettings(**{"cache_bytes": CACHE_BYTES, **settings})
    return LocalEngine([model or load_model(TINY)], folder, chosen)


def spec(model_id: str, rank: int = 2, **fields: Any) -> AdapterSpec:
    return AdapterSpec(
        model_id=model_id,
        base_model=fields.pop("base_model", TINY),
        lora=LoraConfig(rank=rank, seed=fields.pop("seed", 1), **fields),
        optimizer=AdamOptimizerConfig(),
    )


def data(length: int = 12, seed: int = 0) -> Datum:
    ids = [(seed * 31 + i * 7 + i * i) % 251 for i in range(length + 1)]
    return Datum(
        ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], "weights": [1.0] * length}
    )


def train_op(model_id: str, examples: Sequence[Datum], loss: str = "cross_entropy") -> TrainOp:
    return TrainOp(op_id=f"train-{model_id}", model_id=model_id, data=examples, loss_fn=loss)


def optim_op(model_id: str, **params: Any) -> OptimOp:
    return OptimOp(
        op_id=f"step-{model_id}",
        model_id=model_id,
        params=AdamParams(**{"learning_rate": 0.01, **params}),
    )


def sample_op(
    *, snapshot: str | None = None, location: str | None = None, **params: Any
) -> SampleOp:
    return SampleOp(
        op_id="sample",
        weights=Weights(base_model=TINY, snapshot=snapshot, location=location),
        prompt=ModelInput.from_ints(list(b"once upon")),
        params=SamplingParams(**{"max_tokens": 6, "stop": [], "temperature": 0.0, **params}),
        sequence_ids=["s"],
        prompt_logprobs=True,
    )


async def trained(target: LocalEngine, *ops: TrainOp) -> list[TrainResult]:
    """Train, and insist that every operation succeeds."""
    found = await target.train(ops)
    for answer in found:
        if isinstance(answer, Exception):
            raise answer
    return [answer for answer in found if isinstance(answer, TrainResult)]
