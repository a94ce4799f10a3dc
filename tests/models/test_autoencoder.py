import pytest
import torch

from fedclade.errors import InvalidInput
from fedclade.models import ConvAutoencoder


def test_it_has_the_parameters_flt_prints() -> None:
    assert sum(p.numel() for p in ConvAutoencoder().build((1, 28, 28), 10).parameters()) == 51_577


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 4, 12)])
def test_reconstruction_has_the_shape_of_the_image_and_lies_in_0_to_1(shape: tuple[int, ...]) -> None:
    module = ConvAutoencoder(code=9).build(shape, 10)
    images = torch.rand(5, *shape)
    again = module(images)
    assert again.shape == images.shape
    assert again.min() >= 0
    assert again.max() <= 1
    assert module.encode(images).shape == (5, 9)
    torch.testing.assert_close(module.decoder(module.encode(images)), again)


def test_the_code_has_no_activation() -> None:
    torch.manual_seed(0)
    assert ConvAutoencoder().build((1, 28, 28), 10).encode(torch.rand(4, 1, 28, 28)).min() < 0


def test_classes_are_ignored() -> None:
    sizes = [{k: v.shape for k, v in ConvAutoencoder().build((1, 8, 8), c).state_dict().items()} for c in (0, 2, 62)]
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ((1, 30, 28), "; pad or crop the images."),
        ((1, 28, 27), "; pad or crop the images."),
        ((1, 2, 2), "; pad or crop the images."),
        ((28, 28), "; add the axis of channels: (1, 28, 28)."),
        ((28, 28, 1), "; put the channels first: (1, 28, 28)."),
        ((64,), "."),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...], remedy: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        ConvAutoencoder().build(shape, 10)
    needs = "ConvAutoencoder needs images (channels, height, width) of at least 4x4 with sides divisible by 4"
    assert str(refused.value) == f"{needs}, got {shape}{remedy}"


@pytest.mark.parametrize("code", [0, -1, 1.5, True, "128"])
def test_code_is_checked(code: object) -> None:
    with pytest.raises(InvalidInput, match=r"^model\.code = .*: length of the code, a whole number of at least 1"):
        ConvAutoencoder(code=code)  # type: ignore[arg-type]
