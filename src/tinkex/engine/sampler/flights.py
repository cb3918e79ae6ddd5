"""Decoding steps on a device, each begun before the tokens of the one before are read.

So the device need not wait while those are counted in. What a step lacks when it begins are the
tokens, which it finds on the device, and which sequences they end: those run along for one step,
and what they draw is dropped. Blocks that they give up meanwhile may be taken at once, because
whoever takes them writes to them in a later step.
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
class Row:
    """What one row computes, and how its token is drawn; without a piece it is nobody's."""

    version: str
    piece: Piece | None = None
    temperature: float = 0.0
    uniform: float = 0.0


class Step(Protocol):
    """A step that the device is busy with."""

    @property
    def logits_BV(self) -> Tensor:
        """The logits of its rows, until the next step."""
        ...

    def wait(self) -> tuple[list[int], list[float]]:
        """The tokens drawn and their log-probabilities, row by row."""
        ...


S = TypeVar("S", bound=Step)


class Steps(Protocol[S]):
    """What runs steps: see `DecodeGraphs`."""

    def size(self, count: int) -> int:
        """How many rows are computed for so many."""
        ...

    def start(self, rows: Sequence[Row], after: S | None = None) -> S:
        """Compute the rows' last tokens, or those that `after` draws, and draw the next ones."""
        ...


@dataclass(frozen=True, slots=True)
class Flight:
    """A step under way, and whose rows it computes."""

    step: Step
    rows: list[Row]


class Flights:
    """Begins steps for sequences of `batcher`; `runs` are the requests that they belong to."""

    def __init__(
        self, steps: Steps[Step], batcher: Batcher, runs: Mapping[TokenSequence, SampleRun]
    ) -> None:
        self._steps = steps
        self._batcher = batcher
        self._runs = runs

    def begin(self, pieces: Sequence[Piece]) -> Flight | None:
        """Start a step of all pieces that want nothing but the next token, if there are any."""
        decoding = [piece for piece in pieces if len(piece) == 1 and self._only_draws(piece)]
        if not decoding:
            return None
        decoding.sort(key=lambda piece: piece.sequence.version)
        return self._start(self._rows(decoding), None)

    def follow(self, flight: Flight) -> Flight | None:
        """Start the step after one that nobody has waited for, where all it needs is known."""
        going: list[TokenSequence | None] = []
        for row in flight.rows:
            sequence = None if row.piece is None else row.piece.sequence
            run = None if sequence is None else self._runs.get(sequence)
            if sequence is None or run is None:
                going.append(None)
                continue
            if not run.plain:
                return None  # its token is drawn from logits that the next step overwrites
            goes_on = len(sequence.tokens) + 1 < sequence.max_length
            going.append(sequence if goes_on else None)
        staying = [sequence for sequence in going if sequence is not None]
        # Rows that are nobody's are not worth computing where fewer would do.
        if not staying or self._steps.size(len(staying)) < self._steps.size(len(going)):
            return None
        pieces = self._batcher.ahead(staying)
        if pieces is None:
            return None
        following = iter(self._rows(pieces, ahead=1))
        rows: list[Row] = []
        version = staying[0].version
        for sequence in going:
            # One that is nobody's has a version that there still is, and lies next to its others.
            rows.append(Row(version) if sequence is None else next(following))
            version = rows[-1].version
        return self._start(rows, flight.step)

    def living(self, flight: Flight) -> list[Piece]:
        """The pieces of a flight whose sequences have not ended since it began."""
        pieces = [row.piece for row in flight.rows if row.piece is not None]
        return [piece for piece in pieces if piece.sequence in self._runs]

    def _start(self, rows: list[Row], after: Step | None) -> Flight | None:
        try:
            return Flight(self._steps.start(rows, after), rows)
        except Exception as error:  # noqa: BLE001 - the plain path finds whose fault it is
            _log.warning("a captured step failed and is repeated plainly: %s", error)
            return None

    def _rows(self, pieces: Sequence[Piece], *, ahead: int = 0) -> list[Row]:
        sequences = [piece.sequence for piece in pieces]
        runs = [self._runs[sequence] for sequence in sequences]
        numbers = next_uniforms(runs, sequences, ahead=ahead)
        return [
            Row(run.version, piece, run.op.params.temperature if run.plain else 0.0, number)
            for run, piece, number in zip(runs, pieces, numbers, strict=True)
        ]

    def _only_draws(self, piece: Piece) -> bool:
        """Whether all that is wanted of a piece is the next token."""
        sequence = piece.sequence
        run = self._runs[sequence]
        scored = sequence.sample != 0 or run.scores.complete
        return piece.reaches_end and scored and run.draws(sequence)
