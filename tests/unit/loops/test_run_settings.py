"""Bad settings are refused by their names."""

from __future__ import annotations

from typing import Any

import pytest

from tinkex.errors import InputError
from tinkex.loops import DpoSettings, RlSettings, SftSettings

BAD: list[tuple[type[Any], dict[str, Any], str]] = [
    (SftSettings, {"model": ""}, "model: must not be empty"),
    (SftSettings, {"model": "=/tmp/model"}, "model: must not be empty"),
    (SftSettings, {"steps": 0}, "steps: must be at least 1, not 0"),
    (SftSettings, {"epochs": 0}, "epochs: must be at least 1, not 0"),
    (SftSettings, {"steps": 3, "epochs": 1}, "epochs: cannot be combined with steps"),
    (SftSettings, {"batch_size": -1}, "batch_size: must be at least 1, not -1"),
    (SftSettings, {"rank": 0}, "rank: must be at least 1"),
    (SftSettings, {"learning_rate": 0.0}, "learning_rate: must be a finite number above 0"),
    (SftSettings, {"learning_rate": float("nan")}, "learning_rate: must be a finite number"),
    (SftSettings, {"lr_schedule": "steep"}, "lr_schedule: must be one of constant, linear, cosine"),
    (SftSettings, {"warmup": -1}, "warmup: must be at least 0"),
    (SftSettings, {"steps": 3, "warmup": 3}, "warmup: must be fewer than the 3 steps"),
    (SftSettings, {"seed": -1}, "seed: must be from 0 to"),
    (SftSettings, {"save_every": 0}, "save_every: must be at least 1"),
    (SftSettings, {"eval_every": 0}, "eval_every: must be at least 1"),
    (SftSettings, {"patience": 0}, "patience: must be at least 1"),
    (SftSettings, {"max_tokens": 1}, "max_tokens: must be at least 2"),
    (SftSettings, {"eval_fraction": 1.0}, "eval_fraction: must be between 0 and 1"),
    (SftSettings, {"train_on": "some"}, "train_on: must be one of all, last"),
    (DpoSettings, {"beta": 0.0}, "beta: must be a finite number above 0"),
    (RlSettings, {"group_size": 1}, "group_size: must be at least 2"),
    (RlSettings, {"temperature": 0.0}, "temperature: must be a finite number above 0"),
    (RlSettings, {"max_tokens": 0}, "max_tokens: must be at least 1"),
]


@pytest.mark.parametrize(("kind", "given", "message"), BAD, ids=[row[2] for row in BAD])
def test_a_bad_setting_is_refused_by_its_name(kind: type[Any], given: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        kind(**given)
    assert str(caught.value).startswith(message)


def test_a_model_may_come_from_a_folder_of_ones_own():
    assert SftSettings(model="mine=/models/mine").base_model == "mine"


@pytest.mark.parametrize("kind", [SftSettings, DpoSettings, RlSettings])
def test_the_defaults_are_good(kind: type[Any]):
    assert kind().kind == kind.__name__[:-8].lower()
