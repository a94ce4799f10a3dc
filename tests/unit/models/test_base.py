"""Properties of every model: the registry, frozen specs, and equal gradients for many clients at a
time and one by one.
"""

import dataclasses
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

import fedclade as fc
from fedclade.core.functional_model import Batch, ClientStackedBatch, Objective
from fedclade.core.kernels import activation_taps
from fedclade.core.losses import ExampleLoss, cross_entropy
from fedclade.data import from_arrays
from fedclade.models import (
    CNN,
    MLP,
    MODELS,
    BagOfWords,
    BiLstmTagger,
    CflCNN,
    ConvAutoencoder,
    GmccCNN,
    LeafCNN,
    LeNet5,
    Logistic,
    LstmLanguageModel,
    ModelSpec,
    PflCNN,
    ResidualAutoencoder,
    ResNet9,
    SmallCNN,
    TextTransformer,
)

CASES: list[tuple[ModelSpec, tuple[int, ...]]] = [
    (MLP(), (1, 28, 28)),
    (MLP((30, 20)), (60,)),
    (MLP(20, dropout=0.5), (60,)),
    (Logistic(), (60,)),
    (LeafCNN(), (1, 12, 12)),
    (LeafCNN(padding=0, standardized=True), (3, 16, 17)),
    (SmallCNN(), (1, 28, 28)),
    (SmallCNN(dropout=0), (1, 28, 28)),
    (LeNet5(), (3, 32, 32)),
    (CflCNN(), (3, 32, 32)),
    (GmccCNN(), (1, 28, 28)),
    (CNN(), (1, 28, 28)),
    (PflCNN(dropout=False), (3, 16, 16)),
    (ResNet9(), (3, 16, 8)),
    (ConvAutoencoder(), (1, 28, 28)),
    (ResidualAutoencoder(hidden=32), (3, 16, 16)),
    (LstmLanguageModel(12, 16), (6,)),
    (LstmLanguageModel(12, 16, layers=1, dropout=0.5), (6,)),
    (BiLstmTagger(), (6, 5)),
    (BagOfWords(10, 8), (6,)),
    (TextTransformer(words=10, width=8, heads=2), (6,)),
    (TextTransformer("tagging", words=10, width=8, heads=2, dropout=0.5), (6,)),
    (TextTransformer("language_model", width=8, heads=2, layers=1), (6,)),
]
CLASSES = 10

# Gradients are compared in float64: in float32 rounding may change which of two pixels is larger,
# and so the gradient of a pooling.


def samples(spec: ModelSpec, shape: tuple[int, ...], *axes: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets for a model."""
    words = isinstance(spec, LstmLanguageModel | BagOfWords | TextTransformer)
    x = (
        torch.randint(CLASSES, (*axes, *shape))
        if words
        else torch.rand(*axes, *shape, dtype=torch.float64)
    )
    if isinstance(spec, ConvAutoencoder | ResidualAutoencoder):
        return x, x
    by_position = isinstance(spec, LstmLanguageModel | BiLstmTagger) or (
        isinstance(spec, TextTransformer) and spec.task != "classification"
    )
    return x, torch.randint(CLASSES, (*axes, *(shape[:1] if by_position else ())))


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).square().flatten(1).mean(1)


def loss_of(spec: ModelSpec) -> ExampleLoss:
    return (
        squared_error if isinstance(spec, ConvAutoencoder | ResidualAutoencoder) else cross_entropy
    )


def test_every_model_has_a_case() -> None:
    assert {spec.name for spec, _ in CASES} == set(MODELS)


def test_models_are_registered_by_name() -> None:
    expected = {
        "mlp": MLP,
        "leaf_cnn": LeafCNN,
        "small_cnn": SmallCNN,
        "lenet5": LeNet5,
        "cfl_cnn": CflCNN,
        "gmcc_cnn": GmccCNN,
        "cnn": CNN,
        "pfl_cnn": PflCNN,
        "resnet9": ResNet9,
        "lstm_lm": LstmLanguageModel,
        "bilstm_tagger": BiLstmTagger,
        "bag_of_words": BagOfWords,
        "text_transformer": TextTransformer,
        "logistic": Logistic,
        "conv_autoencoder": ConvAutoencoder,
        "residual_autoencoder": ResidualAutoencoder,
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
def test_the_seed_determines_the_weights(spec: ModelSpec, shape: tuple[int, ...]) -> None:
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(spec.build(shape, CLASSES).parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(("spec", "shape"), CASES, ids=str)
def test_no_layer_is_used_twice_and_none_has_buffers(
    spec: ModelSpec, shape: tuple[int, ...]
) -> None:
    module = spec.build(shape, CLASSES)
    places = [id(m) for _, m in module.named_modules(remove_duplicate=False)]
    assert len(places) == len(set(places))
    assert not list(module.buffers())


@pytest.mark.parametrize(("spec", "shape"), CASES, ids=str)
def test_gradients_of_three_clients_at_once_equal_one_by_one(
    spec: ModelSpec, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    modules = [spec.build(shape, CLASSES).eval().double() for _ in range(3)]
    params, buffers = stack_module_state(modules)
    x, y = samples(spec, shape, 3, 4)

    def loss(client_params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_of(spec)(functional_call(modules[0], (client_params, buffers), (x,)), y).mean()

    with warnings.catch_warnings():
        # torch warns if a layer has no batching rule and would run client by client.
        warnings.simplefilter("error")
        together = vmap(grad(loss))(params, x, y)

    for client, module in enumerate(modules):
        module.zero_grad()
        loss(dict(module.named_parameters()), x[client], y[client]).backward()  # type: ignore[no-untyped-call]
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 0
            torch.testing.assert_close(together[name][client], parameter.grad)


# Without ResNet9 and ResidualAutoencoder: on the CPU torch's group norm under vmap does not accept
# the outputs of convolutions in columns. On CUDA it does (tests/integration/engines/test_cuda.py).
CONVOLUTIONS = LeafCNN | SmallCNN | LeNet5 | CflCNN | GmccCNN | ConvAutoencoder
IN_COLUMNS = [
    pytest.param(*case, True, id=f"{case[0]}-in columns")
    for case in CASES
    if isinstance(case[0], CONVOLUTIONS)
]


@pytest.mark.parametrize(
    ("spec", "shape", "in_columns"), [(*case, False) for case in CASES] + IN_COLUMNS, ids=str
)
def test_a_stack_has_the_gradients_of_autograd_client_by_client(
    spec: ModelSpec, shape: tuple[int, ...], in_columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the engine, with dropout and a padded batch. in_columns: convolutions as on CUDA."""
    monkeypatch.setattr(activation_taps, "in_columns", lambda x: in_columns)
    torch.manual_seed(0)
    objective = Objective(spec.build(shape, CLASSES).double(), loss_of(spec))
    params = {
        name: value + 0.01 * torch.randn(2, *value.shape, dtype=torch.float64)
        for name, value in objective.params().items()
    }
    x, y = samples(spec, shape, 2, 3)
    weight = torch.tensor([[1.0, 1, 1], [1, 1, 0]], dtype=torch.float64)
    zeros = {name: torch.zeros_like(value) for name, value in params.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients = objective.add_scaled_gradient(
            zeros, weight.new_ones(()), params, ClientStackedBatch(x, y, weight, torch.arange(2))
        )
    for client in range(2):
        model = {name: value[client].clone().requires_grad_() for name, value in params.items()}
        loss = objective.loss(
            model, Batch(x[client], y[client], weight[client], torch.tensor(client))
        )
        expected = torch.autograd.grad(loss, list(model.values()))
        for name, gradient in zip(model, expected, strict=True):
            torch.testing.assert_close(gradients[name][client], gradient)


@pytest.mark.parametrize(
    ("spec", "shape"), {spec.name: (spec, shape) for spec, shape in CASES}.values(), ids=str
)
def test_two_rounds_lower_the_training_loss(spec: ModelSpec, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, y = (
        value.float() if value.is_floating_point() else value
        for value in samples(spec, shape, 2, 6)
    )
    clients = from_arrays([(x[0], y[0]), (x[1], y[1])])
    module = spec.build(shape, CLASSES)

    def train_loss(rounds: int, lr: float) -> float:
        loss = None if loss_of(spec) is cross_entropy else loss_of(spec)
        settings = {
            "lr": lr,
            "batch_size": 4,
            "epochs": 1,
            "clients_per_round": 1.0,
            "loss": loss,
            "device": "cpu",
        }
        value: float = fc.run(fc.FedAvg(), clients, module, rounds=rounds, **settings).summary[
            "train_loss"
        ]
        return value

    # The head of ResNet9 has 512 large inputs: on a dozen images of noise only small steps lower
    # the loss.
    assert train_loss(2, lr=1e-4 if isinstance(spec, ResNet9) else 0.03) < train_loss(1, lr=1e-12)
