"""Augmentation: applied to training batches only, with randomness from the seed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedclade as fc
from fedclade.conformance.in_process_federation import InProcessFederation
from fedclade.core import LocalTraining
from fedclade.core.federation import ModelAssignment
from fedclade.core.functional_model import Objective
from fedclade.core.local_sgd import sgd
from fedclade.core.program_serialization import NodeContext
from fedclade.core.pytree import stack
from fedclade.core.seeded_generator import seeded_generator
from fedclade.data import Clients, from_arrays
from fedclade.errors import InvalidInputError

X = torch.randn(4, 12, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(48).view(4, 12) % 3
SETTINGS: dict[str, Any] = {"rounds": 2, "clients_per_round": 1.0, "batch_size": 5, "device": "cpu"}


@pytest.fixture
def clients() -> Clients:
    return from_arrays([(X[i, : 12 - 2 * i], Y[i, : 12 - 2 * i], X[i], Y[i]) for i in range(4)])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))


def noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def weights(result: fc.Result) -> Tensor:
    return torch.cat(
        [value.flatten() for client in range(4) for value in result.model_of(client).parameters()]
    )


def test_a_step_is_that_of_torch_on_the_changed_batch_and_evaluation_has_the_plain_one() -> None:
    clients = from_arrays([(X[i], Y[i], X[i], Y[i]) for i in range(2)])
    module = nn.Linear(5, 3)
    result = fc.run(
        fc.Local(),
        clients,
        module,
        augment=torch.neg,
        **(SETTINGS | {"rounds": 1, "batch_size": 12, "lr": 0.1}),
    )
    F.cross_entropy(module(-X[1]), Y[1]).backward()
    assert module.weight.grad is not None
    expected = module.weight - 0.1 * module.weight.grad
    trained: Any = result.model_of(1)
    torch.testing.assert_close(trained.weight, expected)
    with torch.no_grad():
        plain = float(F.cross_entropy(trained(X[1]), Y[1]))
    assert result.clients["loss"][1] == pytest.approx(plain, rel=1e-5)
    assert result.clients["train_loss"][1] == pytest.approx(plain, rel=1e-5)


def test_an_augmentation_that_changes_nothing_changes_no_number(clients: Clients) -> None:
    plain = fc.run(fc.FedAvg(), clients, model(), **SETTINGS)
    same = fc.run(fc.FedAvg(), clients, model(), augment=lambda x: x, **SETTINGS)
    assert torch.equal(weights(plain), weights(same))


@pytest.mark.parametrize("method", [fc.FedAvg(), fc.PerFedAvg(), fc.SCAFFOLD(), fc.Clade()])
def test_the_same_seed_gives_the_same_bytes(method: fc.Method, clients: Clients) -> None:
    torch.manual_seed(1)
    first = fc.run(method, clients, model(), augment=noise, seed=3, threads=1, **SETTINGS)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    module = model()
    torch.set_rng_state(state)
    second = fc.run(method, clients, module, augment=noise, seed=3, threads=2, chunk=1, **SETTINGS)
    assert torch.equal(torch.get_rng_state(), state)  # torch's generator is as before
    other = fc.run(method, clients, model(), augment=noise, seed=4, **SETTINGS)
    plain = fc.run(method, clients, model(), seed=3, **SETTINGS)
    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(other))
    assert not torch.equal(weights(first), weights(plain))


def test_a_resumed_run_has_the_same_bytes(clients: Clients, tmp_path: Path) -> None:
    run: dict[str, Any] = SETTINGS | {"checkpoint_every": 1, "augment": noise}
    whole = fc.run(fc.FedAvg(), clients, model(), **(run | {"rounds": 4}))
    fc.run(fc.FedAvg(), clients, model(), out=tmp_path, **run)
    again = fc.run(
        fc.FedAvg(), clients, model(), out=tmp_path, resume=True, **(run | {"rounds": 4})
    )
    assert torch.equal(weights(whole), weights(again))
    with pytest.raises(fc.FedcladeError, check=lambda error: error.field == "out"):
        fc.run(
            fc.FedAvg(), clients, model(), out=tmp_path, resume=True, **(run | {"augment": None})
        )


def test_a_client_gets_its_examples_without_padding_in_each_training_step(
    clients: Clients,
) -> None:
    seen: list[Tensor] = []

    def record(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return x

    fc.run(fc.CladeGroups(), clients, model(), augment=record, **(SETTINGS | {"rounds": 1}))
    trial, *batches = seen
    assert len(trial) == 2
    # 12, 10, 8 and 6 samples in batches of 5. Signatures and evaluation read blocks of 64.
    assert sorted(map(len, batches)) == sorted([5, 5, 2, 5, 5, 5, 3, 5, 1])
    read = torch.cat(batches).sum(1).sort().values
    own = torch.cat([X[i, : 12 - 2 * i] for i in range(4)]).sum(1).sort().values
    assert torch.equal(read, own)


def test_each_batch_of_a_group_draws_its_own_numbers(clients: Clients) -> None:
    drawn: list[float] = []

    def record(x: Tensor) -> Tensor:
        drawn.append(float(torch.rand(())))
        return x

    fc.run(fc.PerFedAvg(), clients, model(), augment=record, **(SETTINGS | {"rounds": 1}))
    assert len(set(drawn)) > len(drawn) // 2


def test_inputs_of_several_tensors_are_augmented_together() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(5, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(torch.cat([a, b], -1))

    def flip(x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": -x["a"], "b": x["b"]}

    def parts(sign: int) -> Clients:
        return from_arrays([({"a": sign * X[i][:, :2], "b": X[i][:, 2:]}, Y[i]) for i in range(4)])

    augmented = fc.run(fc.FedAvg(), parts(1), Two(), augment=flip, **SETTINGS)
    negated = fc.run(fc.FedAvg(), parts(-1), Two(), **SETTINGS)
    assert torch.equal(weights(augmented), weights(negated))


def test_an_augmentation_may_change_the_shape_of_an_input(clients: Clients) -> None:
    wide = nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Linear(4, 3))
    result = fc.run(fc.FedAvg(), clients, wide, augment=lambda x: x[:, 1:], **SETTINGS)
    assert result.summary["rounds"] == 2


def fails(x: Tensor) -> Tensor:
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("augment", "field"),
    [
        (fails, "augment"),
        (lambda x: x[:1], "augment"),
        (lambda x: (x, x), "augment"),
        (lambda x: x.sum(), "augment"),
        (lambda x: None, "augment"),
        ("flip", "augment"),
        (nn.Identity, "augment"),
        (lambda x: x[:, :2], "model"),
    ],
)
def test_what_does_not_fit_is_refused(augment: Any, field: str, clients: Clients) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
        fc.run(fc.FedAvg(), clients, model(), augment=augment, **SETTINGS)


def test_remote_nodes_augment_as_the_simulator(clients: Clients) -> None:
    objective = Objective(model(), augment=noise)
    local = LocalTraining(objective, batch_size=4)
    everyone = torch.arange(4)
    models = ModelAssignment.all_same(stack([objective.params()]), 4)
    here = fc.Simulator(clients).map(sgd(local), everyone, per_client=models, key=1)
    remote = InProcessFederation(clients, NodeContext(objective), nodes=3)
    there = remote.map(sgd(local), everyone, per_client=models, key=1)
    plain = fc.Simulator(clients).map(
        sgd(replace(local, objective=Objective(model()))), everyone, per_client=models, key=1
    )
    torch.testing.assert_close(here.outputs["0.weight"], there.outputs["0.weight"])
    assert not torch.equal(here.outputs["0.weight"], plain.outputs["0.weight"])


def test_threads_do_not_disturb_each_other_in_torchs_generator() -> None:
    def draw(seed: int) -> list[float]:
        with seeded_generator(torch.tensor(seed)):
            return [float(torch.rand(())) for _ in range(200)]

    alone = [draw(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(draw, range(8))) == alone


def test_transforms_of_torchvision_run() -> None:
    try:
        from torchvision.transforms import v2
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchvision cannot be imported ({error})")
    images = torch.randint(0, 256, (3, 10, 3, 8, 8), dtype=torch.uint8)
    clients = from_arrays([(images[i], torch.arange(10) % 3) for i in range(3)])
    flips = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(8, padding=1)])
    first, second = (
        fc.run(fc.FedAvg(), clients, fc.models.MLP(4), augment=flips, **SETTINGS) for _ in range(2)
    )
    assert torch.equal(*(result.model_of(0).fc1.weight for result in (first, second)))  # type: ignore[union-attr]
