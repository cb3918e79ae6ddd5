"""Folding chunk results: order of data, reductions by suffix."""

from __future__ import annotations

import pytest

from tinkex.futures.call_results import combine
from tinkex.types import ForwardBackwardOutput, TensorData, Usage


def output(values: list[float], usage: Usage | None = None, **metrics: float):
    rows = [{"logprobs": TensorData.from_numpy(_array([value]))} for value in values]
    named = {name.replace("__", ":"): value for name, value in metrics.items()}
    return ForwardBackwardOutput("ArrayRecord", rows, named, usage=usage)


def _array(values: list[float]):
    import numpy as np

    return np.asarray(values, dtype=np.float32)


@pytest.mark.req("S20")
def test_data_keeps_its_order_and_metrics_are_reduced_by_suffix():
    whole = combine(
        [
            output([1, 2, 3], a__sum=1, b__mean=1, c__min=1, d__max=1, e__slack=1, f__unique=1),
            output([4], a__sum=2, b__mean=5, c__min=2, d__max=2, e__slack=5, f__unique=2),
        ]
    )
    assert [row["logprobs"].tolist() for row in whole.loss_fn_outputs] == [[1], [2], [3], [4]]
    assert whole.metrics == {
        "a:sum": 3,
        "b:mean": 2.0,  # (1 * 3 + 5 * 1) / 4: weighted by the number of outputs
        "c:min": 1,
        "d:max": 2,
        "e:slack": 3.0,  # 5 - 2
        "f:unique": 1,
        "f:unique_1": 2,
    }


def test_hashes_add_up_modulo_two_to_the_sixty_four():
    big = float(2**63)
    assert combine([output([1], h__hash2=big), output([1], h__hash2=big)]).metrics == {"h:hash2": 0}
    assert combine([output([1], h__hash2=-1.0)]).metrics == {"h:hash2": 2**64 - 1}


def test_a_metric_missing_from_a_chunk_or_without_a_known_reduction_is_dropped():
    whole = combine([output([1], a__sum=1, b__sum=1, c__odd=1), output([1], a__sum=1, c__odd=2)])
    assert whole.metrics == {"a:sum": 2}


def test_a_plain_name_survives_when_there_is_nothing_to_reduce():
    assert combine([output([1], plain=4)]).metrics == {"plain": 4}
    assert combine([output([1], plain=4), output([1], plain=5)]).metrics == {}


def test_a_mean_over_no_outputs_is_a_plain_average():
    assert combine([output([], m__mean=1), output([], m__mean=3)]).metrics == {"m:mean": 2}


def test_usage_adds_up():
    whole = combine([output([1], Usage(trained_tokens=3)), output([2], Usage(trained_tokens=4))])
    assert whole.usage == Usage(trained_tokens=7)
