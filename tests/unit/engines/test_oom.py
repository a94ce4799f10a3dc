"""Out of memory: the chunk is halved, unfinished clients run again with a warning, and the results
are the same.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

import fedclade as fc
from fedclade import SCAFFOLD, FedAvg, Method, PerFedAvg
from fedclade.core.federation import SegmentSum
from fedclade.core.pytree import Tree
from fedclade.data import from_arrays
from fedclade.engines import accumulator, simulator
from fedclade.engines.accumulator import Accumulator
from fedclade.engines.chunk_execution import ClientBatch
from fedclade.engines.client_state import ClientStateStore
from fedclade.engines.oom import OomRetry
from fedclade.errors import FedcladeWarning, InvalidInputError
from fedclade.models import MLP
from fedclade.training.config import EngineConfig, LocalConfig, TrainingConfig
from fedclade.training.runner import TrainingRun

CPU = torch.device("cpu")
NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you"
        " tried to allocate 8 bytes."
    ),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
]


def run_that_fits(
    max_chunk: int, error: BaseException, chunks_run: list[list[int]]
) -> Callable[[Sequence[Tensor]], Iterator[list[int]]]:
    def run(chunks: Sequence[Tensor]) -> Iterator[list[int]]:
        for chunk in chunks:
            chunks_run.append(chunk.tolist())
            if len(chunk) > max_chunk:
                raise error
            yield [10 * place for place in chunk.tolist()]

    return run


def chunk_warnings(caught: Iterable[warnings.WarningMessage]) -> list[tuple[str, ...]]:
    """The numbers in each warning: clients per chunk, clients in the retry, engine.chunk. Checks
    that there is no other warning.
    """
    numbers = []
    for record in caught:
        warning = record.message
        assert isinstance(warning, FedcladeWarning)
        assert warning.field == "engine.chunk"
        assert " on cpu " in str(warning)
        numbers.append(tuple(re.findall(r"\d+", str(warning))))
    return numbers


@pytest.mark.parametrize(
    "error", NO_MEMORY, ids=["cuda", "numpy", "torch on the CPU", "driver", "cudnn"]
)
def test_halves_until_it_fits_and_runs_no_finished_client_twice(error: BaseException) -> None:
    chunks_run: list[list[int]] = []
    freed: list[int] = []
    retry = OomRetry(CPU, lambda: freed.append(1))
    order = torch.tensor([4, 2, 0, 6, 1, 5, 3])
    with pytest.warns(FedcladeWarning) as caught:
        actual = list(retry.run_chunks(run_that_fits(3, error, chunks_run), order, 6))
    # 6 do not fit, 3 do.
    assert chunks_run == [[4, 2, 0, 6, 1, 5], [4, 2, 0], [6, 1, 5], [3]]
    assert [(chunk.tolist(), result) for chunk, result in actual] == [
        ([4, 2, 0], [40, 20, 0]),
        ([6, 1, 5], [60, 10, 50]),
        ([3], [30]),
    ]
    assert chunk_warnings(caught) == [("6", "3", "3")]
    assert "engine.chunk=3" in str(caught[0].message)
    assert freed == [1]


def test_later_calls_use_the_size_that_fits_and_a_later_chunk_may_fail() -> None:
    chunks_run: list[list[int]] = []
    retry = OomRetry(CPU, lambda: None)

    def run(chunks: Sequence[Tensor]) -> Iterator[int]:
        for chunk in chunks:
            chunks_run.append(chunk.tolist())
            if 5 in chunk and len(chunk) > 1:
                raise MemoryError
            yield len(chunk)

    assert [result for _, result in retry.run_chunks(run, torch.arange(4), 4)] == [4]  # these fit
    with pytest.warns(FedcladeWarning) as caught:
        actual = list(retry.run_chunks(run, torch.arange(7), 4))
    assert [chunk.tolist() for chunk, _ in actual] == [[0, 1, 2, 3], [4], [5], [6]]
    # 0 … 3 were finished. 4 and 5 fit neither into chunks of four nor into chunks of two.
    assert chunks_run == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6], [4, 5], [4], [5], [6]]
    assert chunk_warnings(caught) == [("4", "2", "2"), ("2", "1", "1")]
    assert retry.max_chunk == 1


def test_a_single_client_that_does_not_fit_is_an_error() -> None:
    run = run_that_fits(0, MemoryError(), [])
    with (
        pytest.warns(FedcladeWarning) as warned,
        pytest.raises(InvalidInputError, match=r"local\.batch_size") as caught,
    ):
        list(OomRetry(CPU, lambda: None).run_chunks(run, torch.arange(2), 2))
    assert chunk_warnings(warned) == [("2", "1", "1")]
    assert caught.value.field == "model"
    assert isinstance(caught.value.__cause__, MemoryError)


def test_other_errors_are_passed_on() -> None:
    run = run_that_fits(1, RuntimeError("shapes do not fit"), [])
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        list(OomRetry(CPU, lambda: None).run_chunks(run, torch.arange(4), 4))


def clients() -> fc.data.Clients:
    draw = torch.Generator().manual_seed(0)
    sizes = [12, 5, 9, 7, 12, 4, 8, 6, 10, 3]
    xs = [torch.randn(size, 6, generator=draw) for size in sizes]
    ys = [(x[:, 0] > 0).long() for x in xs]
    return from_arrays([(x, y, x[:3], y[:3]) for x, y in zip(xs, ys, strict=True)])


def trained(method: Method, **options: Any) -> fc.Result:
    return fc.run(
        method,
        clients(),
        MLP(8),
        rounds=3,
        clients_per_round=8,
        lr=0.1,
        eval_every=1,
        seed=1,
        device="cpu",
        **options,
    )


@cache
def undisturbed_run(method: type[Method], workers: int) -> fc.Result:
    return trained(method(), threads=workers)


@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD, PerFedAvg], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("where", ["steps", "sums", "state"])
def test_a_run_with_little_memory_has_the_same_result(
    where: str, method: type[Method], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "state" and method is not SCAFFOLD:
        pytest.skip("its clients have no state")
    undisturbed = undisturbed_run(method, workers)
    run_program, add, reserve = simulator.run_program, Accumulator.add, ClientStateStore.reserve

    def at_most_two(clients: Sequence[Any] | Tensor) -> None:
        if len(clients) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def limited_run(program: Any, clients: ClientBatch, *others: Any) -> tuple[Tree, Tree | None]:
        at_most_two(clients.client_ids)
        return run_program(program, clients, *others)

    def limited_add(self: Accumulator, places: Tensor, reply: Tree) -> None:
        at_most_two(places)
        add(self, places, reply)

    def limited_reserve(self: ClientStateStore, ids: Tensor) -> None:
        at_most_two(ids)
        reserve(self, ids)

    if where == "steps":
        monkeypatch.setattr(simulator, "run_program", limited_run)
    elif where == "sums":
        monkeypatch.setattr(Accumulator, "add", limited_add)
    else:
        monkeypatch.setattr(ClientStateStore, "reserve", limited_reserve)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        retried = trained(method(), threads=workers, chunk=9)
    assert chunk_warnings(caught) == [("8", "4", "4"), ("4", "2", "2")]

    def without_seconds(result: fc.Result) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in row.items() if name != "seconds"}
            for row in result.history
        ]

    assert without_seconds(retried) == without_seconds(undisturbed)
    for client in range(10):
        model, expected = (
            retried.model_of(client).state_dict(),
            undisturbed.model_of(client).state_dict(),
        )
        assert all(torch.equal(model[name], expected[name]) for name in model)


def test_a_retry_waits_for_the_chunks_of_the_first_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out in the calling thread, while a worker computes the second chunk."""
    run_program, add = simulator.run_program, Accumulator.add
    numbers, second_began, at_retry = count(), threading.Event(), list[bool]()
    second_ended = threading.Event()

    def slow_run(*arguments: Any) -> tuple[Tree, Tree | None]:
        number = next(numbers)
        if number == 0:
            assert second_began.wait(30)
        if number == 1:
            second_began.set()
            time.sleep(0.3)
        result = run_program(*arguments)
        if number == 1:
            second_ended.set()
        return result

    def limited_add(self: Accumulator, places: Tensor, reply: Tree) -> None:
        if len(places) > 2:
            raise MemoryError
        add(self, places, reply)

    def clear(self: simulator.Simulator) -> None:
        at_retry.append(second_ended.is_set())

    monkeypatch.setattr(simulator, "run_program", slow_run)
    monkeypatch.setattr(Accumulator, "add", limited_add)
    monkeypatch.setattr(simulator.Simulator, "_clear_compiled", clear)
    with pytest.warns(fc.FedcladeWarning, match="Out of memory"):
        trained(FedAvg(), threads=2, chunk=3)
    assert at_retry == [True]


def poison(key: int, client: int, reply: Tree) -> Tree:
    return {name: value * torch.nan for name, value in reply.items()} if client == 3 else reply


def poisoned_models() -> list[dict[str, Tensor]]:
    partitioned = clients()
    fed = fc.Simulator(partitioned, device="cpu", threads=1, chunk=4, faults=poison)
    settings, local = TrainingConfig(2, 8, eval_every=0, checkpoint_every=0), LocalConfig(lr=0.1)
    result = TrainingRun(
        SCAFFOLD(), partitioned, MLP(8), local, settings, EngineConfig(), federation=fed
    ).run()
    return [result.model_of(client).state_dict() for client in range(10)]


@cache
def undisturbed_models() -> list[dict[str, Tensor]]:
    return poisoned_models()


@pytest.mark.parametrize("times", range(1, 9))
@pytest.mark.parametrize("where", ["rows", "sums", "state"])
def test_no_client_counts_twice_if_memory_runs_out_once(
    where: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out while the replies of a chunk are collected. One client's reply is poisoned.
    Nothing of the chunk may have been stored before.
    """

    expected, left = undisturbed_models(), times
    owner, name = {
        "rows": (simulator.Collected, "reserve"),
        "sums": (Accumulator, "add"),
        "state": (ClientStateStore, "reserve"),
    }[where]
    original = getattr(owner, name)

    def fails_once(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            left = -1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(*arguments)

    monkeypatch.setattr(owner, name, fails_once)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        retried = poisoned_models()
    assert len(caught) == (left < 0)
    assert left < 0 or times > 4  # at least two chunks in each of two rounds
    for model, expected_model in zip(retried, expected, strict=True):
        assert all(torch.equal(model[name], expected_model[name]) for name in model)


def test_nothing_is_added_if_memory_runs_out_in_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    places, reply = torch.arange(2), {"a": torch.ones(2, 3), "b": torch.ones(2, 4)}
    total = Accumulator(SegmentSum(torch.ones(4), 1, torch.zeros(4, dtype=torch.int64)))
    total.add(places, reply)

    def full(*args: Any, **kwargs: Any) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as no_memory:
        no_memory.setattr(accumulator.torch, "empty", full)
        with pytest.raises(MemoryError):
            total.add(places + 2, reply)
    assert {name: value.tolist() for name, value in total.sums.items()} == {
        "a": [[2.0] * 3],
        "b": [[2.0] * 4],
    }


LIMITED = """
import resource, sys
import torch
import fedclade as fc

xs = [torch.randn(20, 64, generator=torch.Generator().manual_seed(client)) for client in range(64)]
clients = fc.data.from_arrays([(x, (x[:, 0] > 0).long(), x, (x[:, 0] > 0).long()) for x in xs])

def run(chunk):
    engine = {"device": "cpu", "threads": 1, "chunk": chunk}
    model = fc.models.MLP(4096)
    return fc.run(fc.FedAvg(), clients, model, rounds=1, clients_per_round=1.0, **engine)

free = run(2)
pages = int(open("/proc/self/statm").read().split()[0])
# Memory for the weights (1 MB) of a few dozen clients, but not for 64.
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 100 * 2**20,) * 2)
limited = run(64)
pairs = zip(free.model_of(3).parameters(), limited.model_of(3).parameters(), strict=True)
print(all(torch.equal(a, b) for a, b in pairs))
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux limits a process's address space"
)
def test_a_process_with_limited_memory() -> None:
    process = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["True"]
    assert "FedcladeWarning" in process.stderr
    assert "cpu with 64 clients" in process.stderr
