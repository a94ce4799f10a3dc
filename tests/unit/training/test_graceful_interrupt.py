"""The first Ctrl-C is noted, the second interrupts, and after the run the old handler is back."""

from __future__ import annotations

import io
import logging
import signal
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from fedclade.cli.console import log_lines
from fedclade.training.graceful_interrupt import STOPPING, Interrupt
from fedclade.training.progress_display import _Bar, display


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


def test_the_command_line_shows_the_first_ctrl_c_in_the_bar_and_other_warnings_as_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log, called = logging.getLogger("fedclade"), list[str]()
    log.addHandler(log_lines)
    try:
        log.warning(STOPPING)
        with log_lines.calling(lambda: called.append("stop")):
            log.warning(STOPPING)
            log.warning("Worker %d ended.", 3)
    finally:
        log.removeHandler(log_lines)
    assert called == ["stop"]
    assert capsys.readouterr().err == "fedclade: Worker 3 ended.\n"


def test_the_bar_says_that_the_run_stops_until_it_has_stopped() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, color_system=None)
    with display("fedavg", 3, console, quiet=False) as bar:
        bar.stopping()
        assert isinstance(bar, _Bar)
        bar.progress.refresh()
        assert "fedavg stops after this round (Ctrl-C again: now)" in text.getvalue()
    *_, last = text.getvalue().split("\r")
    assert "fedavg " in last
    assert "stops" not in last
