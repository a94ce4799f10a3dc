"""Clients with the same model are one batch in an evaluation on CUDA; here on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedclade.core.federation import ModelAssignment
from fedclade.core.functional_model import Objective
from fedclade.core.losses import accuracy
from fedclade.core.pytree import stack
from fedclade.data import Clients, from_arrays
from fedclade.engines import shared_evaluation, simulator
from fedclade.engines.base import EvalRequest, Split
from fedclade.engines.simulator import Simulator

SIZES = (5, 1, 40, 2, 23, 11)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def clients() -> Clients:
    random = torch.Generator().manual_seed(0)

    def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.rand(count, 1, 6, 6, generator=random)
        return x, torch.randint(0, 3, (count,), generator=random)

    return from_arrays(
        [samples(size) if size == 2 else (*samples(size), *samples(size + 3)) for size in SIZES]
    )


def objective() -> Objective:
    """With dropout and running statistics, which evaluation must treat as such."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(64, 3),
    )
    return Objective(module, x=torch.rand(2, 1, 6, 6))


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_one_batch_of_all_clients_gives_each_clients_values(
    split: Split, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = objective()
    rows = [{name: value + 0.1 * row for name, value in model.params().items()} for row in (0, 1)]
    assignment = ModelAssignment(stack(rows), torch.tensor([1, 0, 0, 1, 0]))
    ids = torch.tensor([4, 0, 2, 5, 3])  # the last one has no test samples
    request = EvalRequest(model, {"accuracy": accuracy}, split)
    expected = Simulator(clients()).evaluate(assignment, ids, [request])[0]

    calls: list[int] = []
    shared = shared_evaluation.evaluate_shared

    def counted(*args: object) -> object:
        calls.append(len(args))
        return shared(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(simulator, "is_worthwhile", lambda device, model_ids: True)
    monkeypatch.setattr(simulator, "evaluate_shared", counted)
    monkeypatch.setattr(shared_evaluation, "_LEAST_SAMPLES", 1)
    monkeypatch.setattr(shared_evaluation, "_MOST_SAMPLES", 7)
    actual = Simulator(clients(), chunk=chunk).evaluate(assignment, ids, [request])[0]
    assert calls
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=0, equal_nan=True)
    assert bool(actual["loss"].isnan().any()) == (split == "test")


def test_only_clients_that_share_models_on_cuda_are_one_batch() -> None:
    many, few = torch.arange(8) // 4, torch.arange(8) // 2
    assert shared_evaluation.is_worthwhile(CUDA, many)
    assert not shared_evaluation.is_worthwhile(CUDA, few)
    assert not shared_evaluation.is_worthwhile(CPU, many)
