"""Runs on inputs of several tensors: every method, partition, checkpoint and remote node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedclade as fc
from fedclade.conformance.in_process_federation import InProcessFederation
from fedclade.core.functional_model import Objective
from fedclade.core.program_serialization import NodeContext
from fedclade.data import Clients, from_arrays
from fedclade.errors import InvalidInputError
from fedclade.registry import REGISTRY

X = torch.randn(6, 24, 5, generator=torch.Generator().manual_seed(0))
Y = ((X[..., 0] > 0).long() + 2 * (X[..., 4] > 0)) % 3
NEED_ONE_TENSOR = {
    **dict.fromkeys(("flt", "pacfl", "pca_hc"), "method.name"),
    "fedgmcc": "input_shape",
}


class Whole(nn.Module):
    """A model of one input with five numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Parts(Whole):
    """The same model with an input of two tensors."""

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return {"logits": super().forward(torch.cat([left, right], -1))}


def clients_of(kind: str) -> Clients:
    def split(x: Tensor) -> Any:
        left, right = x[..., :2], x[..., 2:]
        if kind == "whole":
            return x
        return {"left": left.numpy(), "right": right} if kind == "dict" else (left, right)

    sizes = [24, 20, 16, 12, 8, 4]
    parts = [(split(X[i, :n]), Y[i, :n], split(X[i]), Y[i]) for i, n in enumerate(sizes)]
    clients = from_arrays(parts)
    return replace(clients, probe=clients.x_test, groups=torch.arange(6) % 2)


@pytest.mark.parametrize("name", sorted(set(REGISTRY["method"]) - {"fedbn"}))  # no BatchNorm here
def test_every_method_trains_on_several_tensors_or_says_that_it_cannot(name: str) -> None:
    settings: dict[str, Any] = {"rounds": 2, "clients_per_round": 1.0, "device": "cpu"}
    method = REGISTRY["method"][name]()
    if name in NEED_ONE_TENSOR:
        field = NEED_ONE_TENSOR[name]
        with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
            fc.run(method, clients_of("dict"), Parts(), **settings)
        return
    whole = fc.run(method, clients_of("whole"), Whole(), **settings)
    parts = fc.run(method, clients_of("dict"), Parts(), **settings)
    tuples = fc.run(method, clients_of("tuple"), Parts(), **settings)
    for result in (parts, tuples):
        assert result.clusters.tolist() == whole.clusters.tolist()
        for client in (0, 5):
            for a, b in zip(
                result.model_of(client).parameters(),
                whole.model_of(client).parameters(),
                strict=True,
            ):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_resumed_run_has_the_same_models_and_other_inputs_are_another_experiment(
    tmp_path: Path,
) -> None:
    clients = clients_of("dict")
    run: dict[str, Any] = {"device": "cpu", "checkpoint_every": 1}
    whole = fc.run(fc.SCAFFOLD(), clients, Parts(), rounds=4, **run)
    fc.run(fc.SCAFFOLD(), clients, Parts(), rounds=2, out=tmp_path, **run)
    again = fc.run(fc.SCAFFOLD(), clients, Parts(), rounds=4, out=tmp_path, resume=True, **run)
    for a, b in zip(whole.model_of(1).parameters(), again.model_of(1).parameters(), strict=True):
        assert torch.equal(a, b)
    loaded = fc.load(tmp_path, model=Parts())
    assert torch.equal(
        loaded.model_of(1).last.weight,
        again.model_of(1).last.weight,  # type: ignore[union-attr,arg-type]
    )
    assert isinstance(clients.x, dict)
    other = replace(clients, x=clients.x | {"right": clients.x["right"] + 1})
    with pytest.raises(fc.FedcladeError, check=lambda error: error.field == "out"):
        fc.run(fc.SCAFFOLD(), other, Parts(), rounds=4, out=tmp_path, resume=True, **run)


def test_a_partition_keeps_the_tensors_of_a_sample_together() -> None:
    x = {"left": np.arange(60).reshape(60, 1), "right": np.arange(60).reshape(60, 1) * 2}
    data = fc.data.dataset(x, np.arange(60) % 3, x, np.arange(60) % 3)
    for scheme in (fc.data.Dirichlet(alpha=1.0), fc.data.LabelSwap(clusters=2, swaps=1)):
        clients = fc.data.partition(data, scheme, clients=3, seed=0, probe=6)
        for samples in (clients.x, clients.x_test, clients.probe, clients.only([1]).x):
            assert isinstance(samples, dict)
            assert torch.equal(2 * samples["left"], samples["right"])
        x_train, _, x_test, _ = clients.arrays(1)
        assert isinstance(x_train, dict)
        assert isinstance(x_test, dict)
        assert len(x_train["left"]) == clients.sizes[1]


@pytest.mark.parametrize("scheme", [fc.data.Rotation(2), fc.data.FeatureClusters()])
def test_a_partition_that_reads_inputs_refuses_several_tensors(scheme: Any) -> None:
    x = (np.zeros((30, 4, 4), np.float32), np.zeros((30, 1), np.float32))
    data = fc.data.dataset(x, np.arange(30) % 3, x, np.arange(30) % 3)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "partition.name"):
        fc.data.partition(data, scheme, clients=2)


@pytest.mark.parametrize(
    ("x", "field"),
    [
        ({}, "client 0: x"),
        ({"two words": np.zeros((2, 1))}, "client 0: x"),
        ({"a": np.zeros((2, 1)), "b": np.zeros((3, 1))}, "client 0: x"),
        ({"a": np.zeros((2, 1)), "b": np.full((2, 1), np.nan)}, "client 0: x['b']"),
        ((np.zeros((3, 1)), np.zeros((3, 1))), "client 0: x"),
    ],
)
def test_wrong_inputs_are_named(x: object, field: str) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
        from_arrays([(x, np.arange(2))])


def test_clients_need_inputs_of_the_same_structure() -> None:
    a, b = {"a": np.zeros((2, 1))}, {"b": np.zeros((2, 1))}
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "client 1"):
        from_arrays([(a, np.arange(2)), (b, np.arange(2))])


def test_masks_stay_masks_and_images_are_read_as_numbers_from_0_to_1() -> None:
    x = {"image": np.full((2, 4, 4), 255, np.uint8), "mask": np.ones((2, 3), bool)}
    clients = from_arrays([(x, np.arange(2))])
    assert isinstance(clients.x, dict)
    assert clients.x["image"].shape == (2, 1, 4, 4)
    assert clients.x["mask"].dtype == torch.bool
    assert clients.shape is None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 2)

        def forward(self, image: Tensor, mask: Tensor) -> Tensor:
            assert mask.dtype == torch.bool
            return self.layer(image.flatten(1))

    with pytest.raises(InvalidInputError, check=lambda error: error.field == "model"):
        fc.run(fc.FedAvg(), clients, fc.models.MLP(4), rounds=1)
    result = fc.run(fc.FedAvg(), clients, Model(), rounds=1, clients_per_round=1.0, device="cpu")
    assert result.summary["rounds"] == 1


def test_a_model_that_cannot_take_the_inputs_is_refused() -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "model"):
        fc.run(fc.FedAvg(), clients_of("dict"), Whole(), rounds=1, device="cpu")


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_remote_nodes_train_as_the_simulator(kind: str) -> None:
    clients = clients_of(kind)
    fed = InProcessFederation(clients, NodeContext(Objective(Parts(), x=clients.metadata.x)))
    metadata = fed.client_metadata()
    assert type(metadata.x) is type(clients.x)
    run = fc.training.runner.TrainingRun(
        fc.SCAFFOLD(),
        clients,
        Parts(),
        fc.LocalConfig(),
        fc.TrainingConfig(rounds=2, clients_per_round=1.0),
        fc.training.config.EngineConfig(),
        "cpu",
    )
    here, there = run.run(), replace(run, federation=fed).run()
    for a, b in zip(here.model_of(0).parameters(), there.model_of(0).parameters(), strict=True):
        torch.testing.assert_close(a, b)
