"""Out of memory: the chunk is halved, who was not done runs again, a line says so, and nothing else
is different.
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
from fedclade.engines import reply_validation, simulator
from fedclade.engines.client_loop import ClientBatch
from fedclade.engines.client_state import ClientStateStore
from fedclade.engines.oom import OomRetry
from fedclade.engines.reply_validation import Accumulator
from fedclade.errors import InvalidInputError
from fedclade.models import MLP
from fedclade.training.runner import TrainingRun
from fedclade.training.settings import EngineConfig, LocalConfig, TrainingConfig

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


def with_room_for(
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
def test_halves_until_it_fits_and_asks_nobody_twice_who_was_done(error: BaseException) -> None:
    asked: list[list[int]] = []
    freed: list[int] = []
    room = OomRetry(CPU, lambda: freed.append(1))
    with pytest.warns(UserWarning, match="memory") as told:
        got = list(
            room.run_chunks(with_room_for(3, error, asked), torch.tensor([4, 2, 0, 6, 1, 5, 3]), 6)
        )
    # 6 do not fit, 3 do.
    assert asked == [[4, 2, 0, 6, 1, 5], [4, 2, 0], [6, 1, 5], [3]]
    assert [(chunk.tolist(), result) for chunk, result in got] == [
        ([4, 2, 0], [40, 20, 0]),
        ([6, 1, 5], [60, 10, 50]),
        ([3], [30]),
    ]
    assert [str(warning.message) for warning in told] == [
        "memory: 6 clients at a time do not fit into that of cpu; those of this step who were not"
        " done run again, 3 at a time (engine.chunk=3 has it so from the start)."
    ]
    assert freed == [1]


def test_what_is_known_to_fit_is_kept_and_a_later_chunk_may_not_fit() -> None:
    asked: list[list[int]] = []
    room = OomRetry(CPU, lambda: None)

    def run(chunks: Sequence[Tensor]) -> Iterator[int]:
        for chunk in chunks:
            asked.append(chunk.tolist())
            if 5 in chunk and len(chunk) > 1:
                raise MemoryError
            yield len(chunk)

    assert [result for _, result in room.run_chunks(run, torch.arange(4), 4)] == [4]  # these fit
    with pytest.warns(UserWarning, match="memory") as told:
        got = list(room.run_chunks(run, torch.arange(7), 4))
    assert [chunk.tolist() for chunk, _ in got] == [[0, 1, 2, 3], [4], [5], [6]]
    # 0 … 3 were done; 4 and 5 did not fit by fours, nor by twos.
    assert asked == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6], [4, 5], [4], [5], [6]]
    assert [str(warning.message).split(" clients")[0] for warning in told] == [
        "memory: 4",
        "memory: 2",
    ]
    assert room.max_chunk == 1


def test_one_client_that_does_not_fit_is_refused_in_words() -> None:
    with (
        pytest.warns(UserWarning, match="2 clients at a time"),
        pytest.raises(
            InvalidInputError,
            match=r"not even one client at a time fits into that of cpu.*local\.batch_size",
        ),
    ):
        list(
            OomRetry(CPU, lambda: None).run_chunks(
                with_room_for(0, MemoryError(), []), torch.arange(2), 2
            )
        )


def test_other_errors_are_passed_on() -> None:
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        list(
            OomRetry(CPU, lambda: None).run_chunks(
                with_room_for(1, RuntimeError("shapes do not fit"), []), torch.arange(4), 4
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
@pytest.mark.parametrize("where", ["steps", "sums", "memory"])
def test_a_run_without_room_ends_like_any_other(
    where: str, method: type[Method], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "memory" and method is not SCAFFOLD:
        pytest.skip("its clients remember nothing")
    undisturbed = undisturbed_run(method, workers)
    fold, add, make_room = simulator.run_program, Accumulator.add, ClientStateStore.make_room

    def for_two(many: Sequence[Any] | Tensor) -> None:
        if len(many) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def cramped_fold(program: Any, lanes: ClientBatch, *others: Any) -> tuple[Tree, Tree | None]:
        for_two(lanes.client)
        return fold(program, lanes, *others)

    def cramped_add(self: Accumulator, places: Tensor, reply: Tree) -> None:
        for_two(places)
        add(self, places, reply)

    def cramped_room(self: ClientStateStore, ids: Tensor) -> None:
        for_two(ids)
        make_room(self, ids)

    if where == "steps":
        monkeypatch.setattr(simulator, "run_program", cramped_fold)
    elif where == "sums":
        monkeypatch.setattr(Accumulator, "add", cramped_add)
    else:
        monkeypatch.setattr(ClientStateStore, "make_room", cramped_room)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained(method(), threads=workers, chunk=9)
    lines = [str(warning.message) for warning in told]
    assert [line.split(" do not fit")[0] for line in lines] == [
        "memory: 8 clients at a time",
        "memory: 4 clients at a time",
    ]

    def without_seconds(result: fc.Result) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in row.items() if name != "seconds"}
            for row in result.history
        ]

    assert without_seconds(found) == without_seconds(undisturbed)
    for client in range(10):
        one, other = found.model_of(client).state_dict(), undisturbed.model_of(client).state_dict()
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
@pytest.mark.parametrize("where", ["rows", "sums", "memory"])
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
        "memory": (ClientStateStore, "make_room"),
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
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = poisoned_models()
    assert len(told) == (left < 0)
    assert left < 0 or times > 4  # two chunks in each of two rounds, at least
    for one, other in zip(found, expected, strict=True):
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
        no_memory.setattr(reply_validation.torch, "empty", full)
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
found = run(64)
pairs = zip(free.model_of(3).parameters(), found.model_of(3).parameters(), strict=True)
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
    assert "memory: 64 clients at a time do not fit into that of cpu" in ended.stderr
