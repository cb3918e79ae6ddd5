"""The table of primitives that models, LoRA, the trainer and the sampler compute with.

`backends.torch` fills it in for any device. `backends.cuda` replaces entries by kernels. A decoder
carries the table that serves it; it is chosen once, when the decoder is made: see `choose`.

Shapes: T tokens, C rows of a chunk, S rows of a segment, D hidden, H heads, G key/value heads,
d head size, X = H*d, Y = G*d, M intermediate size or targets of all rows, V vocabulary, I inputs,
O outputs, Z inner activations of an adapter, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from tinkex.engine.attention.paged import TokenSpan
    from tinkex.engine.backends.torch.layers import Rotation
    from tinkex.engine.backends.torch.linear import Linear
    from tinkex.engine.backends.torch.rectangles import Rectangle
    from tinkex.engine.decoder import Attend, Decoder, DecoderConfig
    from tinkex.types import AdamParams


class MakeLinear(Protocol):
    """Makes the product with a frozen weight and its bias."""

    def __call__(
        self, weight_OI: Tensor, bias_O: Tensor | None = None, widths: Sequence[int] | None = None
    ) -> Linear:
        """`widths` are the outputs of each of the projections that the weight joins."""
        ...


class Rotate(Protocol):
    """Splits queries and keys into heads, normalises them if given weights, and rotates them."""

    def __call__(
        self,
        q_TX: Tensor,
        k_TY: Tensor,
        rotation: Rotation,
        norms_2d: Tensor | None = None,
        eps: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return q_THd and k_TGd."""
        ...


class PagedAttend(Protocol):
    """Attention of packed spans over a paged cache that `new_cache` made."""

    def __call__(
        self, cache: Tensor, spans: Sequence[TokenSpan], *, block_size: int, strict: bool
    ) -> Attend:
        """Writes the spans' own keys and values first.

        With `strict`, a token's output has the same bits as in packed attention.
        """
        ...


class CrossEntropy(Protocol):
    """Log-probabilities of chosen tokens and, given the gradient by them, that by the logits."""

    def __call__(
        self,
        logits_CV: Tensor,
        parts: Sequence[Rectangle],
        ids_M: Tensor,
        gradient_M: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[list[Tensor], Tensor | None]:
        """The result may overwrite the logits."""
        ...


class AdamW(Protocol):
    """One AdamW update of flat float32 parameters."""

    def __call__(
        self,
        old: Sequence[Tensor],
        new: Sequence[Tensor],
        *,
        clip: float,
        step: int,
        params: AdamParams,
    ) -> float:
        """Write new parameters and moments; return the norm of the change.

        `old` are parameters, gradient and both moments; `new` are outputs: parameters and moments.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The primitives that serve one decoder."""

    name: str
    linear: MakeLinear
    norm: Callable[[Tensor, Tensor, float], Tensor]
    """Scale rows to a root mean square of one, then by a weight."""
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """`h + delta`, and its norm."""
    rotate: Rotate
    gate: Callable[[Tensor, Tensor], Tensor]
    """The gated activation between the MLP's projections."""
    packed_attention: Callable[[Sequence[int], torch.device], Attend]
    """Differentiable attention within each sequence of a pack, without a cache."""
    paged_attention: PagedAttend
    new_cache: Callable[[DecoderConfig, int, Tensor], Tensor]
    """An empty cache for a number of tokens, with the device and dtype of a tensor."""
    shrink: Callable[[Tensor, Tensor], Tensor]
    """z_SZ = x @ A.T"""
    expand_add_: Callable[[Tensor, Tensor, Tensor, float], None]
    """y += scale * z @ B.T"""
    cross_entropy: CrossEntropy
    normalizers: Callable[[Tensor], Tensor]
    """What to subtract from each row's logits to get log-probabilities."""
    adamw: AdamW
    sample: Callable[[Tensor, Sequence[Any]], Tensor]
    """Samples one token per row of logits, with the parameters in the row's `Draw`."""
    sampling_adapters: Callable[..., Any] | None = None
    """Makes the sampler's `Adapters` that serve any mix of versions in one product."""
    decode_steps: Callable[..., Any] | None = None
    """Makes the sampler's `DeviceSteps`: whole decoding steps that run asynchronously."""
    strict_products: Callable[[], Callable[[Decoder, Sequence[Any]], Any]] | None = None
    """Makes the products of a strict training pass, where plain ones differ from sampling."""
    copies_adapters: bool = False
    """Whether sampling reads copies of the adapters in the precision of the activations."""
