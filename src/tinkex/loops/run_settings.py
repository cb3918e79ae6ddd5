"""The settings of a run. An InputError for a bad value names the setting.

A setting that is None gets its value from the run: `save_every` and `eval_every` are a tenth of its
steps, and `steps` follows from `epochs` and the number of examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from tinkex.chat.renderer import TrainOn
from tinkex.clients.arguments import one_of
from tinkex.config import DEFAULT_MODEL
from tinkex.errors import InputError

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that all three kinds of run share."""

    kind: ClassVar[str]
    # Settings that change no result, so that a resumed run may have other values.
    free: ClassVar[frozenset[str]] = frozenset({"save_every"})

    model: str = DEFAULT_MODEL
    steps: int | None = None
    batch_size: int = 8
    rank: int = 16
    learning_rate: float = 3e-4
    lr_schedule: Schedule = "linear"
    warmup: int = 0
    seed: int = 0
    save_every: int | None = None
    eval_every: int | None = None
    patience: int | None = None

    @property
    def base_model(self) -> str:
        """The model's name on the server; `model` may be NAME=FOLDER for a local model."""
        return self.model.partition("=")[0]

    def __post_init__(self) -> None:
        if not self.base_model:
            raise InputError("must not be empty", "model")
        one_of(self.lr_schedule, get_args(Schedule), "lr_schedule")
        for name in ("steps", "batch_size", "rank", "save_every", "eval_every", "patience"):
            at_least(getattr(self, name), 1, name)
        at_least(self.warmup, 0, "warmup")
        more_than_zero(self.learning_rate, "learning_rate")
        if not 0 <= self.seed < 2**31:
            raise InputError(f"must be from 0 to {2**31 - 1}, not {self.seed}", "seed")
        if self.steps is not None and self.warmup >= self.steps:
            raise InputError(f"must be fewer than the {self.steps} steps", "warmup")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnData(Settings):
    """The settings of a run over a file of examples."""

    epochs: int | None = None
    eval_fraction: float | None = None
    max_tokens: int = 2048

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        at_least(self.epochs, 1, "epochs")
        at_least(self.max_tokens, 2, "max_tokens")
        if self.steps is not None and self.epochs is not None:
            raise InputError("cannot be combined with steps; give one of them", "epochs")
        if self.eval_fraction is not None and not 0 < self.eval_fraction < 1:
            raise InputError(f"must be between 0 and 1, not {self.eval_fraction}", "eval_fraction")


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSettings(OnData):
    """Supervised fine-tuning."""

    kind = "sft"
    train_on: TrainOn = "all"

    def __post_init__(self) -> None:
        OnData.__post_init__(self)
        one_of(self.train_on, get_args(TrainOn), "train_on")


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoSettings(OnData):
    """Direct preference optimization; `beta` is the strength of the KL penalty."""

    kind = "dpo"
    learning_rate: float = 5e-5
    beta: float = 0.1

    def __post_init__(self) -> None:
        OnData.__post_init__(self)
        more_than_zero(self.beta, "beta")


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSettings(Settings):
    """Reinforcement learning: `batch_size` prompts a step, `group_size` answers to each."""

    kind = "rl"
    lr_schedule: Schedule = "constant"
    group_size: int = 8
    max_tokens: int = 128
    temperature: float = 1.0

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        at_least(self.group_size, 2, "group_size")
        at_least(self.max_tokens, 1, "max_tokens")
        more_than_zero(self.temperature, "temperature")


def at_least(number: int | None, least: int, name: str) -> None:
    """Raise InputError for a number below `least`; None passes."""
    if number is not None and number < least:
        raise InputError(f"must be at least {least}, not {number}", name)


def more_than_zero(number: float, name: str) -> None:
    """Raise InputError for anything but a finite number above zero."""
    if not (math.isfinite(number) and number > 0):
        raise InputError(f"must be a finite number above 0, not {number}", name)
