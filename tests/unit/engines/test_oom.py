"""Out of memory: the chunk is halved, unfinished clients run again, a line says so, and the results
are the same.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
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
from fedclade.errors import InvalidInputError
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


def that_fits(
    most: int, error: BaseException, asked: list[list[int]]
) -> Callable[[Sequence[Tensor]], Iterator[list[int]]]:
    def run(chunks: Sequence[Tensor]) -> Iterator[list[int]]:
        for chunk in chunks:
            asked.append(chunk.tolist())
            if len(chunk) > most:
                raise error
            yield [10 * place for place in chunk.tolist()]

    return run


@pytest.mark.parametrize(
    "error", NO_MEMORY, ids=["cuda", "numpy", "torch on the CPU", "driver", "cudnn"]
)
def test_halves_until_it_fits_and_runs_no_finished_client_twice(error: BaseException) -> None:
    asked: list[list[int]] = []
    freed: list[int] = []
    retry = OomRetry(CPU, lambda: freed.append(1))
    with pytest.warns(UserWarning, match="Out of memory") as caught:
        actual = list(
            retry.run_chunks(that_fits(3, error, asked), torch.tensor([4, 2, 0, 6, 1, 5, 3]), 6)
        )
    # 6 do not fit, 3 do.
    assert asked == [[4, 2, 0, 6, 1, 5], [4, 2, 0], [6, 1, 5], [3]]
    assert [(chunk.tolist(), result) for chunk, result in actual] == [
        ([4, 2, 0], [40, 20, 0]),
        ([6, 1, 5], [60, 10, 50]),
        ([3], [30]),
    ]
    assert [str(warning.message) for warning in caught] == [
        "Out of memory on cpu with 6 clients per chunk; retrying the unfinished clients with 3. Set"
        " engine.chunk=3 to avoid this."
    ]
    assert freed == [1]


def test_the_size_that_fits_is_kept_for_later_calls_and_a_later_chunk_may_fail() -> None:
    asked: list[list[int]] = []
    retry = OomRetry(CPU, lambda: None)

    def run(chunks: Sequence[Tensor]) -> Iterator[int]:
        for chunk in chunks:
            asked.append(chunk.tolist())
            if 5 in chunk and len(chunk) > 1:
                raise MemoryError
            yield len(chunk)

    assert [result for _, result in retry.run_chunks(run, torch.arange(4), 4)] == [4]  # these fit
    with pytest.warns(UserWarning, match="Out of memory") as caught:
        actual = list(retry.run_chunks(run, torch.arange(7), 4))
    assert [chunk.tolist() for chunk, _ in actual] == [[0, 1, 2, 3], [4], [5], [6]]
    # 0 … 3 were done; 4 and 5 did not fit by fours, nor by twos.
    assert asked == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6], [4, 5], [4], [5], [6]]
    assert [str(warning.message).split(" clients")[0] for warning in caught] == [
        "Out of memory on cpu with 4",
        "Out of memory on cpu with 2",
    ]
    assert retry.max_chunk == 1


def test_one_client_that_does_not_fit_is_an_error() -> None:
    with (
        pytest.warns(UserWarning, match="with 2 clients per chunk"),
        pytest.raises(
            InvalidInputError,
            match=r"Out of memory on cpu with a single client.*local\.batch_size",
        ),
    ):
        list(
            OomRetry(CPU, lambda: None).run_chunks(
                that_fits(0, MemoryError(), []), torch.arange(2), 2
            )
        )


def test_other_errors_are_passed_on() -> None:
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        list(
            OomRetry(CPU, lambda: None).run_chunks(
                that_fits(1, RuntimeError("shapes do not fit"), []), torch.arange(4), 4
            )
        )


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
def test_a_run_without_room_ends_like_any_other(
    where: str, method: type[Method], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "state" and method is not SCAFFOLD:
        pytest.skip("its clients have no state")
    undisturbed = undisturbed_run(method, workers)
    run_program, add, reserve = simulator.run_program, Accumulator.add, ClientStateStore.reserve

    def for_two(many: Sequence[Any] | Tensor) -> None:
        if len(many) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def cramped_run(program: Any, clients: ClientBatch, *others: Any) -> tuple[Tree, Tree | None]:
        for_two(clients.client_ids)
        return run_program(program, clients, *others)

    def cramped_add(self: Accumulator, places: Tensor, reply: Tree) -> None:
        for_two(places)
        add(self, places, reply)

    def cramped_reserve(self: ClientStateStore, ids: Tensor) -> None:
        for_two(ids)
        reserve(self, ids)

    if where == "steps":
        monkeypatch.setattr(simulator, "run_program", cramped_run)
    elif where == "sums":
        monkeypatch.setattr(Accumulator, "add", cramped_add)
    else:
        monkeypatch.setattr(ClientStateStore, "reserve", cramped_reserve)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        retried = trained(method(), threads=workers, chunk=9)
    lines = [str(warning.message) for warning in caught]
    assert [line.split(" per chunk")[0] for line in lines] == [
        "Out of memory on cpu with 8 clients",
        "Out of memory on cpu with 4 clients",
    ]

    def without_seconds(result: fc.Result) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in row.items() if name != "seconds"}
            for row in result.history
        ]

    assert without_seconds(retried) == without_seconds(undisturbed)
    for client in range(10):
        one, other = (
            retried.model_of(client).state_dict(),
            undisturbed.model_of(client).state_dict(),
        )
        assert all(torch.equal(one[name], other[name]) for name in one)


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
def test_memory_that_runs_out_once_counts_nobody_twice(
    where: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one of the places where a chunk's replies are taken in, a client of which is poisoned:
    what was kept of the chunk before?
    """

    expected, left = undisturbed_models(), times
    owner, name = {
        "rows": (simulator, "tree_index"),
        "sums": (Accumulator, "add"),
        "state": (ClientStateStore, "reserve"),
    }[where]
    then = getattr(owner, name)

    def fails_once(*given: Any) -> Any:
        nonlocal left
        left -= where != "rows" or given[1].ndim > 0
        if not left:
            left = -1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return then(*given)

    monkeypatch.setattr(owner, name, fails_once)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        retried = poisoned_models()
    assert len(caught) == (left < 0)
    assert left < 0 or times > 4  # two chunks in each of two rounds, at least
    for one, other in zip(retried, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_where_there_is_no_memory_for_a_sum_nothing_of_it_has_been_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places, reply = torch.arange(2), {"a": torch.ones(2, 3), "b": torch.ones(2, 4)}
    total = Accumulator(SegmentSum(torch.ones(4), 1, torch.zeros(4, dtype=torch.int64)))
    total.add(places, reply)

    def full(*given: Any, **more: Any) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as no_memory:
        no_memory.setattr(accumulator.torch, "empty", full)
        with pytest.raises(MemoryError):
            total.copy().add(places + 2, reply)
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
# Room for the weights (1 MB) of some dozen clients, a few times over; not for 64.
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 100 * 2**20,) * 2)
limited = run(64)
pairs = zip(free.model_of(3).parameters(), limited.model_of(3).parameters(), strict=True)
print(all(torch.equal(a, b) for a, b in pairs))
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="limits a process's address space, as Linux does"
)
def test_memory_that_really_runs_out() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["True"]
    assert "Out of memory on cpu with 64 clients per chunk" in ended.stderr
