"""The sums of an MLP's weights have the same bytes for every chunk, thread, node and order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from fedclade import FedAvg
from fedclade.conformance.example_clients import ragged_clients
from fedclade.conformance.method_run import EngineName, MethodRun
from fedclade.core.federation import ModelAssignment, SegmentSum
from fedclade.core.local_sgd import sgd
from fedclade.core.pytree import Tree, stack
from fedclade.data import Clients
from fedclade.engines.simulator import Simulator

# Sums of such weights round in float64: a plain sum depends on the order.
WEIGHTS = torch.rand(8, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def eight_clients() -> Clients:
    """Clients 6 and 7 have the data of 0 and 2. Simulators add equal sizes by number."""
    return ragged_clients().only([*range(6), 0, 2])


def sums(engine: EngineName = "simulator", order: Sequence[int] = range(8), **options: int) -> Tree:
    """The sums of the models that FedAvg's clients train, numbered in this order."""
    numbers = torch.tensor(order)
    run = MethodRun(FedAvg(), engine, eight_clients().only(order), **options)
    if isinstance(run.fed, Simulator):
        run.fed.names = numbers  # each client has the batches that it has in every order
    results = run.fed.map(
        sgd(run.method.local),
        torch.arange(8),
        per_client=ModelAssignment.all_same(stack([run.params]), 8),
        key=1,
        reduce=SegmentSum(WEIGHTS[numbers], 2),
    )
    return {**results.sums, "weight": results.total_weight}


@cache
def expected() -> Tree:
    return sums(chunk=1, threads=1)


def is_same(actual: Tree) -> bool:
    return actual.keys() == expected().keys() and all(
        torch.equal(value, expected()[name]) for name, value in actual.items()
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunks_and_threads_change_no_bit(chunk: int, threads: int) -> None:
    assert is_same(sums(chunk=chunk, threads=threads))


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_order_of_the_clients_changes_no_bit(chunk: int, threads: int) -> None:
    order = [7, 6, 3, 2, 4, 0, 1, 5]
    assert is_same(sums(order=order, chunk=chunk, threads=threads))


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
def test_clients_on_nodes_give_the_same_bytes_as_the_simulator(nodes: int) -> None:
    assert is_same(sums("remote", nodes=nodes))
