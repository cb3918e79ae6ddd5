"""The training runs: the tasks of two examples, with other adapters and learning rates."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from tinkex.types import LoraConfig

if TYPE_CHECKING:
    from collections.abc import Generator

    import tinkex

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAST = 3
"""How many values at the end of a curve are its result."""


@dataclass(frozen=True)
class Adapter:
    """Which matrices are trained, and with how many ranks."""

    label: str
    rank: int
    attention: bool = True
    mlp: bool = True
    unembed: bool = True

    @property
    def lora(self) -> LoraConfig:
        """The same as the protocol says it."""
        return LoraConfig(
            rank=self.rank,
            train_attn=self.attention,
            train_mlp=self.mlp,
            train_unembed=self.unembed,
        )

    def client(self, service: tinkex.ServiceClient, model: str, seed: int) -> tinkex.TrainingClient:
        """A fresh one, ready to train."""
        return service.create_lora_training_client(
            model,
            rank=self.rank,
            seed=seed,
            train_attn=self.attention,
            train_mlp=self.mlp,
            train_unembed=self.unembed,
        )


@dataclass
class Curve:
    """One run; what its values are is up to the task."""

    task: str
    adapter: str
    parameters: int
    learning_rate: float
    seed: int
    values: list[float] = field(default_factory=list[float])

    @property
    def result(self) -> float:
        """The mean of its end."""
        return mean(self.values[-LAST:])


@dataclass(frozen=True)
class Task:
    """An example, the adapters to compare on it, and where each is looked for."""

    name: str
    title: str
    adapters: tuple[Adapter, Adapter]
    rates: tuple[float, ...]
    steps: int
    seeds: int
    lower_is_better: bool
    reached: float
    """The value that counts as learned: the table says when a curve first passes it."""

    def best(self, curves: list[Curve]) -> Curve:
        """The one with the best end."""
        choose = min if self.lower_is_better else max
        return choose(curves, key=lambda curve: curve.result)

    def first_reached(self, curve: Curve) -> int | None:
        """The step at which the curve first passes `reached`."""
        for step, value in enumerate(curve.values):
            if value < self.reached if self.lower_is_better else value > self.reached:
                return step
        return None


# Per rank and layer of this model, attention has 3,840 parameters and the MLP 6,336: 33 x 3,840
# equals 20 x 6,336, and no smaller ranks are equal.
SFT = Task(
    "sft",
    "SFT: held-out NLL per token",
    (
        Adapter("MLP only, rank 20", 20, attention=False, unembed=False),
        Adapter("attention only, rank 33", 33, mlp=False, unembed=False),
    ),
    rates=(1e-3, 3e-3, 1e-2),
    steps=10,
    seeds=2,
    lower_is_better=True,
    reached=0.1,
)
RL = Task(
    "rl",
    "RL: mean reward",
    (Adapter("rank 1", 1), Adapter("rank 32", 32)),
    rates=(4e-4,),
    steps=12,
    seeds=2,
    lower_is_better=False,
    reached=0.8,
)


def example(name: str) -> Any:
    """An example as a module: the tasks have one home, and readers see what is measured."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def values(
    task: Task, service: Any, tokenizer: Any, adapter: Adapter, rate: float, seed: int
) -> Generator[float]:
    """Train, and give the value before every step (and, of a held-out set, after the last)."""
    module = example(f"{task.name}_smollm2")
    training = adapter.client(service, module.MODEL, seed)
    if task is SFT:
        pirate = module.Task(tokenizer)
        yield module.held_out_nll(training, pirate)
        for _ in module.train(training, pirate, task.steps, rate):
            yield module.held_out_nll(training, pirate)
        return
    options = argparse.Namespace(
        rounds=task.steps, questions=len(module.QUESTIONS), group=8, learning_rate=rate
    )
    for done in module.train(training, tokenizer, options):
        yield done.reward
