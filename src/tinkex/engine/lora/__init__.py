"""LoRA adapters: shapes, weights, and the layers that serve many at once."""

from tinkex.engine.lora.head import LOGITS_BYTES, Swept, Targets, adapt_, logits, sweep
from tinkex.engine.lora.layers import Segment, adapted_projections
from tinkex.engine.lora.shapes import (
    ALPHA,
    LoraTarget,
    Matrix,
    check_lora,
    parameter_count,
    targets,
)
from tinkex.engine.lora.weights import LoraWeights, Pair, initial, seed_of, wrap

__all__ = [
    "ALPHA",
    "LOGITS_BYTES",
    "LoraWeights",
    "Matrix",
    "Pair",
    "Segment",
    "Swept",
    "LoraTarget",
    "Targets",
    "adapt_",
    "adapted_projections",
    "check_lora",
    "initial",
    "logits",
    "parameter_count",
    "seed_of",
    "sweep",
    "targets",
    "wrap",
]
