"""A backend serves a decoder only after it has agreed with the reference on this machine."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.unit.engine.training.kit import CONFIG
from tinkex.engine.backends import choose
from tinkex.engine.backends.choose import backend_for, disagreement
from tinkex.engine.backends.torch import TORCH

if TYPE_CHECKING:
    from tinkex.engine.backends.table import Backend

CPU = torch.device("cpu")
NORMED = replace(CONFIG, qk_norm=True)


def found(backend: Backend) -> str | None:
    return disagreement(backend, NORMED, dtype=torch.float32, device=CPU)


def wrong(name: str, bend: Any) -> Backend:
    """The reference with one entry whose results are changed."""
    right = getattr(TORCH, name)

    def entry(*args: Any, **named: Any) -> Any:
        return bend(right(*args, **named))

    return replace(TORCH, name="bent", **{name: entry})


def test_the_reference_agrees_with_itself() -> None:
    assert found(TORCH) is None


@pytest.mark.parametrize(
    ("name", "bend"),
    [
        ("norm", lambda y: y * 1.1),
        ("add_norm", lambda pair: (pair[0], pair[1] * 1.1)),
        ("rotate", lambda pair: (pair[0], pair[1].flip(-1))),
        ("gate", lambda y: y + 1),
        ("packed_attention", lambda attend: lambda *qkv: attend(*qkv) * 0.9),
        ("paged_attention", lambda attend: lambda *qkv: attend(*qkv).flip(0)),
        ("normalizers", lambda lse: lse * torch.nan),
        ("cross_entropy", lambda pair: (pair[0], pair[1] * 0.5)),
    ],
)
def test_a_wrong_entry_is_named(name: str, bend: Any) -> None:
    entry = "cross_entropy" if name == "normalizers" else name
    assert str(found(wrong(name, bend))).startswith(f"{entry} differs from the reference by ")


def test_a_wrong_gradient_is_found() -> None:
    class Forgets(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * 0

    assert "gate differs" in str(found(wrong("gate", Forgets.apply)))


def test_an_entry_that_raises_is_named() -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no such instruction")

    assert found(replace(TORCH, gate=fail)) == "gate failed: no such instruction"


def test_a_backend_that_disagrees_is_left_out_with_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad = wrong("norm", lambda y: -y)
    good = replace(TORCH, name="good")
    monkeypatch.setattr(choose, "_candidates", lambda *_: [bad, good])
    with caplog.at_level(logging.WARNING):
        assert backend_for(CONFIG, dtype=torch.float32, device=CPU) is good
    assert "the bent backend is not used for" in caplog.text
    monkeypatch.setattr(choose, "_candidates", lambda *_: [bad])
    assert backend_for(CONFIG, dtype=torch.float32, device=CPU) is TORCH


def test_a_cpu_is_served_by_the_reference() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert backend_for(CONFIG, dtype=dtype, device=CPU) is TORCH


def test_the_cuda_table_replaces_what_kernels_compute() -> None:
    pytest.importorskip("triton")
    from tinkex.engine.backends.cuda import CUDA

    replaced = {
        field.name
        for field in fields(CUDA)
        if getattr(CUDA, field.name) is not getattr(TORCH, field.name)
    }
    assert {"norm", "add_norm", "rotate", "gate", "packed_attention", "paged_attention"} < replaced
    assert {"cross_entropy", "normalizers", "decode_steps", "sampling_adapters"} < replaced
    assert CUDA.linear is TORCH.linear
