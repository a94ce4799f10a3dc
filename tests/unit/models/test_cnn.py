"""Convolutional networks: numbers of parameters, layers, image sizes, and checked fields."""

import pytest
import torch
from torch import nn

from fedclade.errors import InvalidInputError
from fedclade.models import CNN, CflCNN, GmccCNN, LeafCNN, LeNet5, PflCNN, SmallCNN

Spec = CNN | CflCNN | GmccCNN | LeafCNN | LeNet5 | PflCNN | SmallCNN


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("spec", "shape", "classes", "parameters"),
    [
        (LeafCNN(), (1, 28, 28), 62, 6_603_710),
        (LeafCNN(), (1, 28, 28), 47, 6_572_975),
        (LeafCNN(padding=0), (3, 32, 32), 62, 3_459_582),
        (SmallCNN(), (1, 28, 28), 10, 21_840),
        (SmallCNN(dropout=0), (1, 28, 28), 10, 21_840),
        (LeNet5(), (3, 32, 32), 10, 62_006),
        (LeNet5(), (1, 28, 28), 10, 44_426),
        (GmccCNN(), (1, 28, 28), 62, 486_654),
        (PflCNN(), (3, 32, 32), 10, 1_626_442),
        (PflCNN(dropout=False), (3, 32, 32), 10, 1_626_442),
        (GmccCNN(dropout=0), (1, 28, 28), 62, 486_654),
        (CflCNN(), (3, 32, 32), 10, 188_810),  # the paper gives no number
        (CNN(), (1, 28, 28), 10, 582_026),
        (CNN(maps=(64, 64), hidden=(120, 64)), (3, 32, 32), 10, 307_842),
    ],
)
def test_parameter_counts_of_the_papers(
    spec: Spec, shape: tuple[int, ...], classes: int, parameters: int
) -> None:
    assert size(spec.build(shape, classes)) == parameters


def test_the_part_of_lenet_that_lg_fedavg_shares_in_flis() -> None:
    module = LeNet5().build((3, 32, 32), 10)
    assert size(module.get_submodule("fc2")) + size(module.get_submodule("fc3")) == 11_014


def test_small_cnn_drops_maps_and_then_units() -> None:
    children = dict(SmallCNN(0.3).build((1, 28, 28), 10).named_children())
    assert isinstance(children["dropout1"], nn.Dropout2d)
    assert children["dropout1"].p == 0.3
    assert isinstance(children["dropout2"], nn.Dropout)
    assert children["dropout2"].p == 0.3
    order = list(children)
    assert order[order.index("conv2") + 1] == "dropout1"
    assert order[order.index("fc2") - 1] == "dropout2"
    assert not any(
        "dropout" in name for name, _ in SmallCNN(0).build((1, 28, 28), 10).named_modules()
    )


def test_cfls_net_has_five_layers_with_weights() -> None:
    layers = [
        layer
        for layer in CflCNN().build((3, 32, 32), 10).modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    ]
    assert [type(layer) for layer in layers] == [nn.Conv2d] * 3 + [nn.Linear] * 2


def test_fedgmccs_net_drops_units_after_each_pooling_and_before_the_last_layer() -> None:
    children = dict(GmccCNN(0.3).build((1, 28, 28), 62).named_children())
    order = list(children)
    assert [order[order.index(name) - 1] for name in ("dropout1", "dropout2", "fc2")] == [
        "pool1",
        "pool2",
        "dropout3",
    ]
    assert [type(layer) for layer in children.values() if "Dropout" in type(layer).__name__] == [
        nn.Dropout
    ] * 3
    assert children["dropout3"].p == 0.3
    assert not any(
        "dropout" in name for name, _ in GmccCNN(0).build((1, 28, 28), 62).named_modules()
    )


@pytest.mark.parametrize(
    ("spec", "least"),
    [(LeafCNN(p), least) for p, least in enumerate([16, 10, 4, 1, 1])]
    + [(SmallCNN(), 16), (LeNet5(), 16), (CflCNN(), 8), (GmccCNN(), 4)],
)
def test_images_of_the_least_size_fit_and_smaller_ones_are_refused(spec: Spec, least: int) -> None:
    for height, width in [(least, least), (least + 1, least + 2), (least + 7, least)]:
        assert spec.build((2, height, width), 5)(torch.rand(3, 2, height, width)).shape == (3, 5)
    if least > 1:
        with pytest.raises(InvalidInputError, match=f"{least}x{least}") as caught:
            spec.build((2, least + 5, least - 1), 5)
        assert caught.value.field == "model"
        assert type(spec).__name__ in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ((1, 8, 8), "MLP"),
        ((60,), "MLP"),
        ((28, 28), ": (1, 28, 28)"),
        ((32, 32, 3), ": (3, 32, 32)"),
        ((), "MLP"),
        ((0, 28, 28), "MLP"),
    ],
)
def test_the_error_has_the_model_the_shape_the_least_size_and_the_remedy(
    shape: tuple[int, ...], remedy: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        LeNet5().build(shape, 10)
    assert caught.value.field == "model"
    parts = ("LeNet5", "(channels, height, width)", "16x16", str(shape), remedy)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize("padding", [-1, 5, 1.0, True, "same"])
def test_padding_is_checked(padding: object) -> None:
    with pytest.raises(InvalidInputError, match=f"{padding!r}: .*0.*4") as caught:
        LeafCNN(padding=padding)  # type: ignore[arg-type]
    assert caught.value.field == "model.padding"


def test_standardized_pixels_have_the_mean_and_the_scale_of_mnist() -> None:
    plain, standardized = (
        LeafCNN(padding=0, standardized=wanted).build((1, 28, 28), 62) for wanted in (False, True)
    )
    standardized.load_state_dict(plain.state_dict())
    x = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(standardized(x), plain((x - 0.1307) / 0.3081))


@pytest.mark.parametrize("spec", [SmallCNN, GmccCNN])
def test_dropout_is_checked(spec: type[SmallCNN] | type[GmccCNN]) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "model.dropout"):
        spec(dropout=1.0)


@pytest.mark.parametrize("spec", [LeafCNN(), SmallCNN(), LeNet5(), CflCNN(), GmccCNN()])
def test_classes_are_checked(spec: Spec) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "classes"):
        spec.build((1, 28, 28), -1)
