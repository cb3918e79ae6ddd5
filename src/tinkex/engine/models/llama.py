"""The Llama family: Llama 2 and 3, SmolLM2 and others of `LlamaForCausalLM`.

Shapes: T tokens, D hidden, H heads, G key/value heads, d head size, X = H*d, Y = G*d,
M intermediate.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch.nn import functional as F

from tinkex.engine.models.base import BlockForm, plainly
from tinkex.engine.models.layers import (
    add_norm,
    rms_norm,
    rotated_heads,
    rotation,
    split_heads,
    swiglu,
)
from tinkex.engine.models.weights import StoredDecoder

if TYPE_CHECKING:
    from torch import Tensor

    from tinkex.engine.models.base import Attend, Project, RunBlock
    from tinkex.engine.models.layers import Rotation


class Llama(StoredDecoder):
    """Pre-norm blocks of rotary attention with grouped heads, and a gated MLP."""

    arch = "LlamaForCausalLM"
    model_type = "llama"
    form = BlockForm(norms=("attention", "mlp", "last"), rotation="halves", activation="silu")

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        project: Project,
        run_block: RunBlock = plainly,
    ) -> Tensor:
        """Return h_TD after the final norm."""
        rotate = rotation(positions_T, self.frequencies_F)
        h_TD = F.embedding(tokens_T, self.stored.embed_VD)
        for layer in range(self.config.num_layers):
            h_TD = run_block(partial(self._block, layer, rotate, attend, project), h_TD)
        return rms_norm(h_TD, self.stored.final_norm_D, self.config.rms_eps)

    def _block(
        self, layer: int, rotate: Rotation, attend: Attend, project: Project, h_TD: Tensor
    ) -> Tensor:
        weights = self.stored.layers[layer]
        head_dim, eps = self.config.head_dim, self.config.rms_eps
        x_TD = rms_norm(h_TD, weights.input_norm_D, eps)
        q_TX, k_TY, v_TY = project(layer, ("q_proj", "k_proj", "v_proj"), x_TD)
        q_THd, k_TGd = rotated_heads(q_TX, k_TY, rotate)
        o_TX = attend(layer, q_THd, k_TGd, split_heads(v_TY, head_dim))
        (o_TD,) = project(layer, ("o_proj",), o_TX)

        h_TD, x_TD = add_norm(h_TD, o_TD, weights.post_attention_norm_D, eps)
        gate_TM, up_TM = project(layer, ("gate_proj", "up_proj"), x_TD)
        return h_TD + project(layer, ("down_proj",), swiglu(gate_TM, up_TM))[0]
