"""`Timeout` is built and compared as scripts expect."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tinkex.errors import InputError, InputTypeError
from tinkex.http_options import Timeout


def test_parts_that_are_not_named_take_the_default() -> None:
    timeout = Timeout(5, connect=1)
    assert timeout.as_dict() == {"connect": 1, "read": 5, "write": 5, "pool": 5}
    assert repr(timeout) == "Timeout(connect=1, read=5, write=5, pool=5)"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Timeout(connect=None, read=None, write=None, pool=None)),
        ((1, 2, 3, 4), Timeout(connect=1, read=2, write=3, pool=4)),
        ((1, 2), Timeout(connect=1, read=2, write=None, pool=None)),
        (Timeout(7), Timeout(7)),
    ],
)
def test_default_may_be_a_number_none_a_tuple_or_a_timeout(given: Any, expected: Timeout) -> None:
    assert Timeout(given) == expected
    assert hash(Timeout(given)) == hash(expected)
    assert pickle.loads(pickle.dumps(expected)) == expected


def test_a_part_without_a_value_is_refused() -> None:
    with pytest.raises(InputError, match="all of connect, read, write, pool"):
        Timeout(connect=1)


@pytest.mark.parametrize("wrong", ["5", [5], {}])
def test_what_is_no_number_is_refused(wrong: Any) -> None:
    with pytest.raises(InputTypeError, match="number of seconds"):
        Timeout(wrong)
