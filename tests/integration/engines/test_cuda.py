"""CUDA: equal bytes in two runs, and the CPU's numbers within 1e-5 over one round. Skipped without
a CUDA device.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedclade import (
    FLT,
    IFCA,
    Clade,
    FedAvg,
    Method,
    Simulator,
    run,
)
from fedclade.core import LocalTraining, ModelAssignment, sgd
from fedclade.core.federation import SegmentSum
from fedclade.core.functional_model import Objective
from fedclade.core.pytree import Tree, stack
from fedclade.data import Clients, Iid, NaturalId, dataset, from_arrays, load, partition
from fedclade.engines import device_dataset
from fedclade.engines.accumulator import Accumulator
from fedclade.engines.device import Precision
from fedclade.errors import FedcladeWarning
from fedclade.methods import METHODS
from fedclade.models import (
    MLP,
    CflCNN,
    GmccCNN,
    LeafCNN,
    LeNet5,
    LoRA,
    ModelSpec,
    SmallCNN,
    from_transformers,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
MODELS = [MLP(50, dropout=0.5), SmallCNN(), LeNet5(), LeafCNN(), CflCNN(), GmccCNN()]
OPTIONS = {
    "clade": Clade(recluster_every=2),
    "flt": FLT(manifold="pca"),
    "ifca": IFCA(clusters=2, shared_layers="trunk", warm_up=1, num_restarts=2, trial_rounds=2),
}
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
    assignment = ModelAssignment(stack([objective.params()]), torch.zeros_like(everyone))
    out = fed.map(
        sgd(LocalTraining(objective, lr=0.01, momentum=0.5)), everyone, per_client=assignment, key=7
    ).outputs
    return {name: value.cpu() for name, value in out.items()}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_agrees_with_the_cpu(model: ModelSpec, images: Clients) -> None:
    expected, actual = replies(model, images, "cpu"), replies(model, images, "cuda")
    for name in expected:
        apart = (actual[name] - expected[name]).abs()
        # In a large model a few of millions of ReLUs have an input that is 0 up to rounding, so
        # their outputs may differ. That moves a few weights.
        assert int((apart > 1e-5).sum()) <= 1e-4 * apart.numel()
        assert float(apart.max()) < 1e-3


def test_convolutions_with_group_norm_agree_with_the_cpu(images: Clients) -> None:
    torch.manual_seed(0)
    layers = [
        torch.nn.Conv2d(1, 8, 5, padding=2),
        torch.nn.GroupNorm(2, 8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 6, 3, stride=2),
    ]
    model = torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(96, 10)
    )
    results = [
        run(FedAvg(), images, model, rounds=1, device=device, precision="float32")
        for device in ("cpu", "cuda")
    ]
    expected, actual = (result.model_of(0).state_dict() for result in results)
    for name in expected:
        torch.testing.assert_close(actual[name].cpu(), expected[name].cpu(), rtol=0, atol=1e-5)


def test_several_inputs_class_weights_and_an_augmentation_agree_with_the_cpu() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.out = torch.nn.Embedding(9, 5), torch.nn.Linear(7, 3)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.out(torch.cat([a, self.words(b).mean(1)], -1))

    generator = torch.Generator().manual_seed(0)
    parts = [
        (
            {
                "a": torch.randn(n, 2, generator=generator),
                "b": torch.randint(0, 9, (n, 4), generator=generator),
            },
            torch.arange(n) ** 2 % 3,
        )
        for n in (40, 31, 7, 2)
    ]
    results = [
        run(
            FedAvg(),
            from_arrays(parts),
            Two(),
            rounds=3,
            clients_per_round=1.0,
            batch_size=4,
            class_weight="balanced",
            augment=augment,
            device=device,
            precision="float32",
        )
        for augment in (None, lambda x: {"a": -x["a"], "b": x["b"]})
        for device in ("cpu", "cuda")
    ]
    for expected, actual in (results[:2], results[2:]):
        other = actual.model_of(0).state_dict()
        for name, value in expected.model_of(0).state_dict().items():
            torch.testing.assert_close(other[name].cpu(), value, rtol=0, atol=1e-5)


def test_a_random_augmentation_gives_the_same_bytes_in_two_runs(images: Clients) -> None:
    def noise(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)

    before = torch.cuda.get_rng_state()
    first, second, other = (
        run(FedAvg(), images, MLP(8), rounds=2, seed=seed, augment=noise, device="cuda")
        for seed in (0, 0, 1)
    )
    assert torch.equal(torch.cuda.get_rng_state(), before)
    one, two, three = (r.model_of(0).state_dict()["fc1.weight"] for r in (first, second, other))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_chunks_agree(model: ModelSpec, images: Clients) -> None:
    expected, actual = replies(model, images, "cuda"), replies(model, images, "cuda", chunk=4)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=1e-5)


def ragged_clients() -> Clients:
    """From 1 to 97 samples: the number of active clients decreases many times."""
    generator = torch.Generator().manual_seed(1)
    sizes = [1, 2, 3, 5, 8, 13, 21, 34, 55, 60, 60, 89, 97, 4, 4, 4, 30]
    return from_arrays(
        [
            (
                torch.randn(n, 12, generator=generator),
                torch.randint(0, 4, (n,), generator=generator),
            )
            for n in sizes
        ]
    )


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_a_graph_gives_the_bytes_of_the_plain_loop(momentum: float) -> None:
    clients = ragged_clients()
    torch.manual_seed(0)
    objective = Objective(MLP(9, dropout=0.3).build(clients.shape, 4).to("cuda"))
    program = sgd(LocalTraining(objective, lr=0.1, batch_size=4, epochs=2, momentum=momentum))
    everyone = torch.arange(len(clients))
    assignment = ModelAssignment(stack([objective.params()]), torch.zeros_like(everyone))
    fed = Simulator(clients, device="cuda")
    plain, captured, again, other = (
        fed.map(program, everyone, per_client=assignment, key=key).outputs for key in (1, 1, 1, 2)
    )
    assert any(value is not None for value in fed._compiled.cuda_graphs._captures._entries.values())
    for name, value in plain.items():
        assert torch.equal(captured[name], value)
        assert torch.equal(again[name], value)
        assert not torch.equal(other[name], value)


def test_a_graph_of_a_cnn_gives_the_bytes_of_the_plain_loop(images: Clients) -> None:
    torch.manual_seed(0)
    objective = Objective(SmallCNN().build(images.shape, 10).to("cuda"))
    program = sgd(LocalTraining(objective, lr=0.1, batch_size=4))
    everyone = torch.arange(len(images))
    assignment = ModelAssignment(stack([objective.params()]), torch.zeros_like(everyone))
    fed = Simulator(images, device="cuda")
    plain, captured, again = (
        fed.map(program, everyone, per_client=assignment, key=1).outputs for _ in range(3)
    )
    assert any(value is not None for value in fed._compiled.cuda_graphs._captures._entries.values())
    for name, value in plain.items():
        assert torch.equal(captured[name], value)
        assert torch.equal(again[name], value)


class CopiesFromHost(torch.nn.Module):
    """A model that copies from the host in its forward pass: it can be trained, but not
    captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * torch.tensor([1.0, 2.0, 1.0, 1.0]).to(x.device)


def test_a_step_that_cannot_be_captured_runs_without_a_graph() -> None:
    first, second = (
        run(
            FedAvg(),
            ragged_clients(),
            CopiesFromHost(),
            rounds=4,
            device="cuda",
            clients_per_round=1.0,
            batch_size=4,
        )
        for _ in range(2)
    )
    assert first.summary["failures"] == 0
    for name, value in first.model_of(0).state_dict().items():
        assert bool(torch.isfinite(value).all())
        assert value.shape == second.model_of(0).state_dict()[name].shape


@pytest.mark.filterwarnings("ignore:manifold")
@pytest.mark.parametrize("method", EVERY, ids=lambda method: method.name)
@pytest.mark.parametrize("model", MODELS[:2], ids=lambda model: model.name)
def test_two_runs_give_the_same_bytes(
    method: Method, model: ModelSpec | nn.Module, images: Clients
) -> None:
    if method.name == "fedbn":
        model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784), nn.Linear(784, 10))
    if method.name.startswith("flis"):
        images = images.with_probe(0.1)
    first, second = (
        run(method, images, model, rounds=4, device="cuda", clients_per_round=0.5) for _ in range(2)
    )
    for client in range(len(images)):
        expected = first.model_of(client).state_dict()
        for name, value in second.model_of(client).state_dict().items():
            assert torch.equal(value, expected[name])
    assert first.summary["accuracy"] == second.summary["accuracy"]
    assert first.summary["device"] == "cuda"


def test_when_a_device_runs_out_of_memory_chunks_become_smaller() -> None:
    pairs = [
        (
            torch.randn(40, 784, generator=torch.Generator().manual_seed(client)),
            torch.arange(40) % 10,
        )
        for client in range(256)
    ]
    clients = from_arrays([(x, y, x[:4], y[:4]) for x, y in pairs])

    def trained(chunk: int) -> dict[str, torch.Tensor]:
        # 6.5 MB of weights for each client. In three rounds, steps are captured too.
        result = run(
            FedAvg(),
            clients,
            MLP(2048),
            rounds=3,
            clients_per_round=256,
            device="cuda",
            chunk=chunk,
            eval_every=1,
        )
        return {name: value.cpu() for name, value in result.model_of(0).state_dict().items()}

    expected = trained(16)
    gc.collect()
    torch.cuda.empty_cache()
    share = (torch.cuda.memory_reserved() + 2 * 2**30) / torch.cuda.get_device_properties(
        0
    ).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        with pytest.warns(FedcladeWarning, match="cuda(:0)? with 256 ") as caught:
            retried = trained(256)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    fields = {getattr(record.message, "field", None) for record in caught}
    assert fields == {"engine.chunk"}
    for name, value in expected.items():
        torch.testing.assert_close(retried[name], value, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model", [MLP(50), SmallCNN()], ids=lambda model: model.name)
def test_bfloat16_gives_equal_bytes_twice_and_is_near_float32(
    model: ModelSpec, images: Clients
) -> None:
    def trained(precision: Precision) -> Tree:
        result = run(
            FedAvg(),
            images,
            model,
            rounds=3,
            clients_per_round=1.0,
            lr=0.01,
            device="cuda",
            precision=precision,
        )
        return dict(result.model_of(0).state_dict())

    full, half, again = trained("float32"), trained("bf16"), trained("bf16")
    for name, value in half.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, again[name])
        torch.testing.assert_close(value, full[name], atol=1e-2, rtol=0)


@pytest.mark.filterwarnings("error::fedclade.errors.FedcladeWarning")  # it is vectorized
@pytest.mark.parametrize("method", [FedAvg(), Clade()], ids=lambda method: method.name)
def test_adapters_and_masked_attention_agree_with_the_cpu(method: Method) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    generator = torch.Generator().manual_seed(0)
    parts = []
    for client in range(6):
        words = torch.randint(3, 40, (40, 9), generator=generator)
        mask = (torch.arange(9) < torch.randint(3, 10, (40, 1), generator=generator)).long()
        x = {"input_ids": words * mask, "attention_mask": mask}
        parts.append((x, (words[:, 0] + client % 2) % 4, x, words[:, 0] % 4))

    def trained(device: str) -> Tree:
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=40,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=9,
            num_labels=4,
        )
        model = from_transformers(
            transformers.BertForSequenceClassification(config), LoRA(r=4, dropout=0.1)
        )
        result = run(
            method,
            from_arrays(parts),
            model,
            rounds=1,
            clients_per_round=1.0,
            lr=0.1,
            device=device,
            precision="float32",
        )
        return dict(result.model_of(0).state_dict())

    expected, actual, again = trained("cpu"), trained("cuda"), trained("cuda")
    for name, value in actual.items():
        assert torch.equal(value, again[name])
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=0)


def test_frozen_weights_are_on_the_device_once() -> None:
    model = torch.nn.Sequential(
        torch.nn.Embedding(500_000, 32), torch.nn.Flatten(), torch.nn.Linear(96, 3)
    )
    model[0].requires_grad_(False)
    frozen = sum(value.nbytes for value in model[0].parameters())
    clients = from_arrays(
        [(torch.randint(0, 100, (30, 3)), torch.arange(30) % 3) for _ in range(20)]
    )
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(FedAvg(), clients, model, rounds=3, clients_per_round=1.0, device="cuda")
    assert torch.cuda.max_memory_allocated() - before < 1.5 * frozen


def test_sums_have_the_same_bytes_as_on_the_cpu() -> None:
    """The replies are equal. The orders and the chunks differ."""
    generator = torch.Generator().manual_seed(0)
    reply = {
        "w": torch.randn(600, 31, 7, generator=generator),
        "b": torch.randn(600, 5, generator=generator),
    }
    reduce = SegmentSum(torch.rand(600, 3, generator=generator, dtype=torch.float64), 3)

    def sums(device: str, places: Tensor, chunk: int) -> Tree:
        total = Accumulator(reduce)
        for part in places.split(chunk):
            there = {name: value[part].to(device) for name, value in reply.items()}
            total.merge(Accumulator.of_chunk(reduce, part, there))
        return {name: value.cpu() for name, value in total.sums.items()}

    expected = sums("cpu", torch.arange(600), 1)
    shuffled = torch.randperm(600, generator=generator)
    for chunk in (7, 600):
        actual = sums("cuda", shuffled, chunk)
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("model", [MLP(50), SmallCNN()], ids=lambda model: model.name)
def test_samples_on_the_host_give_the_same_bytes(
    model: ModelSpec, images: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = replies(model, images, "cuda")
    monkeypatch.setattr(device_dataset, "_CUDA_DATA_SHARE", 0.0)
    actual = replies(model, images, "cuda")
    assert Simulator(images, device="cuda")._train.storage.type == "cpu"
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("method", [FedAvg(), Clade()], ids=lambda method: method.name)
def test_a_run_on_mapped_images_gives_the_bytes_of_one_with_images_on_the_device(
    method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """252 MB of images: training, test and validation data, signatures and the evaluation."""
    count, generator = 20_480, np.random.default_rng(0)
    y = generator.integers(0, 4, count)
    file = np.lib.format.open_memmap(
        tmp_path / "x_train.npy", mode="w+", dtype=np.uint8, shape=(count, 64, 64, 3)
    )
    for start in range(0, count, 1024):
        images = generator.integers(0, 200, (1024, 64, 64, 3), dtype=np.uint8)
        file[start : start + 1024] = images + 10 * y[start : start + 1024, None, None, None]
    file.flush()
    np.save(tmp_path / "y_train.npy", y)
    np.save(tmp_path / "site_train.npy", np.arange(count) % 20)
    data = partition(load(tmp_path), NaturalId("site"), clients=20).with_validation(0.1)

    def trained() -> tuple[Tree, float, int]:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run(
            method,
            data,
            SmallCNN(),
            rounds=4,
            clients_per_round=5,
            batch_size=32,
            lr=0.02,
            device="cuda",
            chunk=5,
        )
        weights = {name: value.cpu() for name, value in result.model_of(3).state_dict().items()}
        peak = torch.cuda.max_memory_allocated() - before
        return weights, float(result.summary["validation_loss"]), peak

    expected, expected_loss, on_device = trained()
    monkeypatch.setattr(device_dataset, "_CUDA_DATA_SHARE", 0.0)
    assert Simulator(data, device="cuda")._train.storage.type == "cpu"
    actual, loss, on_host = trained()
    assert loss == expected_loss
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    # The images are not on the device, apart from the batches.
    assert on_device - on_host > 0.8 * file.nbytes
