"""Targets as rectangles: none is lost, operations do not share a wide one, sizes are bounded."""

from __future__ import annotations

import pytest
import torch

from tinkex.engine.backends.torch.rectangles import rectangles


@pytest.mark.parametrize("cells", [1, 7, 2**20])
def test_every_target_is_in_one_rectangle_and_comes_back_in_order(cells):
    counts = [1, 1, 4, 0, 2, 3, 3, 1]
    values_M = torch.arange(100.0, 120.0)
    found = list(rectangles([(0, 2), (2, 5), (5, 8)], counts, 2, cells))
    assert found[0].first == 2
    assert found[-1].last == 2 + sum(counts)
    assert torch.cat([part.flat(part.filled(values_M)) for part in found]).tolist() == [
        float(value) for value in range(102, 102 + sum(counts))
    ]
    assert [row for part in found for row in range(part.start, part.stop)] == list(range(8))
    assert all(part.filled(values_M).numel() <= max(cells, 4) for part in found)


def test_rows_with_fewer_targets_are_filled_up_with_zeros():
    (part,) = rectangles([(0, 3)], [2, 0, 1], 0)
    assert part.filled(torch.tensor([5, 6, 7])).tolist() == [[5, 6], [0, 0], [7, 0]]


def test_operations_share_a_rectangle_only_where_every_row_has_one_target():
    assert len(list(rectangles([(0, 2), (2, 3)], [1, 1, 1], 0))) == 1
    assert len(list(rectangles([(0, 2), (2, 3)], [1, 1, 2], 0))) == 2


def test_a_piece_is_cut_the_same_way_in_any_batch():
    mine = [3, 1, 3, 2]
    (alone, beside) = (
        list(rectangles([(0, 4)], mine, 0, 6)),
        list(rectangles([(0, 2), (2, 6)], [50, 50, *mine], 0, 6)),
    )
    assert [part.stop - part.start for part in alone] == [2, 2]
    assert [part.stop - part.start for part in beside] == [1, 1, 2, 2]
