"""What holds for every model: the registry, frozen specs, many clients at once equal one by one."""

import dataclasses
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedclade.models import MLP, MODELS, ConvAutoencoder, LeafCNN, LeNet5, Logistic, ModelSpec, SmallCNN

CASES: list[tuple[ModelSpec, tuple[int, ...]]] = [
    (MLP(), (1, 28, 28)),
    (MLP((30, 20)), (60,)),
    (MLP(20, dropout=0.5), (60,)),
    (Logistic(), (60,)),
    (LeafCNN(), (1, 28, 28)),
    (LeafCNN(padding=0), (3, 16, 17)),
    (SmallCNN(), (1, 28, 28)),
    (SmallCNN(dropout=0), (1, 28, 28)),
    (LeNet5(), (3, 32, 32)),
    (ConvAutoencoder(), (1, 28, 28)),
]
CLASSES = 10


def test_models_go_by_name() -> None:
    expected = {
        "mlp": MLP,
        "leaf_cnn": LeafCNN,
        "small_cnn": SmallCNN,
        "lenet5": LeNet5,
        "logistic": Logistic,
        "conv_autoencoder": ConvAutoencoder,
    }
    assert expected == MODELS


@pytest.mark.parametrize("name", MODELS)
def test_specs_are_frozen_values_with_defaults(name: str) -> None:
    spec = MODELS[name]()
    assert spec == MODELS[name]()
    assert hash(spec) == hash(MODELS[name]())
    assert "name" not in {f.name for f in dataclasses.fields(spec)}  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(("spec", "shape"), CASES, ids=str)
def test_the_seed_decides_the_weights(spec: ModelSpec, shape: tuple[int, ...]) -> None:
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(spec.build(shape, CLASSES).parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(("spec", "shape"), CASES, ids=str)
def test_no_layer_stands_in_two_places_and_none_has_buffers(spec: ModelSpec, shape: tuple[int, ...]) -> None:
    module = spec.build(shape, CLASSES)
    places = [id(m) for _, m in module.named_modules(remove_duplicate=False)]
    assert len(places) == len(set(places))
    assert not list(module.buffers())


@pytest.mark.parametrize(("spec", "shape"), CASES, ids=str)
def test_gradients_of_three_clients_at_once_equal_one_by_one(spec: ModelSpec, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    modules = [spec.build(shape, CLASSES).eval() for _ in range(3)]
    params, buffers = stack_module_state(modules)
    x, y = torch.rand(3, 4, *shape), torch.randint(CLASSES, (3, 4))

    def loss(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = functional_call(modules[0], (own, buffers), (x,))
        return nn.functional.mse_loss(out, x) if out.shape == x.shape else nn.functional.cross_entropy(out, y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a layer has no batching rule and would run client by client
        together = vmap(grad(loss))(params, x, y)

    for client, module in enumerate(modules):
        module.zero_grad()
        loss(dict(module.named_parameters()), x[client], y[client]).backward()  # type: ignore[no-untyped-call]
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 0
            torch.testing.assert_close(together[name][client], parameter.grad, rtol=1e-5, atol=1e-5)
