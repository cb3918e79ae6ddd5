"""The dense families: pre-norm blocks of rotary attention with grouped heads, and a gated MLP.

`StoredDecoder` defines the order of operations. The families differ in what their weights are:
Qwen2 has biases on q, k and v, Qwen3 normalises queries and keys per head before the rotation.

Shapes: T tokens, D hidden, H heads, G key/value heads, d head size, X = H*d, Y = G*d,
M intermediate.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from torch.nn import functional as F

from tinkex.adapters.peft_layout import ATTENTION
from tinkex.engine.backends.choose import backend_for
from tinkex.engine.backends.torch.layers import rope_frequencies, rotation, split_heads
from tinkex.engine.decoder import keep_activations
from tinkex.engine.models.weights import allocate
from tinkex.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tinkex.engine.backends.torch.layers import Rotation
    from tinkex.engine.backends.torch.linear import Linear
    from tinkex.engine.decoder import Attend, DecoderConfig, Project, Projection, RunBlock
    from tinkex.engine.models.weights import TensorSource


class StoredDecoder:
    """A decoder whose weights lie in memory of its own."""

    arch: ClassVar[str]
    """The name of Hugging Face's class."""
    model_type: ClassVar[str]
    """The family's short name, the same in `config.json` and in GGUF."""
    biased: ClassVar[tuple[Projection, ...]] = ATTENTION
    """The projections that have a bias when the configuration has `attention_bias`."""
    always_biased: ClassVar[bool] = False
    """Whether the family has these biases without the configuration saying so."""
    qk_norm: ClassVar[bool] = False
    """Whether queries and keys are normalised per head."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.backend = backend_for(config, dtype=dtype, device=device)
        self.stored = allocate(
            config, self.biased, dtype=dtype, device=device, linear=self.backend.linear
        )
        self.unembed_VD = self.stored.unembed_VD
        self.head = self.backend.linear(self.unembed_VD)
        self.frequencies_F = rope_frequencies(config).to(device)

    def fill(self, source: TensorSource) -> None:
        """Copy every tensor from the source, one at a time, converting as it goes."""
        for name, slot in self.stored.named():
            slot.copy_(source.read(name))

    def linear(self, layer: int, names: tuple[Projection, ...]) -> Linear:
        """The product with the joined weights of projections that share an input."""
        return self.stored.layers[layer].linears[names]

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        project: Project,
        run_block: RunBlock = keep_activations,
    ) -> Tensor:
        """Return h_TD after the final norm."""
        rotate = rotation(positions_T, self.frequencies_F)
        h_TD = F.embedding(tokens_T, self.stored.embed_VD)
        for layer in range(self.config.num_layers):
            h_TD = run_block(partial(self._block, layer, rotate, attend, project), h_TD)
        return self.backend.norm(h_TD, self.stored.final_norm_D, self.config.rms_eps)

    def _block(
        self, layer: int, rotate: Rotation, attend: Attend, project: Project, h_TD: Tensor
    ) -> Tensor:
        compute, weights = self.backend, self.stored.layers[layer]
        head_dim, eps = self.config.head_dim, self.config.rms_eps
        x_TD = compute.norm(h_TD, weights.input_norm_D, eps)
        q_TX, k_TY, v_TY = project(layer, ("q_proj", "k_proj", "v_proj"), x_TD)
        q_THd, k_TGd = compute.rotate(q_TX, k_TY, rotate, weights.head_norms_2d, eps)
        o_TX = attend(layer, q_THd, k_TGd, split_heads(v_TY, head_dim))
        (o_TD,) = project(layer, ("o_proj",), o_TX)

        h_TD, x_TD = compute.add_norm(h_TD, o_TD, weights.post_attention_norm_D, eps)
        gate_TM, up_TM = project(layer, ("gate_proj", "up_proj"), x_TD)
        return h_TD + project(layer, ("down_proj",), compute.gate(gate_TM, up_TM))[0]


class Llama(StoredDecoder):
    """Llama 2 and 3, SmolLM2 and others of `LlamaForCausalLM`."""

    arch = "LlamaForCausalLM"
    model_type = "llama"


class Qwen2(StoredDecoder):
    """Qwen2 and Qwen2.5: biases on the attention's inputs and none on its output."""

    arch = "Qwen2ForCausalLM"
    model_type = "qwen2"
    biased: ClassVar[tuple[Projection, ...]] = ("q_proj", "k_proj", "v_proj")
    always_biased = True


class Qwen3(StoredDecoder):
    """The dense Qwen3: queries and keys are normalised per head."""

    arch = "Qwen3ForCausalLM"
    model_type = "qwen3"
    qk_norm = True


FAMILIES: tuple[type[StoredDecoder], ...] = (Llama, Qwen2, Qwen3)


def family(name: str, where: str) -> type[StoredDecoder]:
    """Find a family by its class name or short name; `where` is the file that asks for it."""
    for made in FAMILIES:
        if name in (made.arch, made.model_type):
            return made
    supported = ", ".join(made.arch for made in FAMILIES)
    raise ModelError(
        f"{where}: the architecture {name or '(none named)'} is not supported; "
        f"supported are {supported}"
    )
