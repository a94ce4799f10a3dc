"""Autoencoders: numbers of parameters, shapes, checked fields, and pretraining."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import fedclade as fc
from fedclade.cli import main
from fedclade.data import from_arrays
from fedclade.errors import InvalidInputError
from fedclade.models import MLP, ConvAutoencoder, ResidualAutoencoder
from fedclade.models.autoencoder import DenseAutoencoder
from fedclade.training import encoders

Spec = ConvAutoencoder | ResidualAutoencoder
BOTH = [ConvAutoencoder(code=9), ResidualAutoencoder(hidden=16, code=9)]


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_conv_autoencoder_has_the_number_of_parameters_that_flt_prints() -> None:
    assert size(ConvAutoencoder().build((1, 28, 28), 10)) == 51_577


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.name)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 4, 12)])
def test_a_reconstruction_has_the_shape_of_the_image_and_values_from_0_to_1(
    spec: Spec, shape: tuple[int, ...]
) -> None:
    module = spec.build(shape, 10)
    images = torch.rand(5, *shape)
    reconstructed = module(images)
    assert reconstructed.shape == images.shape
    assert reconstructed.min() >= 0
    assert reconstructed.max() <= 1
    assert module.encode(images).shape == (5, 9)
    torch.testing.assert_close(module.decoder(module.encode(images)), reconstructed)


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.name)
def test_the_code_has_no_activation(spec: Spec) -> None:
    torch.manual_seed(0)
    assert spec.build((1, 28, 28), 10).encode(torch.rand(4, 1, 28, 28)).min() < 0


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.name)
def test_classes_are_ignored(spec: Spec) -> None:
    sizes = [
        {k: v.shape for k, v in spec.build((1, 8, 8), c).state_dict().items()} for c in (0, 2, 62)
    ]
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize("spec", BOTH, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ((1, 30, 28), "crop"),
        ((1, 28, 27), "crop"),
        ((1, 2, 2), "crop"),
        ((28, 28), ": (1, 28, 28)"),
        ((28, 28, 1), ": (1, 28, 28)"),
        ((64,), ""),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    spec: Spec, shape: tuple[int, ...], remedy: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        spec.build(shape, 10)
    assert caught.value.field == "model"
    parts = (type(spec).__name__, "(channels, height, width)", "4x4", "by 4", str(shape), remedy)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize("spec", [ConvAutoencoder, ResidualAutoencoder])
@pytest.mark.parametrize("code", [0, -1, 1.5, True, "128"])
def test_code_is_checked(spec: type[Spec], code: object) -> None:
    with pytest.raises(InvalidInputError, match=repr(code)) as caught:
        spec(code=code)  # type: ignore[arg-type]
    assert caught.value.field == "model.code"


# --- ResidualAutoencoder


def test_residual_autoencoder_has_the_parameters_of_its_layers() -> None:
    def conv(inputs: int, maps: int, kernel: int) -> int:
        return inputs * maps * kernel**2 + maps

    def norm(maps: int) -> int:
        return 2 * maps

    residual = conv(128, 32, 3) + norm(32) + conv(32, 128, 1) + norm(128)
    encoder = (
        conv(3, 64, 4)
        + norm(64)
        + conv(64, 128, 4)
        + norm(128)
        + conv(128, 128, 3)
        + 2 * residual
        + 8192 * 128
        + 128
    )
    decoder = (
        128 * 8192
        + 8192
        + conv(128, 128, 3)
        + 2 * residual
        + conv(128, 64, 4)
        + norm(64)
        + conv(64, 3, 4)
    )
    module = ResidualAutoencoder().build((3, 32, 32))
    assert (
        (size(module.encoder), size(module.decoder)) == (encoder, decoder) == (1_413_888, 1_421_571)
    )


def test_feature_maps_have_a_quarter_of_the_side() -> None:
    maps: list[Tensor] = []
    module = ResidualAutoencoder(hidden=16).build((3, 32, 24))
    module.encoder.get_submodule("flatten").register_forward_pre_hook(
        lambda _, inputs: maps.append(inputs[0])
    )
    module.encode(torch.rand(2, 3, 32, 24))
    assert maps[0].shape == (2, 16, 8, 6)


def test_a_reconstruction_does_not_depend_on_the_rest_of_the_batch() -> None:
    torch.manual_seed(0)
    module, x = ResidualAutoencoder(hidden=16).build((3, 8, 8)).train(), torch.rand(4, 3, 8, 8)
    torch.testing.assert_close(module(x)[:1], module(x[:1]), rtol=0, atol=1e-6)
    assert not list(module.buffers())


@pytest.mark.parametrize("hidden", [0, -16, 8, 24, 16.0, True, "128"])
def test_the_number_of_feature_maps_is_checked(hidden: object) -> None:
    with pytest.raises(InvalidInputError, match=f"{hidden!r}: .*16") as caught:
        ResidualAutoencoder(hidden=hidden)  # type: ignore[arg-type]
    assert caught.value.field == "model.hidden"


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((3, 32, 32), ResidualAutoencoder()),
        ((3, 24, 24), ResidualAutoencoder()),
        ((1, 32, 32), ConvAutoencoder()),
        ((3, 30, 32), DenseAutoencoder()),
        ((3, 8, 8), DenseAutoencoder()),
    ],
)
def test_the_default_encoder_depends_on_the_shape(shape: tuple[int, ...], spec: object) -> None:
    assert encoders.spec_for(shape) == spec


def stripes(count: int) -> Tensor:
    """Color images with stripes and some noise. The first half has vertical stripes, the second
    half horizontal ones.
    """
    generator = torch.Generator().manual_seed(0)
    lines = (torch.arange(24) // 4 % 2 * 200).expand(3, 24, 24)
    images = torch.stack([lines if number < count // 2 else lines.mT for number in range(count)])
    return (images + torch.randint(0, 56, images.shape, generator=generator)).to(torch.uint8)


def test_a_pretrained_encoder_is_written_and_read(tmp_path: Path) -> None:
    data = fc.data.dataset(stripes(32), torch.zeros(32, dtype=torch.int64), name="stripes")
    losses: list[float] = []
    path = tmp_path / "stripes.safetensors"
    module = fc.pretrain(
        data, path, epochs=3, batch_size=8, on_epoch=lambda _, loss: losses.append(loss)
    )
    assert losses[2] < losses[1] < losses[0]
    loaded = encoders.read(path, (3, 24, 24))
    assert loaded.pretrained
    assert all(
        torch.equal(value, loaded.state_dict()[name]) for name, value in module.state_dict().items()
    )


def test_the_command_line_pretrains_an_encoder(tmp_path: Path) -> None:
    x = stripes(16).numpy()
    y = np.zeros(16, dtype=np.int64)
    np.savez(tmp_path / "stripes.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    out = tmp_path / "encoder.safetensors"
    result = CliRunner().invoke(
        main.app,
        ["pretrain", "--data", str(tmp_path / "stripes.npz"), "--out", str(out), "--epochs", "1"],
    )
    assert result.exit_code == 0, result.output
    assert encoders.read(out, (3, 24, 24)).encode(torch.rand(2, 3, 24, 24)).shape == (
        2,
        128,
    )


def test_flt_finds_groups_of_color_images() -> None:
    x = stripes(32)
    clients = from_arrays(
        [(x[start : start + 8], torch.zeros(8, dtype=torch.int64)) for start in range(0, 32, 8)]
    )
    method = fc.FLT(k=1, manifold="none", clusters=2, fine_tune_epochs=1)
    result = fc.run(method, clients, MLP(4), rounds=1, device="cpu")
    first, second, third, fourth = result.clusters.tolist()
    assert first == second != third == fourth
