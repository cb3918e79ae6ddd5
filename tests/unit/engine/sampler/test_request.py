"""Random numbers are made ahead, and are still those of seed, sample and position."""

from __future__ import annotations

from tests.unit.engine.sampler.kit import op, sampler, text
from tinkex.engine.backends.torch.pick import uniforms
from tinkex.engine.sampler.request import next_uniforms


def test_numbers_made_ahead_are_those_of_their_own_position() -> None:
    run = sampler().submit(op(text(5), num_samples=3, max_tokens=300, seed=11))
    places = [(0, 0), (1, 0), (0, 1), (2, 63), (2, 64), (0, 65), (1, 200), (1, 199), (0, 66)]
    for sample, more in places:  # samples drift apart, and one that starts over may go back
        sequence = run.sequences[sample]
        sequence.tokens[5:] = [1] * more
        assert next_uniforms([run], [sequence]) == [float(uniforms(11, sample, 5 + more))]
        found = next_uniforms([run], [sequence], ahead=1)
        assert found == [float(uniforms(11, sample, 6 + more))]


def test_numbers_of_many_requests_are_each_their_own() -> None:
    target = sampler()
    ops = [
        op(text(length), op_id=f"{length}", max_tokens=9, seed=2**63 + length) for length in (3, 7)
    ]
    runs = [target.submit(one) for one in ops]
    found = next_uniforms(runs, [run.sequences[0] for run in runs])
    assert found == [float(uniforms(2**63 + length, 0, length)) for length in (3, 7)]
