"""What the base model thinks of the answers that are compared: computed once, kept in the folder.

Kept as text, which holds a float exactly: a resumed run goes on with the same numbers.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.errors import ResultError
from tinkex.types import ModelInput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tinkex.chat.examples import Rendered
    from tinkex.clients.service import ServiceClient

FILE = "reference.json"


def reference(
    service: ServiceClient,
    model: str,
    examples: Sequence[Rendered],
    folder: Path,
    rendered: str,
    note: Callable[[str], None],
) -> list[float]:
    """The base model's log-probability of what is trained in each example."""
    file = folder / FILE
    known = _read(file, rendered)
    if known is not None and len(known) == len(examples):
        return known
    note(f"asking the base model about {len(examples)} answers, once")
    sampler = service.create_sampling_client(base_model=model)
    asked = [sampler.compute_logprobs(ModelInput.from_ints(one.tokens)) for one in examples]
    found = [_sum(one, future.result()) for one, future in zip(examples, asked, strict=True)]
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"rendered": rendered, "logprobs": found}))
    os.replace(part, file)
    return found


def _sum(example: Rendered, logprobs: Sequence[float | None]) -> float:
    # Nothing predicts the first token, so it has none.
    after = np.array(logprobs[1:], np.float64)
    if len(after) != len(example.tokens) - 1 or np.isnan(after).any():
        raise ResultError("the server did not give a log-probability for each token")
    return float(after @ np.asarray(example.weights[1:], np.float64))


def _read(file: Path, rendered: str) -> list[float] | None:
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return found["logprobs"] if found.get("rendered") == rendered else None
