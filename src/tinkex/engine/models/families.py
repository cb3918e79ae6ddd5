"""The table of model families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.engine.models.llama import Llama
from tinkex.engine.models.qwen2 import Qwen2
from tinkex.engine.models.qwen3 import Qwen3
from tinkex.errors import ModelError

if TYPE_CHECKING:
    from tinkex.engine.models.weights import StoredDecoder

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
