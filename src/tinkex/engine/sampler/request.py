"""One sampling request while it runs: its sequences, its prompt scores, and its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from tinkex.engine.backends.torch.pick import Draw, seed_of, uniforms
from tinkex.engine.protocol import SampleResult
from tinkex.engine.sampler.prompt import PromptScores
from tinkex.engine.sampler.sequence import TokenSequence
from tinkex.types import SampledSequence, SampleResponse, TopkLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.engine.protocol import OnToken, SampleOp
    from tinkex.engine.sampler.checks import Accepted
    from tinkex.engine.sampler.stops import Stops
    from tinkex.errors import RequestFailedError

_AHEAD: Final = 64
"""Random numbers generated at a time."""

Best = tuple[list[int], list[float]]
"""The likeliest tokens of one position and their log-probabilities."""


class SampleRun:
    """A submitted request. When `done`, it has a `result`, an `error`, or was `cancelled`."""

    def __init__(
        self,
        op: SampleOp,
        version: str,
        accepted: Accepted,
        *,
        number: int,
        vocab_size: int,
        stops: Stops,
        on_token: OnToken | None,
    ) -> None:
        self.op = op
        self.version = version
        self.result: SampleResult | None = None
        self.error: RequestFailedError | None = None
        self.cancelled = False
        self.device_s = 0.0
        self.seed = seed_of(op.params.seed, op.op_id)
        # Whether sampling needs only the temperature and a random number.
        self.plain = not (self.draw(0.0).filters or op.topk_sample_logprobs)
        # Whether it does not even need a temperature: see `sample_at_temperature_one`.
        self.usual = self.plain and op.params.temperature == 1.0
        self.scores = PromptScores(op, accepted.prompt, self.seed, vocab_size)
        self.sequences = [
            _sequence(accepted, version, op.cache_salt, number, sample)
            for sample in range(len(op.sequence_ids))
        ]
        # Only the first sample scores the prompt; the others may share all of it.
        self.sequences[0].reusable = self._reusable()
        for sequence in self.sequences[1:]:
            sequence.first = self.sequences[0]
        self._best: list[list[Best]] = [[] for _ in self.sequences]
        # Random numbers generated ahead, with the position of the first, by sample.
        self._ahead: list[tuple[int, list[float]]] = [(0, [])] * len(self.sequences)
        self._stops = stops
        self._on_token = on_token
        for sequence in self.sequences:
            if not self._has_work(sequence):
                sequence.stop_reason = "length"

    @property
    def done(self) -> bool:
        return self.cancelled or self.result is not None or self.error is not None

    @property
    def unfinished(self) -> list[TokenSequence]:
        return [sequence for sequence in self.sequences if sequence.stop_reason is None]

    def draws(self, sequence: TokenSequence) -> bool:
        """Whether the next row of `sequence` is sampled."""
        return len(sequence.tokens) < sequence.max_length

    def held_back_by(self, sequence: TokenSequence) -> list[TokenSequence]:
        """The samples that begin with the same row as this one."""
        if sequence is not self.sequences[0]:
            return []
        return [other for other in self.unfinished if not other.running and other.held_back]

    def draw(self, uniform: float) -> Draw:
        """How to draw a token, given its random number."""
        params = self.op.params
        return Draw(params.temperature, params.top_k, params.top_p, uniform)

    def known_uniform(self, sequence: TokenSequence, place: int) -> float | None:
        """The random number of the token at a position, if it was generated already."""
        start, numbers = self._ahead[sequence.sample]
        return numbers[place - start] if 0 <= place - start < len(numbers) else None

    def keep_uniforms(self, sequence: TokenSequence, start: int, numbers: list[float]) -> None:
        """Store the random numbers of the tokens from a position on."""
        self._ahead[sequence.sample] = start, numbers

    def scored(self) -> None:
        """Update the first sample after progress: scored rows may come from the cache."""
        first = self.sequences[0]
        first.reusable = self._reusable()
        if first.stop_reason is None and not self._has_work(first):
            first.stop_reason = "length"

    def grow(self, sequence: TokenSequence, token: int, logprob: float, best: Best | None) -> None:
        """Append a sampled token and check whether the sequence ends with it."""
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        if best is not None:
            self._best[sequence.sample].append(best)
        if self._stops(sequence.tokens, sequence.prompt_length):
            sequence.stop_reason = "stop"
        elif len(sequence.tokens) == sequence.max_length:
            sequence.stop_reason = "length"
        if self._on_token is not None:
            self._on_token(sequence.sample, token, logprob, best)

    def finish(self) -> None:
        """Build the result; all sequences have ended."""
        first = self.sequences[0]
        cached = first.cached or 0
        response = SampleResponse(
            sequences=[self._sampled(sequence) for sequence in self.sequences],
            prompt_logprobs_np=self.scores.logprobs(),
            topk_prompt_logprobs_np=self.scores.topk(),
            target_prompt_logprobs=self.scores.targets(),
            prompt_cache_hit_tokens=cached,
            prompt_alt_tokens=self.scores.alternatives(),
        )
        self.result = SampleResult(
            response=response,
            prompt_tokens=first.prompt_length,
            cached_tokens=cached,
            generated_tokens=sum(len(sequence.logprobs) for sequence in self.sequences),
            device_s=self.device_s,
            version=self.version,
        )

    def _reusable(self) -> int:
        """Tokens that may come from the cache: rows that are not scored yet must be computed."""
        first = self.sequences[0]
        return first.max_length if self.scores.complete else self.scores.next_row

    def _has_work(self, sequence: TokenSequence) -> bool:
        scores_prompt = sequence.sample == 0 and not self.scores.complete
        return self.draws(sequence) or scores_prompt

    def _sampled(self, sequence: TokenSequence) -> SampledSequence:
        rows = self._best[sequence.sample]
        topk = None
        if self.op.topk_sample_logprobs:
            width = len(rows[0][0]) if rows else 0
            topk = TopkLogprobs(
                np.array([ids for ids, _ in rows], np.int32).reshape(len(rows), width),
                np.array([values for _, values in rows], np.float32).reshape(len(rows), width),
            )
        return SampledSequence(
            stop_reason=sequence.stop_reason or "length",
            sequence_id=self.op.sequence_ids[sequence.sample],
            tokens_np=np.array(sequence.generated, np.int32),
            logprobs_np=np.array(sequence.logprobs, np.float32),
            topk_logprobs_np=topk,
        )


def next_uniforms(
    runs: Sequence[SampleRun], sequences: Sequence[TokenSequence], *, ahead: int = 0
) -> list[float]:
    """The random number of each sequence's next token, or of one after it."""
    found: list[float] = []
    missing: list[tuple[int, SampleRun, TokenSequence, int]] = []
    for number, (run, sequence) in enumerate(zip(runs, sequences, strict=True)):
        place = len(sequence.tokens) + ahead
        known = run.known_uniform(sequence, place)
        if known is None:
            missing.append((number, run, sequence, place))
        found.append(known or 0.0)
    if missing:
        # Generating one number takes as long as generating many.
        _, makers, whose, starts = zip(*missing, strict=True)
        made = uniforms(
            np.array([run.seed for run in makers], np.uint64)[:, None],
            np.array([sequence.sample for sequence in whose])[:, None],
            np.array(starts)[:, None] + np.arange(_AHEAD),
        )
        rows: list[list[float]] = made.tolist()
        for (number, run, sequence, start), numbers in zip(missing, rows, strict=True):
            run.keep_uniforms(sequence, start, numbers)
            found[number] = numbers[0]
    return found


def _sequence(
    accepted: Accepted, version: str, salt: str, number: int, sample: int
) -> TokenSequence:
    return TokenSequence(
        # At most k later requests overtake sample k: many samples of one request do not delay the
        # others, and still none of them waits forever.
        turn=(number + sample, number),
        sample=sample,
        version=version,
        prompt_length=len(accepted.prompt),
        max_length=accepted.max_length,
        tokens=list(accepted.prompt),
        reusable=accepted.max_length,
        cache_salt=salt,
    )
