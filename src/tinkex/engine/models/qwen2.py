"""The Qwen2 family (Qwen2, Qwen2.5): Llama's order of operations, with biases on q, k and v.

A bias is part of its projection, so the forward pass itself is Llama's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tinkex.engine.models.llama import Llama

if TYPE_CHECKING:
    from tinkex.engine.models.base import Projection


class Qwen2(Llama):
    """Llama with biases on the attention's inputs and none on its output."""

    arch = "Qwen2ForCausalLM"
    model_type = "qwen2"
    form = Llama.form
    biased: ClassVar[tuple[Projection, ...]] = ("q_proj", "k_proj", "v_proj")
    always_biased = True
