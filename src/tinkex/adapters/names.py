"""The names of an adapter's tensors: read in every spelling there is, written as PEFT does.

PEFT calls them `base_model.model.<Hugging Face name>.lora_A.weight`. Archives of hosted Tinker say
`model.unembed_tokens` for the unembedding, which `lm_head` is elsewhere.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

UNEMBED: Final = "unembed"
ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")

_KEY: Final = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?"
    r"(?:layers\.(?P<layer>\d{1,6})\.(?:self_attn|mlp)\.(?P<name>[a-z]+_proj)"
    r"|(?P<head>lm_head|unembed_tokens))"
    r"\.lora_(?P<factor>[AB])(?:\.default)?\.weight"
)


class Place(NamedTuple):
    """One factor of one adapted matrix; the unembedding belongs to no layer."""

    layer: int | None
    matrix: str
    factor: Literal["A", "B"]


def place_of(key: str) -> Place | None:
    """What a tensor is, by its name; None for one that no adapter of ours has."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    factor: Literal["A", "B"] = "A" if found["factor"] == "A" else "B"
    if found["head"]:
        return Place(None, UNEMBED, factor)
    if found["name"] not in (*ATTENTION, *MLP):
        return None
    return Place(int(found["layer"]), found["name"], factor)


def peft_key(place: Place) -> str:
    """PEFT's name of a tensor."""
    module = "lm_head"
    if place.layer is not None:
        group = "self_attn" if place.matrix in ATTENTION else "mlp"
        module = f"model.layers.{place.layer}.{group}.{place.matrix}"
    return f"base_model.model.{module}.lora_{place.factor}.weight"


def target_modules(matrices: set[str]) -> list[str]:
    """How a PEFT configuration lists these matrices."""
    listed = [name for name in (*ATTENTION, *MLP) if name in matrices]
    return [*listed, "lm_head"] if UNEMBED in matrices else listed
