"""Asynchronous decoding: a step starts before the tokens of the previous one are read.

So the device does not wait for the host. When a step starts, its tokens are only on the device, and
the host does not know yet which sequences they end. Such sequences run for one step too many, and
its tokens are dropped. Their blocks may be reused at once, because the next user writes to them in
a later step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from tinkex.engine.sampler.request import next_uniforms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tinkex.engine.sampler.batcher import Batcher, Piece
    from tinkex.engine.sampler.request import SampleRun
    from tinkex.engine.sampler.sequence import TokenSequence

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """The input of one row, and how its token is sampled; without a piece it is padding."""

    version: str
    piece: Piece | None = None
    temperature: float = 0.0
    uniform: float = 0.0


class DeviceStep(Protocol):
    """A step that runs on the device."""

    @property
    def logits_BV(self) -> Tensor:
        """The logits of its rows, valid until the next step."""
        ...

    def wait(self) -> tuple[list[int], list[float]]:
        """The sampled tokens and their log-probabilities, row by row."""
        ...


S = TypeVar("S", bound=DeviceStep)


class DeviceSteps(Protocol[S]):
    """Starts steps on a device: see `DecodeGraphs`."""

    def size(self, count: int) -> int:
        """The number of rows that a step of `count` rows computes."""
        ...

    def start(self, rows: Sequence[DecodeRow], after: S | None = None) -> S:
        """Compute the rows' last tokens, or those that `after` samples; sample the next ones."""
        ...


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that was started, and its rows."""

    step: DeviceStep
    rows: list[DecodeRow]


class AsyncDecoder:
    """Starts steps for sequences of `batcher`; `runs` are the requests that they belong to."""

    def __init__(
        self,
        steps: DeviceSteps[DeviceStep],
        batcher: Batcher,
        runs: Mapping[TokenSequence, SampleRun],
    ) -> None:
        self._steps = steps
        self._batcher = batcher
        self._runs = runs

    def begin(self, pieces: Sequence[Piece]) -> PendingStep | None:
        """Start a step of all pieces that only need the next token, if there are any."""
        decoding = [piece for piece in pieces if len(piece) == 1 and self._only_draws(piece)]
        if not decoding:
            return None
        decoding.sort(key=lambda piece: piece.sequence.version)
        return self._start(self._rows(decoding), None)

    def follow(self, pending: PendingStep) -> PendingStep | None:
        """Start the next step before the results of a pending one are read, if that is possible."""
        going: list[TokenSequence | None] = []
        for row in pending.rows:
            sequence = None if row.piece is None else row.piece.sequence
            run = None if sequence is None else self._runs.get(sequence)
            if sequence is None or run is None:
                going.append(None)
                continue
            if not run.plain:
                # Its token is sampled on the host, from logits that the next step overwrites.
                return None
            continues = len(sequence.tokens) + 1 < sequence.max_length
            going.append(sequence if continues else None)
        staying = [sequence for sequence in going if sequence is not None]
        # Once enough rows have ended, a new and smaller batch computes less padding.
        if not staying or self._steps.size(len(staying)) < self._steps.size(len(going)):
            return None
        pieces = self._batcher.ahead(staying)
        if pieces is None:
            return None
        following = iter(self._rows(pieces, ahead=1))
        rows: list[DecodeRow] = []
        version = staying[0].version
        for sequence in going:
            # A padding row gets the version of its neighbour, so that rows stay ordered by version.
            rows.append(DecodeRow(version) if sequence is None else next(following))
            version = rows[-1].version
        return self._start(rows, pending.step)

    def living(self, pending: PendingStep) -> list[Piece]:
        """The pieces of a step whose sequences have not ended since it started."""
        pieces = [row.piece for row in pending.rows if row.piece is not None]
        return [piece for piece in pieces if piece.sequence in self._runs]

    def _start(self, rows: list[DecodeRow], after: DeviceStep | None) -> PendingStep | None:
        try:
            return PendingStep(self._steps.start(rows, after), rows)
        except Exception as error:  # noqa: BLE001 - the plain path finds the request at fault
            _log.warning("a captured step failed and is repeated without the graph: %s", error)
            return None

    def _rows(self, pieces: Sequence[Piece], *, ahead: int = 0) -> list[DecodeRow]:
        sequences = [piece.sequence for piece in pieces]
        runs = [self._runs[sequence] for sequence in sequences]
        numbers = next_uniforms(runs, sequences, ahead=ahead)
        return [
            DecodeRow(run.version, piece, run.op.params.temperature if run.plain else 0.0, number)
            for run, piece, number in zip(runs, pieces, numbers, strict=True)
        ]

    def _only_draws(self, piece: Piece) -> bool:
        """Whether a piece only needs the next token."""
        sequence = piece.sequence
        run = self._runs[sequence]
        scored = sequence.sample != 0 or run.scores.complete
        return piece.reaches_end and scored and run.draws(sequence)
