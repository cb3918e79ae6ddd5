"""The first signal asks, the second ends; afterwards signals do what they did before."""

from __future__ import annotations

import signal
import threading

import pytest

from tinkex.loops.interruption import Interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_asks(number: signal.Signals, capfd: pytest.CaptureFixture[str]):
    with Interruption() as interruption:
        signal.raise_signal(number)
        assert interruption.asked
    assert "Finishing the step and saving" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_it(number: signal.Signals):
    with Interruption():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_signals_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interruption():
        signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_in_another_thread_nobody_can_ask():
    asked: list[bool] = []

    def work() -> None:
        with Interruption() as interruption:
            asked.append(interruption.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [False]
