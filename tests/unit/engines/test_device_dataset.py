"""Where samples are stored, and how many of them a step reads at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedclade import FedAvg, run
from fedclade.core.functional_model import ClientStackedBatch
from fedclade.data import Clients, from_arrays
from fedclade.engines import device_dataset, simulator
from fedclade.engines.device_dataset import DeviceDataset
from fedclade.engines.profiler import Profiler
from fedclade.models import MLP, Logistic

CPU, HOST = torch.device("cpu"), torch.device("cpu", 0)  # two devices for torch


def clients_of(count: int, samples: int = 12, features: int = 5) -> Clients:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 2 * samples, features, generator=generator)
    y = torch.randint(0, 3, (count, 2 * samples), generator=generator)
    return from_arrays(
        [(x[i, :samples], y[i, :samples], x[i, samples:], y[i, samples:]) for i in range(count)]
    ).with_validation(0.25)


def trained(clients: Clients, **settings: Any) -> list[Tensor]:
    result = run(FedAvg(), clients, model=MLP(4), rounds=3, lr=0.1, batch_size=4, **settings)
    values = [value for name, value in result.summary.items() if "loss" in name]
    return [*result.model_of(0).state_dict().values(), torch.tensor(values)]


@pytest.mark.parametrize("class_weight", ["none", "balanced"])
def test_samples_on_the_host_give_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, class_weight: str
) -> None:
    clients = clients_of(6)
    expected = trained(clients, class_weight=class_weight)
    copied: list[int] = []

    def pin_memory(batch: Tensor) -> Tensor:
        copied.append(batch.nbytes)
        return batch

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(device_dataset, "_storage", lambda size, device: HOST)
    actual = trained(clients, class_weight=class_weight)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert 0 < max(copied) < clients.x.nbytes  # type: ignore[union-attr]


@pytest.mark.parametrize(("free", "stored"), [(999, "cpu"), (1000, "cuda")])
def test_samples_stay_on_the_host_where_they_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, free: int, stored: str
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**6))
    assert device_dataset._storage(500, torch.device("cuda")).type == stored


def test_on_the_cpu_samples_are_not_copied() -> None:
    clients = clients_of(3)
    train, test, validation = device_dataset.datasets_of(clients, CPU, Profiler(CPU, False))
    assert train.x is clients.x
    assert test.x is clients.x_test
    assert validation is not None
    assert validation.x is clients.x


@pytest.mark.parametrize("whole", [False, True], ids=["minibatch", "whole"])
def test_a_step_reads_a_limited_number_of_bytes(
    monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Of 40 clients of small models all would share a step."""
    clients, read = clients_of(40, samples=16, features=100), list[int]()
    original = DeviceDataset.batch

    def batch(dataset: DeviceDataset, rows: Tensor, *others: Tensor) -> ClientStackedBatch:
        read.append(rows.numel() * dataset.sample_bytes)
        return original(dataset, rows, *others)

    monkeypatch.setattr(DeviceDataset, "batch", batch)
    settings: dict[str, Any] = {
        "model": Logistic(),
        "rounds": 1,
        "clients_per_round": 1.0,
        "batch_size": 16 if whole else 4,
        "threads": 1,
    }
    run(FedAvg(), clients, **settings)
    unlimited, most = max(read), 10 * 4 * 400
    assert unlimited > most
    read.clear()
    monkeypatch.setattr(simulator, "_CPU_BATCH_BYTES", most)
    run(FedAvg(), clients, **settings)
    assert most // 2 < max(read) <= most
