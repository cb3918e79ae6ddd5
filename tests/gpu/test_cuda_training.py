"""Training on the GPU: kernels against the plain path in float64, the same bits every time."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import kit


def _gradients(device: str, dtype: torch.dtype, config: str) -> list[torch.Tensor]:
    made = kit.trainer(kit.decoder(kit.CONFIGS[config], device, dtype))
    kit.add(made, "a", 16)
    kit.add(made, "b", 5, train_mlp=False)
    kit.add(made, "c", 40, train_attn=False, train_unembed=False)
    ops = [
        kit.train_op(model_id, [kit.datum(kit.tokens(length, 3)) for length in lengths])
        for model_id, lengths in (("a", (90, 33)), ("b", (7, 200)), ("c", (129,)))
    ]
    kit.run(made, *ops)
    found = [made.adapters[model_id].gradient_P for model_id in "abc"]
    return [gradient.cpu().double() for gradient in found if gradient is not None]


@pytest.mark.parametrize("config", ["qwen", "llama"])
def test_gradients_in_bf16_are_those_of_the_plain_path(config: str) -> None:
    fast = _gradients("cuda", torch.bfloat16, config)
    # The CPU computes in float32 with the same weights: what differs is bf16 rounding.
    plain = _gradients("cpu", torch.float32, config)
    assert len(fast) == len(plain) == 3
    for ours, reference in zip(fast, plain, strict=True):
        assert ours.isfinite().all()
        # Activations of three layers are rounded to 8 bits.
        assert (ours - reference).norm() / reference.norm() < 3e-2


def test_a_step_gives_the_same_bits_every_time() -> None:
    first, second = (_gradients("cuda", torch.bfloat16, "qwen") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
