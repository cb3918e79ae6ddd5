"""The first signal asks, the second aborts; afterwards signals do what they did before."""

from __future__ import annotations

import signal
import threading

import pytest

from tinkex.futures.future import APIFuture
from tinkex.loops.graceful_stop import GracefulStop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_asks(number: signal.Signals, capfd: pytest.CaptureFixture[str]):
    with GracefulStop() as interruption:
        signal.raise_signal(number)
        assert interruption.asked
    said = capfd.readouterr().err
    assert "Stopping after the step that is being computed" in said
    assert "Ctrl-C again aborts" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_it(number: signal.Signals):
    with GracefulStop():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_signals_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with GracefulStop():
        signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_waiting_for_a_future_ends_with_the_future():
    future: APIFuture[int] = APIFuture()
    with GracefulStop() as interruption:
        threading.Timer(0.0, future.set_result, (1,)).start()
        assert not interruption.until(future)
    assert future.done()


def test_waiting_for_a_future_ends_with_the_first_signal():
    future: APIFuture[int] = APIFuture()
    with GracefulStop() as interruption:
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.0, signal.pthread_kill, (main, signal.SIGINT)).start()
        assert interruption.until(future)
        future.set_result(1)
    assert interruption.asked


def test_waiting_for_a_future_ends_with_an_error_at_the_second_signal():
    with GracefulStop() as interruption:
        signal.raise_signal(signal.SIGINT)
        assert interruption.until(APIFuture[int]())
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_future_that_ends_after_the_interruption_is_over_does_no_harm():
    future: APIFuture[int] = APIFuture()
    with GracefulStop() as interruption:
        signal.raise_signal(signal.SIGINT)
        interruption.until(future)
    future.set_result(1)
    assert future.result() == 1


def test_in_another_thread_nobody_can_ask():
    asked: list[bool] = []

    def work() -> None:
        with GracefulStop() as interruption:
            asked.append(interruption.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [False]
