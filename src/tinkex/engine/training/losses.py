"""The protocol's losses: pure functions of log-probabilities, in a table by name.

p is the log-probability of a target under the trained model, q that under the sampling model,
A the advantage and r = exp(p - q). Every loss is a plain sum of `LossValue.elements`; nothing is
normalised. A column holds one value for each target of an operation, datum by datum.

Columns are small and on the CPU in float64, so the rounding of a loss is negligible.

Shapes: M targets of all data, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

import torch

from tinkex.errors import InputError, InputTypeError

if TYPE_CHECKING:
    from torch import Tensor

Config = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LossColumns:
    """What a loss reads besides p: one value per target, by input name."""

    values: Mapping[str, Tensor]
    sizes: Sequence[int]
    """How many targets each datum has."""

    @property
    def data(self) -> int:
        """How many data there are."""
        return len(self.sizes)

    @property
    def datum_M(self) -> Tensor:
        """The datum each target belongs to, counted from 0."""
        return torch.repeat_interleave(torch.tensor(self.sizes))

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def get(self, name: str) -> Tensor | None:
        """The column, or None when it was not given."""
        return self.values.get(name)


@dataclass(frozen=True, slots=True)
class LossValue:
    """A loss: its terms, and further metrics, named with how they fold (`:sum`, `:max`, ...)."""

    elements: Tensor
    metrics: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Loss:
    """One entry of the table."""

    function: Callable[[Tensor, LossColumns, Config], LossValue]
    inputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=dict[str, float])
    """Its settings with their defaults."""
    constant_gradient: Callable[[LossColumns], Tensor] | None = None
    """The gradient by p, where it does not depend on p."""


def cross_entropy(p: Tensor, columns: LossColumns, config: Config) -> LossValue:
    """-sum(w p)"""
    del config
    weights = columns["weights"]
    return LossValue(-(weights * p), {"weights:sum": float(weights.sum())})


def importance_sampling(p: Tensor, columns: LossColumns, config: Config) -> LossValue:
    """-sum(r A)"""
    del config
    ratio = torch.exp(p - columns["logprobs"])
    return LossValue(-(ratio * columns["advantages"]), _ratio_metrics(ratio, p, columns))


def ppo(p: Tensor, columns: LossColumns, config: Config) -> LossValue:
    """-sum(min(r A, clip(r) A))"""
    return _clipped(torch.exp(p - columns["logprobs"]), p, columns, config)


def cispo(p: Tensor, columns: LossColumns, config: Config) -> LossValue:
    """-sum(stopgrad(clip(r)) A p)"""
    ratio = torch.exp(p - columns["logprobs"]).detach()
    bounded = _clip(ratio, columns, config)
    metrics = _ratio_metrics(ratio, p, columns)
    metrics["clipped_tokens:sum"] = _count((bounded != ratio) & (columns["advantages"] != 0))
    return LossValue(-(bounded * columns["advantages"] * p), metrics)


def dro(p: Tensor, columns: LossColumns, config: Config) -> LossValue:
    """-sum(p A - beta/2 (p - q)^2)"""
    gap = p - columns["logprobs"]
    gain = p * columns["advantages"] - 0.5 * config["beta"] * gap.square()
    return LossValue(-gain, _ratio_metrics(gap.exp(), p, columns))


def gspo(p: Tensor, columns: LossColumns, config: Config) -> LossValue:
    """The ppo form with one ratio per datum, and the gradient of each token's own p.

    The ratio is exp(mean of p - q) over the tokens whose `sequence_ratio_mask` is not zero,
    and 1 for a datum that has none.
    """
    mask = columns.get("sequence_ratio_mask")
    gap = (p - columns["logprobs"]).detach()
    chosen = torch.ones_like(gap) if mask is None else (mask != 0).to(gap.dtype)
    datum_M = columns.datum_M
    zeros = gap.new_zeros(columns.data)
    total = zeros.index_add(0, datum_M, gap * chosen)
    count = zeros.index_add(0, datum_M, chosen)
    ratio = torch.exp(total / count.clamp(min=1.0))[datum_M]
    return _clipped(ratio * torch.exp(p - p.detach()), p, columns, config)


def _clipped(ratio: Tensor, p: Tensor, columns: LossColumns, config: Config) -> LossValue:
    advantages = columns["advantages"]
    free, bounded = ratio * advantages, _clip(ratio, columns, config) * advantages
    metrics = _ratio_metrics(ratio, p, columns)
    metrics["clipped_tokens:sum"] = _count(bounded < free)
    # Where both are equal the gradient is that of the unclipped term, not split between the two.
    return LossValue(-torch.where(free <= bounded, free, bounded), metrics)


def _clip(ratio: Tensor, columns: LossColumns, config: Config) -> Tensor:
    """Bounds per token where given as inputs, else from the config."""
    low, high = columns.get("clip_low_threshold"), columns.get("clip_high_threshold")
    low = ratio.new_tensor(config["clip_low_threshold"]) if low is None else low
    high = ratio.new_tensor(config["clip_high_threshold"]) if high is None else high
    return torch.minimum(torch.maximum(ratio, low), high)


def _ratio_metrics(ratio: Tensor, p: Tensor, columns: LossColumns) -> dict[str, float]:
    """The distance of the trained model from the sampling model, over tokens with an advantage."""
    active = columns["advantages"] != 0
    count = _count(active)
    if not count:
        return {"active_tokens:sum": 0.0}
    ratio, gap = ratio.detach()[active], (p.detach() - columns["logprobs"])[active]
    return {
        "active_tokens:sum": count,
        "ratio:max": float(ratio.max()),
        "ratio:min": float(ratio.min()),
        "logprob_gap:sum": float(gap.sum()),
        "logprob_gap_abs:max": float(gap.abs().max()),
    }


def _count(flags: Tensor) -> float:
    return float(flags.sum())


_RL: Final = ("logprobs", "advantages")
_CLIP: Final = ("clip_low_threshold", "clip_high_threshold")


def _bounds(low: float, high: float) -> dict[str, float]:
    return dict(zip(_CLIP, (low, high), strict=True))


LOSSES: Final[Mapping[str, Loss]] = {
    "cross_entropy": Loss(
        cross_entropy, ("weights",), constant_gradient=lambda columns: -columns["weights"]
    ),
    "importance_sampling": Loss(importance_sampling, _RL),
    "ppo": Loss(ppo, _RL, _CLIP, _bounds(0.8, 1.2)),
    "cispo": Loss(cispo, _RL, _CLIP, _bounds(0.0, 4.0)),
    "dro": Loss(dro, _RL, (), {"beta": 0.05}),
    "gspo": Loss(gspo, _RL, (*_CLIP, "sequence_ratio_mask"), _bounds(0.8, 1.2)),
}


def find_loss(name: str) -> Loss:
    """The loss of this name."""
    loss = LOSSES.get(name)
    if loss is not None:
        return loss
    if name == "stable_reinforce":
        raise InputError(
            "stable_reinforce is not offered by this engine: its vendor has not published the "
            "whole formula; use importance_sampling, ppo or cispo",
            "loss_fn",
        )
    raise InputError(f"{name!r} is not a loss; there are {', '.join(LOSSES)}, custom", "loss_fn")


def loss_settings(name: str, loss: Loss, given: Mapping[str, float | str]) -> dict[str, float]:
    """The loss's settings: what was given, and defaults for the rest."""
    settings = dict(loss.config)
    for key, value in given.items():
        path = f'loss_fn_config["{key}"]'
        if key not in settings:
            raise InputError(_no_such_setting(name, key, list(settings)), path)
        if isinstance(value, str):
            raise InputTypeError("expected a number, got text", path)
        if not math.isfinite(value):
            raise InputError(f"must be finite, got {value}", path)
        settings[key] = float(value)
    if settings.get(_CLIP[0], 0.0) > settings.get(_CLIP[1], math.inf):
        raise InputError("is above clip_high_threshold", f'loss_fn_config["{_CLIP[0]}"]')
    return settings


def _no_such_setting(loss: str, key: str, known: list[str]) -> str:
    if not known:
        return f"{loss} has no settings"
    near = get_close_matches(key, known, 1)
    return f"{loss} has no such setting; " + (
        f"did you mean {near[0]}?" if near else f"there is {', '.join(known)}"
    )
