"""Computing an adapter or a merged folder on this machine, to compare it with a server."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.adapters.compare import TEXTS, known
from tinkex.engine.local import LocalEngine
from tinkex.engine.local_settings import LocalSettings
from tinkex.engine.protocol import SampleOp, Weights
from tinkex.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.engine.models.loader import BaseModel

_CACHE_BYTES = 1 << 28
_MOST_TOKENS = 64
_ADAPTER = "adapter"


def texts_for(model: BaseModel) -> list[list[int]]:
    """The texts to compare, as tokens; numbers where the model has no tokenizer."""
    if model.tokenizer is None:
        vocab = model.decoder.config.vocab_size
        return [
            [(7 * i * i + 13 * n) % vocab for i in range(1, _MOST_TOKENS)]
            for n in range(len(TEXTS))
        ]
    return [model.tokenizer.encode(text)[:_MOST_TOKENS] for text in TEXTS]


def score(
    model: BaseModel, texts: Sequence[Sequence[int]], adapter: Path | None = None
) -> list[list[float]]:
    """The log-probability of every token but the first, with the adapter in a folder or without."""
    return asyncio.run(_score(model, texts, adapter))


async def _score(
    model: BaseModel, texts: Sequence[Sequence[int]], adapter: Path | None
) -> list[list[float]]:
    name = model.decoder.config.name
    settings = LocalSettings(cache_bytes=_CACHE_BYTES)
    with tempfile.TemporaryDirectory(prefix="tinkex-score-") as folder:
        async with LocalEngine([model], Path(folder), settings) as engine:
            if adapter is not None:
                await engine.import_saved(name, adapter, _ADAPTER)
            weights = Weights(base_model=name, location=None if adapter is None else _ADAPTER)
            return [await _logprobs(engine, weights, tokens) for tokens in texts]


async def _logprobs(engine: LocalEngine, weights: Weights, tokens: Sequence[int]) -> list[float]:
    op = SampleOp(
        op_id="score",
        weights=weights,
        prompt=ModelInput.from_ints(list(tokens)),
        params=SamplingParams(max_tokens=1, seed=0),
        sequence_ids=["score"],
        prompt_logprobs=True,
    )
    return known((await engine.sample(op)).response.prompt_logprobs)
