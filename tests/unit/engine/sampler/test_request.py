"""Random numbers are made ahead, and are still those of seed, sample and position."""

from __future__ import annotations

from tests.unit.engine.sampler.kit import op, sampler, text
from tinkex.engine.sampler.pick import uniforms


def test_numbers_made_ahead_are_those_of_their_own_position() -> None:
    run = sampler().submit(op(text(5), num_samples=3, max_tokens=300, seed=11))
    places = [(0, 0), (1, 0), (0, 1), (2, 63), (2, 64), (0, 65), (1, 200), (1, 199), (0, 66)]
    for sample, more in places:  # samples drift apart, and one that starts over may go back
        sequence = run.sequences[sample]
        sequence.tokens[5:] = [1] * more
        assert run.uniform(sequence) == float(uniforms(11, sample, 5 + more))
