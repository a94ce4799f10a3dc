"""Workers: results in order, errors where they belong, and the same bytes whatever their number."""

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


def test_several_work_at_a_time_on_one_thread_of_torch_each() -> None:
    together = threading.Barrier(2, timeout=30)

    def work(number: int) -> int:
        together.wait()  # nobody gets on alone
        return torch.get_num_threads()

    assert list(ThreadPool(2).in_order(work, range(4))) == [1] * 4


def test_items_are_asked_for_a_few_ahead_and_here() -> None:
    asked: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            assert threading.current_thread() is threading.main_thread()
            asked.append(number)
            yield number

    results = ThreadPool(2).in_order(lambda number: number, items())
    next(results)
    assert len(asked) <= 4
    results.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_comes_where_its_result_would_have(count: int) -> None:
    def work(number: int) -> int:
        if number == 2:
            raise ValueError("client 2")
        return number

    results = ThreadPool(count).in_order(work, range(5))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="client 2"):
        next(results)


def test_after_an_error_nobody_works_on() -> None:
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
    assert ended.is_set()  # it has given back its memory before fewer are tried


@pytest.mark.parametrize("model", [MLP(8), MLP(8, dropout=0.5)], ids=["dense", "dropout"])
def test_their_number_changes_no_byte(model: MLP, digits: Clients) -> None:
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


def test_there_is_one_for_each_core_that_may_be_used() -> None:
    assert cores() >= 1


@pytest.mark.parametrize("workers", [0, -1, 1.5, True])
def test_a_wrong_number_is_refused(workers: int, digits: Clients) -> None:
    with pytest.raises(InvalidInputError, match=r"engine\.threads.*whole number"):
        run(FedAvg(), digits, MLP(8), rounds=1, threads=workers)
