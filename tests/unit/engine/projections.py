"""The base model's linear layers, without any adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.engine.lora import adapted_projections

if TYPE_CHECKING:
    from tinkex.engine.decoder import Decoder, Project


def base_projections(decoder: Decoder, *, batch_invariant: bool = False) -> Project:
    return adapted_projections(decoder, (), batch_invariant=batch_invariant)
