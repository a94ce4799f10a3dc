"""ResNet-9: its number of parameters, layers, image sizes, and checked fields."""

import pytest
import torch
from torch import nn

from fedclade.errors import InvalidInputError
from fedclade.models import ResNet9
from fedclade.models.resnet import Residual


@pytest.mark.parametrize(("classes", "parameters"), [(100, 6_621_540), (10, 6_575_370)])
def test_resnet9_has_the_number_of_parameters_of_flis(classes: int, parameters: int) -> None:
    assert sum(p.numel() for p in ResNet9().build((3, 32, 32), classes).parameters()) == parameters


def test_a_residual_adds_its_input() -> None:
    body = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    assert torch.equal(Residual(body)(x), x + body(x))


def test_sides_are_halved_three_times_before_the_maximum_of_each_map() -> None:
    module = ResNet9().build((3, 32, 32), 10)
    shapes = {}
    for name, layer in module.named_children():
        layer.register_forward_hook(
            lambda _, inputs, output, name=name: shapes.update({name: tuple(output.shape[1:])})
        )
    module(torch.rand(1, 3, 32, 32))
    assert list(shapes.values()) == [
        (64, 32, 32), (128, 16, 16), (128, 16, 16), (256, 8, 8),
        (512, 4, 4), (512, 4, 4), (512, 1, 1), (512,), (10,),
    ]  # fmt: skip


def test_norms_have_32_groups_and_keep_no_statistics() -> None:
    module = ResNet9().build((3, 32, 32), 10)
    norms = [layer for layer in module.modules() if isinstance(layer, nn.GroupNorm)]
    assert [norm.num_groups for norm in norms] == [32] * 8
    assert not list(module.buffers())


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 17), (2, 28, 28)])
def test_images_of_at_least_8x8_fit(shape: tuple[int, ...]) -> None:
    assert ResNet9().build(shape, 5)(torch.rand(2, *shape)).shape == (2, 5)


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [((3, 8, 7), "MLP"), ((32, 32), ": (1, 32, 32)"), ((32, 32, 3), ": (3, 32, 32)")],
)
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...], remedy: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        ResNet9().build(shape, 10)
    assert caught.value.field == "model"
    parts = ("ResNet9", "(channels, height, width)", "8x8", f"got {shape}", remedy)
    assert all(part in str(caught.value) for part in parts)


def test_classes_are_checked() -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "classes"):
        ResNet9().build((3, 32, 32), 0)
