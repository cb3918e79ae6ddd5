"""Telling a process that computes from one that is frozen, and saying how one ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tinkex.engine.process import ProcessSettings
from tinkex.engine.process.program import (
    LOOKS,
    Silence,
    computes,
    how_it_ended,
    is_stopped,
    verdict,
)
from tinkex.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


def test_silence_grows_look_by_look_and_ends_with_a_sign_of_life():
    silence = Silence()
    seen = [silence.look(0.5, heard=heard) for heard in (True, False, False, True, False)]
    assert seen == [0.0, 0.5, 1.0, 0.0, 0.5]


def test_by_default_a_frozen_process_is_given_up_within_two_seconds():
    settings = ProcessSettings()
    silence = Silence()
    look_s = settings.heartbeat_timeout_s / LOOKS
    # The worst case: the last sign of life came right after a look.
    looks, given_up = 1, None
    silence.look(look_s, heard=True)
    while given_up is None:
        looks += 1
        given_up = verdict(
            silence.look(look_s, heard=False),
            settings.heartbeat_timeout_s,
            settings.busy_timeout_s,
            lambda: False,
        )
    assert looks * look_s + settings.reap_timeout_s <= 2.0


@pytest.mark.parametrize(
    ("silent_s", "computing", "said"),
    [
        (1.4, False, None),
        (1.5, False, "gave no sign of life for 1.5 s and was killed"),
        (1.5, True, None),
        (59.0, True, None),
        (60.0, True, "was busy and gave no sign of life for 60 s, and was killed"),
    ],
)
def test_a_silent_process_that_computes_is_given_more_time(
    silent_s: float, computing: bool, said: str | None
):
    assert verdict(silent_s, 1.5, 60.0, lambda: computing) == said


def thread(proc: Path, number: int, state: str) -> None:
    folder = proc / "7" / "task" / str(number)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{number} (a name) R) {state} 1 7 7 0 -1 4194560")


@pytest.mark.parametrize(
    ("states", "expected"), [("S", False), ("TT", False), ("tS", False), ("SR", True), ("SD", True)]
)
def test_a_process_computes_when_one_of_its_threads_does(
    tmp_path: Path, states: str, expected: bool
):
    for number, state in enumerate(states):
        thread(tmp_path, number, state)
    assert computes(7, tmp_path) is expected


@pytest.mark.parametrize(("states", "expected"), [("TT", True), ("t", True), ("TS", False)])
def test_a_process_is_stopped_when_all_of_its_threads_are(
    tmp_path: Path, states: str, expected: bool
):
    for number, state in enumerate(states):
        thread(tmp_path, number, state)
    assert is_stopped(7, tmp_path) is expected
    assert not is_stopped(8, tmp_path)


def test_a_process_that_cannot_be_seen_does_not_compute(tmp_path: Path):
    assert not computes(7, tmp_path)
    thread(tmp_path, 1, "R")
    (tmp_path / "7" / "task" / "2").mkdir()
    (tmp_path / "7" / "task" / "2" / "stat").mkdir()  # reading it fails
    assert not computes(7, tmp_path)


@pytest.mark.parametrize(
    ("code", "reason", "said"),
    [
        (-9, None, "was killed by signal 9 (SIGKILL)"),
        (-11, None, "was killed by signal 11 (SIGSEGV)"),
        (-200, None, "was killed by signal 200 (unknown)"),
        (1, None, "ended with exit code 1"),
        (-9, "gave up: CUDA error", "gave up: CUDA error"),
        (None, "was frozen", "was frozen, and it is still there"),
        (None, None, "does not end"),
    ],
)
def test_the_report_says_how_it_ended(code: int | None, reason: str | None, said: str):
    report = how_it_ended(code, reason, ["one", "two"])
    assert said in report
    assert report.endswith("its last lines:\none\ntwo")
    assert "lines" not in how_it_ended(code, reason, [])


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"heartbeat_interval_s": 0.0}, "heartbeat_interval_s"),
        ({"close_grace_s": -1.0}, "close_grace_s"),
        ({"busy_timeout_s": float("nan")}, "busy_timeout_s"),
        ({"heartbeat_interval_s": 1.0, "heartbeat_timeout_s": 1.5}, "heartbeat_timeout_s"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, float], path: str):
    with pytest.raises(InputError) as caught:
        ProcessSettings(**settings)
    assert caught.value.path == path
