"""The prompt scores of a request, collected row by row.

Row i of a pass predicts prompt token i + 1. Rows arrive in order and a few at a time, so the logits
of a whole prompt never exist; a preempted sequence continues with the next row.

Shapes: R rows, V vocabulary, K tokens per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tinkex.engine.backends.torch.pick import best, invert, scaled, uniforms
from tinkex.types import PromptAltTokens, TensorData, TopkLogprobs
from tinkex.types.tensors import MASK_LOGPROB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tinkex.engine.protocol import SampleOp


class PromptScores:
    """Collects the scores that one request asks for.

    `next_row` is the first row still wanted, `stop_row` the end of the rows that exist.
    """

    def __init__(self, op: SampleOp, prompt: Sequence[int], seed: int, vocab_size: int) -> None:
        self.stop_row = len(prompt) - 1
        self._logprobs: _Logprobs | None = None
        self._topk: _Topk | None = None
        self._targets: _Targets | None = None
        self._alternatives: _Alternatives | None = None
        if op.prompt_logprobs:
            self._logprobs = _Logprobs(prompt, op.prompt_logprobs_last_n)
        if op.topk_prompt_logprobs:
            self._topk = _Topk(self.stop_row, min(op.topk_prompt_logprobs, vocab_size))
        if op.target_prompt_logprobs is not None:
            self._targets = _Targets(op.target_prompt_logprobs)
        if op.prompt_alt_tokens_k:
            self._alternatives = _Alternatives(
                self.stop_row, op.prompt_alt_tokens_k, op.params.temperature, seed
            )
        parts = (self._logprobs, self._topk, self._targets, self._alternatives)
        self._parts: list[_Part] = [part for part in parts if part is not None]
        first = min((part.first_row for part in self._parts), default=self.stop_row)
        self.next_row = min(first, self.stop_row)

    @property
    def complete(self) -> bool:
        return self.next_row >= self.stop_row

    def wanted(self, start: int, stop: int) -> range:
        """The rows among tokens `start` to `stop` that `add` expects next."""
        return range(max(start, self.next_row), min(stop, self.stop_row))

    def add(self, logits_RV: Tensor, lse_R: Tensor) -> None:
        """Take the logits of the next rows, with their normalizers."""
        for part in self._parts:
            # A part that starts later skips the rows before its own first.
            skip = max(part.first_row - self.next_row, 0)
            if skip < len(lse_R):
                part.add(self.next_row + skip, logits_RV[skip:], lse_R[skip:])
        self.next_row += len(lse_R)

    def logprobs(self) -> NDArray[np.float32] | None:
        """One per prompt token, NaN where not computed."""
        return None if self._logprobs is None else self._logprobs.values

    def topk(self) -> TopkLogprobs | None:
        return None if self._topk is None else TopkLogprobs(self._topk.ids, self._topk.values)

    def targets(self) -> TensorData | None:
        return None if self._targets is None else self._targets.result()

    def alternatives(self) -> PromptAltTokens | None:
        return None if self._alternatives is None else self._alternatives.result()


class _Part(Protocol):
    first_row: int

    def add(self, row: int, logits_RV: Tensor, lse_R: Tensor) -> None: ...


class _Logprobs:
    def __init__(self, prompt: Sequence[int], last_n: int | None) -> None:
        self._prompt = np.array(prompt, np.int64)
        self.first_row = 0 if last_n is None else max(len(prompt) - 1 - last_n, 0)
        self.values = np.full(len(prompt), np.nan, np.float32)

    def add(self, row: int, logits_RV: Tensor, lse_R: Tensor) -> None:
        places = slice(row + 1, row + 1 + len(lse_R))
        rows = np.arange(len(lse_R))
        self.values[places] = gather_logprobs(logits_RV, lse_R, rows, self._prompt[places])


class _Topk:
    """Position 0 has no prediction: its cells stay empty."""

    first_row = 0

    def __init__(self, rows: int, k: int) -> None:
        self._k = k
        self.ids = np.zeros((rows + 1, k), np.int32)
        self.values = np.full((rows + 1, k), MASK_LOGPROB, np.float32)

    def add(self, row: int, logits_RV: Tensor, lse_R: Tensor) -> None:
        places = slice(row + 1, row + 1 + len(lse_R))
        ids_RK, values_RK = best(logits_RV, lse_R, self._k)
        self.ids[places] = ids_RK.cpu().numpy()
        self.values[places] = values_RK.cpu().numpy()


class _Targets:
    """Dense targets are treated as CSR with full rows; the result has the layout of the targets."""

    def __init__(self, asked: TensorData) -> None:
        self._asked = asked
        assert asked.shape is not None
        rows, width = asked.shape
        crow = asked.sparse_crow_indices
        self._ids = np.array(asked.data, np.int64)
        self._offsets = np.arange(rows + 1) * width if crow is None else np.array(crow, np.int64)
        self._values = np.zeros(self._ids.shape, np.float32)
        # The row of the first cell that asks for anything, or the end.
        first_cell = np.flatnonzero(self._ids >= 0)[:1]
        found = np.searchsorted(self._offsets, first_cell, side="right") - 1
        self.first_row = int(found[0]) if found.size else rows

    def add(self, row: int, logits_RV: Tensor, lse_R: Tensor) -> None:
        offsets = self._offsets[row : row + len(lse_R) + 1]
        cells = slice(int(offsets[0]), int(offsets[-1]))
        rows = np.repeat(np.arange(len(lse_R)), np.diff(offsets))
        ids = self._ids[cells]
        found = gather_logprobs(logits_RV, lse_R, rows, np.maximum(ids, 0))
        self._values[cells] = np.where(ids >= 0, found, np.float32(0))

    def result(self) -> TensorData:
        asked = self._asked
        return TensorData(
            self._values,
            "float32",
            asked.shape,
            asked.sparse_crow_indices,
            asked.sparse_col_indices,
        )


class _Alternatives:
    """Independent draws, with replacement, at the request's temperature."""

    first_row = 0

    def __init__(self, rows: int, k: int, temperature: float, seed: int) -> None:
        self._temperature = temperature
        self._seed = seed
        self._ids = np.zeros((rows, k), np.int64)
        self._values = np.zeros((rows, k), np.float32)

    def add(self, row: int, logits_RV: Tensor, lse_R: Tensor) -> None:
        count, k = len(lse_R), self._ids.shape[1]
        if self._temperature > 0:
            positions = np.arange(row + 1, row + 1 + count)
            u_RK = uniforms(self._seed, 0, positions[:, None], np.arange(1, k + 1))
            temperatures = [self._temperature] * count
            drawn = invert(scaled(logits_RV, temperatures), _on(logits_RV, u_RK))
        else:
            drawn = logits_RV.argmax(-1, keepdim=True).expand(count, k)
        self._ids[row : row + count] = drawn.cpu().numpy()
        self._values[row : row + count] = (
            (logits_RV.gather(1, drawn) - lse_R[:, None]).cpu().numpy()
        )

    def result(self) -> PromptAltTokens:
        return PromptAltTokens(
            tokens=TensorData.from_numpy(self._ids), logprobs=TensorData.from_numpy(self._values)
        )


def gather_logprobs(
    logits_RV: Tensor, lse_R: Tensor, rows: NDArray[np.int64], ids: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The log-probability of each id in its row."""
    at, chosen = _on(logits_RV, rows), _on(logits_RV, ids)
    return (logits_RV[at, chosen] - lse_R[at]).cpu().numpy()


def _on(like: Tensor, array: NDArray[np.int64] | NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(array).to(like.device)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
