"""The first Ctrl-C is noted, the second interrupts, and after the run the old handler is back."""

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


def test_without_ctrl_c_no_interrupt_is_requested() -> None:
    with Interrupt() as interrupt:
        assert not interrupt.requested
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_first_ctrl_c_is_noted_and_the_second_interrupts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("fedclade", "WARNING")
        assert "Ctrl-C" in record.getMessage()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_handler_is_restored_when_the_run_fails() -> None:
    with pytest.raises(ValueError, match="a round failed"), Interrupt():
        raise ValueError("a round failed")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_handler_stays() -> None:
    received: list[int] = []

    def handler(number: int, frame: object) -> None:
        received.append(number)

    signal.signal(signal.SIGINT, handler)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert not interrupt.requested
    assert received == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


def test_in_another_thread_the_handler_stays() -> None:
    handlers: list[object] = []

    def run() -> None:
        with Interrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
