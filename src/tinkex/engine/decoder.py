"""The interface of base models.

A decoder owns the frozen base weights and the order of operations. The caller passes in the
attention over earlier tokens (`attend`; it owns packing and caches), the linear layers with
adapters (`project`), and what is saved of a block for the backward pass (`run_block`).

Tokens of all sequences are concatenated: no padding, no batch dimension.

Shapes: T tokens, D hidden, H heads, G key/value heads, d head size, X = H*d, V vocabulary,
I inputs and O outputs of one projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

from tinkex.adapters.peft_layout import ATTENTION, MLP

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tinkex.engine.backends.table import Backend
    from tinkex.engine.backends.torch.linear import Linear

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

PROJECTIONS: Final[tuple[Projection, ...]] = (*ATTENTION, *MLP)
SHARED_INPUT: tuple[tuple[Projection, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
"""The projections of a block by their input: each group is computed in one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context a model was first trained on.

    `linear` divides every frequency by `factor`. `llama3` leaves short wavelengths alone,
    divides long ones by `factor` and blends in between. `factors` divides each of the d/2
    frequencies by its own number, the form in which GGUF files store either of them.
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a base model. `arch` is the Hugging Face class name."""

    name: str
    arch: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_context: int
    tied_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]


def projection_shape(config: DecoderConfig, name: Projection) -> tuple[int, int]:
    """Outputs and inputs of a projection."""
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    hidden, middle = config.hidden_size, config.intermediate_size
    shapes: dict[Projection, tuple[int, int]] = {
        "q_proj": (heads, hidden),
        "k_proj": (kv_heads, hidden),
        "v_proj": (kv_heads, hidden),
        "o_proj": (hidden, heads),
        "gate_proj": (middle, hidden),
        "up_proj": (middle, hidden),
        "down_proj": (hidden, middle),
    }
    return shapes[name]


class Attend(Protocol):
    """Causal attention within each sequence; the caller owns packing and caches."""

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        """Return o_TX, the concatenated heads of each token."""
        ...


class Project(Protocol):
    """Linear layers: base weight and bias, plus the adapter of each token."""

    def __call__(
        self, layer: int, names: tuple[Projection, ...], x_TI: Tensor
    ) -> tuple[Tensor, ...]:
        """Return one output per name.

        Projections that share an input (q, k, v and gate, up) are computed in one call, so that
        their base weights are multiplied in one product.
        """
        ...


class RunBlock(Protocol):
    """Runs one transformer block, perhaps with activation checkpointing."""

    def __call__(self, block: Callable[[Tensor], Tensor], h_TD: Tensor) -> Tensor:
        """Return `block(h_TD)`."""
        ...


def keep_activations(block: Callable[[Tensor], Tensor], h_TD: Tensor) -> Tensor:
    """The default `RunBlock`: all activations are saved for the backward pass."""
    return block(h_TD)


class Decoder(Protocol):
    """A base model. Its weights never require a gradient."""

    config: DecoderConfig
    backend: Backend
    """The primitives that it computes with."""
    unembed_VD: Tensor
    """The output head: the embedding itself when the two are tied."""
    head: Linear
    """The product with the output head."""

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        project: Project,
        run_block: RunBlock = keep_activations,
    ) -> Tensor:
        """Return h_TD after the final norm, differentiable through `attend` and `project`."""
        ...

    def linear(self, layer: int, names: tuple[Projection, ...]) -> Linear:
        """Return the product with the joined weights of projections that share an input."""
        ...
