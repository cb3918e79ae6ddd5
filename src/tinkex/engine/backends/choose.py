"""Which table of primitives serves a decoder on this machine.

A backend must show on this very machine that it agrees with the reference: each of its entries
runs on random rows of the model's own shapes, forward and backward. One that raises or disagrees
is left out with a line in the log.

Shapes: T tokens, D hidden, X = heads * d, Y = key/value heads * d, M intermediate, V vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import torch

from tinkex.engine.attention.paged import TokenSpan
from tinkex.engine.backends.torch import TORCH
from tinkex.engine.backends.torch.layers import rope_frequencies, rotation, split_heads
from tinkex.engine.backends.torch.rectangles import rectangles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tinkex.engine.backends.table import Backend
    from tinkex.engine.decoder import DecoderConfig

_log = logging.getLogger(__name__)

_KERNEL_DTYPES: Final = (torch.bfloat16, torch.float16)
_LENGTHS: Final = (21, 11)
_ROWS: Final = sum(_LENGTHS)
_BLOCK_SIZE: Final = 16
_TOLERANCE: Final = 2.0**-5
"""Of the largest number of a result. bfloat16 rounds to 2**-9 of a number; gradients add several
rounded numbers, and both sides round. A wrong kernel is off by about the largest number itself."""


def backend_for(config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> Backend:
    """The fastest backend that agrees with the reference here."""
    for candidate in _candidates(dtype, device):
        fault = disagreement(candidate, config, dtype=dtype, device=device)
        if fault is None:
            return candidate
        _log.warning("the %s backend is not used for %s: %s", candidate.name, config.name, fault)
    return TORCH


def _candidates(dtype: torch.dtype, device: torch.device) -> list[Backend]:
    if device.type != "cuda" or dtype not in _KERNEL_DTYPES or find_spec("triton") is None:
        return []
    # Imported here because a CPU need not have Triton.
    from tinkex.engine.backends.cuda import CUDA

    return [CUDA]


def disagreement(
    backend: Backend, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device
) -> str | None:
    """What of a backend does not agree with the reference, or None."""
    for name, trial in _Trials(config, dtype, device).all().items():
        try:
            found = trial(backend)
        except Exception as error:  # noqa: BLE001 - kernels may fail in any way
            return f"{name} failed: {error}"
        for mine, reference in zip(found, trial(TORCH), strict=True):
            difference = (mine.float() - reference.float()).abs().max()
            # Written so that a result that is not a number is a disagreement, too.
            if not bool(difference <= _TOLERANCE * reference.float().abs().max()):
                return f"{name} differs from the reference by {float(difference):.3g}"
    return None


class _Trials:
    """The entries that a backend may replace, each computed by any table on the same numbers."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator().manual_seed(0)
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        self._h_TD, self._delta_TD = self._random(_ROWS, hidden), self._random(_ROWS, hidden)
        self._weight_D = self._random(hidden)
        self._gate_TM, self._up_TM = self._random(_ROWS, inner), self._random(_ROWS, inner)
        self._qkv = [
            self._random(_ROWS, heads * dim)
            for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        ]
        self._norms_2d = self._random(2, dim) if config.qk_norm else None
        self._logits_TV = self._random(_ROWS, config.vocab_size).float()
        self._gradient_T = self._random(_ROWS).float()

    def all(self) -> dict[str, Callable[[Backend], Sequence[Tensor]]]:
        """By the name of the entry."""
        return {
            "norm": self._norm,
            "add_norm": self._add_norm,
            "rotate": self._rotate,
            "gate": self._gate,
            "packed_attention": self._packed_attention,
            "paged_attention": self._paged_attention,
            "cross_entropy": self._cross_entropy,
        }

    def _random(self, *shape: int) -> Tensor:
        # Drawn on the CPU: the same numbers whatever the device.
        return torch.randn(shape, generator=self._generator).to(self._device, self._dtype)

    def _norm(self, backend: Backend) -> Sequence[Tensor]:
        def compute(h_TD: Tensor) -> tuple[Tensor]:
            return (backend.norm(h_TD, self._weight_D, self._config.rms_eps),)

        return _with_gradients(compute, self._h_TD)

    def _add_norm(self, backend: Backend) -> Sequence[Tensor]:
        def compute(h_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, ...]:
            return backend.add_norm(h_TD, delta_TD, self._weight_D, self._config.rms_eps)

        return _with_gradients(compute, self._h_TD, self._delta_TD)

    def _rotate(self, backend: Backend) -> Sequence[Tensor]:
        positions_T = torch.cat([torch.arange(length) for length in _LENGTHS]).to(self._device)
        turn = rotation(positions_T, rope_frequencies(self._config).to(self._device))

        def compute(q_TX: Tensor, k_TY: Tensor) -> tuple[Tensor, ...]:
            return backend.rotate(q_TX, k_TY, turn, self._norms_2d, self._config.rms_eps)

        return _with_gradients(compute, *self._qkv[:2])

    def _gate(self, backend: Backend) -> Sequence[Tensor]:
        def compute(gate_TM: Tensor, up_TM: Tensor) -> tuple[Tensor]:
            return (backend.gate(gate_TM, up_TM),)

        return _with_gradients(compute, self._gate_TM, self._up_TM)

    def _packed_attention(self, backend: Backend) -> Sequence[Tensor]:
        attend = backend.packed_attention(_LENGTHS, self._device)

        def compute(*qkv: Tensor) -> tuple[Tensor]:
            return (attend(0, *(split_heads(x, self._config.head_dim) for x in qkv)),)

        return _with_gradients(compute, *self._qkv)

    def _paged_attention(self, backend: Backend) -> Sequence[Tensor]:
        blocks = -(-max(_LENGTHS) // _BLOCK_SIZE)
        spans = [
            TokenSpan(0, length, range(number * blocks, (number + 1) * blocks))
            for number, length in enumerate(_LENGTHS)
        ]
        # One layer is enough, and a deep model's cache would take memory.
        one_layer = replace(self._config, num_layers=1)
        cache = backend.new_cache(one_layer, len(spans) * blocks * _BLOCK_SIZE, self._h_TD)
        attend = backend.paged_attention(cache, spans, block_size=_BLOCK_SIZE, strict=True)
        heads = [split_heads(x, self._config.head_dim) for x in self._qkv]
        with torch.no_grad():
            return [attend(0, *heads)]

    def _cross_entropy(self, backend: Backend) -> Sequence[Tensor]:
        ids_T = torch.arange(_ROWS, device=self._device) % self._config.vocab_size
        parts = list(rectangles([(0, _ROWS)], [1] * _ROWS, 0))
        normalizers_T = backend.normalizers(self._logits_TV)
        found, gradient_TV = backend.cross_entropy(
            self._logits_TV.clone(), parts, ids_T, self._gradient_T, self._dtype
        )
        assert gradient_TV is not None
        return [*found, gradient_TV, normalizers_T]


def _with_gradients(compute: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> list[Tensor]:
    """The outputs, and a gradient by each input."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    with torch.enable_grad():
        outputs = compute(*leaves)
        # Not all the same: a norm does not feel a row that grows as a whole.
        weights = [torch.linspace(-1, 1, out.numel()).to(out).view(out.shape) for out in outputs]
        gradients = torch.autograd.grad(outputs, leaves, weights)
    return [*(out.detach() for out in outputs), *gradients]
