"""The dense Qwen3 family: queries and keys are normalised per head before the rotation.

Shapes: T tokens, D hidden, H heads, G key/value heads, d head size, X = H*d, Y = G*d,
M intermediate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F

from tinkex.engine.models.layers import rms_norm, rotation, split_heads, swiglu
from tinkex.engine.models.weights import StoredDecoder

if TYPE_CHECKING:
    from torch import Tensor

    from tinkex.engine.models.base import Attend, Project


class Qwen3(StoredDecoder):
    """Pre-norm blocks of rotary attention with normalised heads, and a gated MLP."""

    arch = "Qwen3ForCausalLM"
    model_type = "qwen3"
    qk_norm = True

    def hidden(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, project: Project
    ) -> Tensor:
        """Return h_TD after the final norm."""
        head_dim, eps = self.config.head_dim, self.config.rms_eps
        rotate = rotation(positions_T, self.frequencies_F)
        h_TD = F.embedding(tokens_T, self.stored.embed_VD)

        for layer, block in enumerate(self.stored.layers):
            x_TD = rms_norm(h_TD, block.input_norm_D, eps)
            q_TX, k_TY, v_TY = project(layer, ("q_proj", "k_proj", "v_proj"), x_TD)
            q_THd = rms_norm(split_heads(q_TX, head_dim), block.head_norms["q_norm"], eps)
            k_TGd = rms_norm(split_heads(k_TY, head_dim), block.head_norms["k_norm"], eps)
            v_TGd = split_heads(v_TY, head_dim)
            o_TX = attend(layer, rotate(q_THd), rotate(k_TGd), v_TGd)
            h_TD = h_TD + project(layer, ("o_proj",), o_TX)[0]

            x_TD = rms_norm(h_TD, block.post_attention_norm_D, eps)
            gate_TM, up_TM = project(layer, ("gate_proj", "up_proj"), x_TD)
            h_TD = h_TD + project(layer, ("down_proj",), swiglu(gate_TM, up_TM))[0]

        return rms_norm(h_TD, self.stored.final_norm_D, eps)
