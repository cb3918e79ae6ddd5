"""The protocol's losses over the toy model: plain sums, with exact gradients.

Each function takes the log-probabilities p of the targets and a datum's other inputs and
returns the loss and its derivative by p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

Arrays = Mapping[str, Any]
Config = Mapping[str, float | str]
Loss = Callable[[Any, Arrays, Config], "tuple[float, Floats]"]


def cross_entropy(p: Floats, inputs: Arrays, config: Config) -> tuple[float, Floats]:
    """-sum(w p)"""
    weights = _like(p, inputs, "weights") if "weights" in inputs else np.ones_like(p)
    return float(-(weights * p).sum()), -weights


def importance_sampling(p: Floats, inputs: Arrays, config: Config) -> tuple[float, Floats]:
    """-sum(r A)"""
    gain = np.exp(p - _like(p, inputs, "logprobs")) * _like(p, inputs, "advantages")
    return float(-gain.sum()), -gain


def ppo(p: Floats, inputs: Arrays, config: Config) -> tuple[float, Floats]:
    """-sum(min(r A, clip(r) A))"""
    ratio = np.exp(p - _like(p, inputs, "logprobs"))
    return _clipped(ratio, _like(p, inputs, "advantages"), inputs, config)


def cispo(p: Floats, inputs: Arrays, config: Config) -> tuple[float, Floats]:
    """-sum(stopgrad(clip(r)) A p)"""
    low, high = _bounds(inputs, config, 0.0, 4.0)
    ratio = np.clip(np.exp(p - _like(p, inputs, "logprobs")), low, high)
    derivative = -ratio * _like(p, inputs, "advantages")
    return float((derivative * p).sum()), derivative


def dro(p: Floats, inputs: Arrays, config: Config) -> tuple[float, Floats]:
    """-sum(p A - beta/2 (p - q)^2)"""
    beta = float(config.get("beta", 0.05))
    gap = p - _like(p, inputs, "logprobs")
    advantages = _like(p, inputs, "advantages")
    return float(-(p * advantages - 0.5 * beta * gap**2).sum()), -(advantages - beta * gap)


def gspo(p: Floats, inputs: Arrays, config: Config) -> tuple[float, Floats]:
    """The ppo form with one ratio per sequence and the gradient of each token."""
    mask = inputs.get("sequence_ratio_mask")
    chosen = np.ones_like(p, bool) if mask is None else _like(p, inputs, "sequence_ratio_mask") != 0
    gap = p - _like(p, inputs, "logprobs")
    ratio = np.exp(gap[chosen].mean()) if chosen.any() else 1.0
    return _clipped(np.full_like(p, ratio), _like(p, inputs, "advantages"), inputs, config)


def custom(p: Floats, inputs: Arrays, config: Config) -> tuple[float, Floats]:
    """Uploaded graphs are not evaluated here: every one stands for -sum(p)."""
    return float(-p.sum()), -np.ones_like(p)


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    # Without recorded stability information it is the estimator it stabilises.
    "stable_reinforce": importance_sampling,
    "custom": custom,
}


def _clipped(
    ratio: Floats, advantages: Floats, inputs: Arrays, config: Config
) -> tuple[float, Floats]:
    low, high = _bounds(inputs, config, 0.8, 1.2)
    free, bound = ratio * advantages, np.clip(ratio, low, high) * advantages
    return float(-np.minimum(free, bound).sum()), np.where(free <= bound, -free, 0.0)


def _bounds(inputs: Arrays, config: Config, low: float, high: float) -> tuple[Any, Any]:
    """Clip bounds per token where given as inputs, else from the config."""
    return (
        inputs.get("clip_low_threshold", float(config.get("clip_low_threshold", low))),
        inputs.get("clip_high_threshold", float(config.get("clip_high_threshold", high))),
    )


def _like(p: Floats, inputs: Arrays, name: str) -> Floats:
    value = inputs.get(name)
    place = f'loss_fn_inputs["{name}"]'
    if value is None:
        raise InputError("this loss needs it", place)
    array = np.asarray(value, dtype=np.float64)
    if array.shape != p.shape:
        raise InputError(f"has shape {list(array.shape)}, target_tokens has {list(p.shape)}", place)
    return array
