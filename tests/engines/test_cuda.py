"""CUDA: the same bytes twice, and the CPU's numbers within 1e-5 over one round. Skipped where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch

from fedclade import FLT, IFCA, Clade, LocalTraining, Method, Rows, Simulator, run, sgd
from fedclade.client.objective import Objective
from fedclade.client.tree import Tree, stack
from fedclade.data import Clients, Iid, dataset, partition
from fedclade.methods import METHODS
from fedclade.models import MLP, LeafCNN, LeNet5, ModelSpec, SmallCNN

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
MODELS = [MLP(50, dropout=0.5), SmallCNN(), LeNet5(), LeafCNN()]
OPTIONS = {"clade": Clade(confirm=2), "flt": FLT(manifold="pca"), "ifca": IFCA(clusters=2, share="trunk", warm_up=1, restarts=2, trial=2)}
EVERY = [OPTIONS.get(name) or method() for name, method in METHODS.items()]


@pytest.fixture(scope="module")
def images() -> Clients:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (700, 1, 28, 28), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 10, (700,), generator=generator)
    return partition(dataset(x[:600], y[:600], x[600:], y[600:]), Iid(), clients=13, seed=0)


def replies(model: ModelSpec, clients: Clients, device: str, chunk: int | None = None) -> Tree:
    torch.manual_seed(0)
    objective = Objective(model.build(clients.shape, 10).to(device))
    fed = Simulator(clients, device=device, chunk=chunk, precision="float32")
    everyone = torch.arange(len(clients))
    each = Rows(stack([objective.params()]), torch.zeros_like(everyone))
    out = fed.map(sgd(LocalTraining(objective, momentum=0.5)), everyone, each=each, key=7).out
    return {name: value.cpu() for name, value in out.items()}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_agrees_with_the_cpu(model: ModelSpec, images: Clients) -> None:
    expected, got = replies(model, images, "cpu"), replies(model, images, "cuda")
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_chunks_agree(model: ModelSpec, images: Clients) -> None:
    expected, got = replies(model, images, "cuda"), replies(model, images, "cuda", chunk=4)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:manifold")
@pytest.mark.parametrize("method", EVERY, ids=lambda method: method.name)
@pytest.mark.parametrize("model", MODELS[:2], ids=lambda model: model.name)
def test_two_runs_give_the_same_bytes(method: Method, model: ModelSpec, images: Clients) -> None:
    one, other = (run(method, images, model, rounds=4, device="cuda", clients_per_round=0.5) for _ in range(2))
    for client in range(len(images)):
        expected = one.model_of(client).state_dict()
        for name, value in other.model_of(client).state_dict().items():
            assert torch.equal(value, expected[name])
    assert one.summary["accuracy"] == other.summary["accuracy"]
    assert one.summary["device"] == "cuda"
