"""Ctrl-C: the first is noted, the second interrupts, and afterwards it is as it was before."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from fedclade.training.graceful_interrupt import Interrupt


@pytest.fixture(autouse=True)
def _python_handles_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_nothing_is_asked_for_without_ctrl_c() -> None:
    with Interrupt() as interrupt:
        assert not interrupt.asked
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_first_ctrl_c_is_noted_and_the_second_interrupts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.asked
        assert "Ctrl-C again" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_handler_comes_back_when_the_run_fails() -> None:
    with pytest.raises(ValueError, match="a round failed"), Interrupt():
        raise ValueError("a round failed")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_callers_stays() -> None:
    received: list[int] = []

    def handler(number: int, frame: object) -> None:
        received.append(number)

    signal.signal(signal.SIGINT, handler)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert not interrupt.asked
    assert received == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


def test_in_another_thread_ctrl_c_stays_as_it_is() -> None:
    handlers: list[object] = []

    def run() -> None:
        with Interrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
