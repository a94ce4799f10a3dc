"""Worker threads: results and errors in order, and the same bytes for any number of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from fedclade import FedAvg, run
from fedclade.data import Clients
from fedclade.engines.worker_threads import ThreadPool, cores
from fedclade.errors import InvalidInputError
from fedclade.models import MLP


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_come_in_the_order_of_the_items(count: int) -> None:
    def work(number: int) -> int:
        time.sleep(0.01 if number % 2 else 0)
        return 10 * number

    assert list(ThreadPool(count).in_order(work, range(9))) == [10 * number for number in range(9)]


def test_workers_run_at_the_same_time_with_one_torch_thread_each() -> None:
    together = threading.Barrier(2, timeout=30)

    def work(number: int) -> int:
        together.wait()  # a single worker would wait for ever
        return torch.get_num_threads()

    assert list(ThreadPool(2).in_order(work, range(4))) == [1] * 4


def test_items_are_read_a_few_ahead_in_the_calling_thread() -> None:
    items_read: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            assert threading.current_thread() is threading.main_thread()
            items_read.append(number)
            yield number

    results = ThreadPool(2).in_order(lambda number: number, items())
    next(results)
    assert len(items_read) <= 4
    results.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_is_raised_in_place_of_its_result(count: int) -> None:
    def work(number: int) -> int:
        if number == 2:
            raise ValueError("client 2")
        return number

    results = ThreadPool(count).in_order(work, range(5))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="client 2"):
        next(results)


def test_an_error_waits_for_the_other_workers() -> None:
    began, ended = threading.Event(), threading.Event()

    def work(number: int) -> int:
        if number == 0:
            assert began.wait(30)
            raise MemoryError
        began.set()
        time.sleep(0.2)
        ended.set()
        return number

    with pytest.raises(MemoryError):
        list(ThreadPool(2).in_order(work, range(2)))
    assert ended.is_set()  # its memory is free before a retry


def test_a_caller_that_stops_waits_for_the_workers() -> None:
    """Such as the simulator, if memory runs out while it adds up a chunk."""
    began, ended = threading.Event(), threading.Event()

    def work(number: int) -> int:
        if number:
            began.set()
            time.sleep(0.2)
            ended.set()
        return number

    results = ThreadPool(2).in_order(work, range(3))
    assert next(results) == 0
    assert began.wait(30)
    results.close()  # type: ignore[attr-defined]
    assert ended.is_set()


@pytest.mark.parametrize("model", [MLP(8), MLP(8, dropout=0.5)], ids=["dense", "dropout"])
def test_the_number_of_threads_changes_no_byte(model: MLP, digits: Clients) -> None:
    results = [
        run(FedAvg(), digits, model, rounds=3, device="cpu", threads=workers)
        for workers in (1, 2, 5)
    ]
    first = results[0].model_of(0).state_dict()
    for other in results[1:]:
        for name, value in other.model_of(0).state_dict().items():
            assert torch.equal(value, first[name])
        assert other.summary["accuracy"] == results[0].summary["accuracy"]
        assert other.summary["train_loss"] == results[0].summary["train_loss"]


def test_there_is_at_least_one_core() -> None:
    assert cores() >= 1


@pytest.mark.parametrize("workers", [0, -1, 1.5, True])
def test_an_invalid_number_of_threads_is_refused(workers: int, digits: Clients) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "engine.threads"):
        run(FedAvg(), digits, MLP(8), rounds=1, threads=workers)
