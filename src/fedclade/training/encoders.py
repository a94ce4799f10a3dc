"""Encoders for methods that compare clients by embeddings: the included encoder, encoders for other
shapes, encoder files, pretraining.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedclade.core.inputs import as_inputs, one_tensor
from fedclade.core.rng import fold_in
from fedclade.data import Dataset, load
from fedclade.engines.device import pick_device
from fedclade.engines.oom import is_out_of_memory
from fedclade.errors import InvalidInputError, require, require_int
from fedclade.io.checkpoint import read_tensors, write_tensors
from fedclade.models.autoencoder import (
    Autoencoder,
    ConvAutoencoder,
    DenseAutoencoder,
    ResidualAutoencoder,
)

FORMAT = "fedclade-encoder-1"
DEFAULT = "default"
CODE = 128  # e of FLT
SHIPPED = "fashion_mnist.safetensors"
SHIPPED_SHAPE = (1, 28, 28)

Spec = ConvAutoencoder | ResidualAutoencoder | DenseAutoencoder
_SPECS: dict[str, type[Spec]] = {
    spec.name: spec for spec in (ConvAutoencoder, ResidualAutoencoder, DenseAutoencoder)
}


def resolve(encoder: str, shape: tuple[int, ...], seed: int) -> Autoencoder:
    """The encoder of a method's setting `encoder`.

    The default for inputs of (1, 28, 28) is the included encoder, pretrained on Fashion-MNIST. For
    other shapes it is the encoder of `spec_for` with random weights (`pretrained` is False), which
    FLT then trains with `fine_tune="federated"` unless `fine_tune` is set.

    Args:
        encoder: "default", or the path of an encoder file.
        shape: the shape of one input.
        seed: the seed of random weights.
    """
    if encoder != DEFAULT:
        return read(encoder, shape)
    if tuple(shape) == SHIPPED_SHAPE:
        with resources.as_file(
            resources.files("fedclade.models").joinpath("pretrained", SHIPPED)
        ) as path:
            return read(path, shape)
    return _built(spec_for(shape), shape, seed)


def spec_for(shape: tuple[int, ...], code: int = CODE) -> Spec:
    """The autoencoder for inputs of `shape`: FLT's for images that fit it (the residual one for
    three channels), a dense one for all other inputs.

    An image fits if its sides are divisible by 4 and the convolutions output at least `code`
    features. With fewer features (16 for digits of 8 x 8), groups that a dense encoder finds are
    lost. The code of a dense encoder is at most as long as the input.

    Args:
        shape: the shape of one input.
        code: the length of the code (e in FLT).
    """
    if (
        len(shape) == 3
        and shape[1] % 4 == 0
        and shape[2] % 4 == 0
        and ConvAutoencoder.features(shape) >= code
    ):
        return ResidualAutoencoder(code=code) if shape[0] == 3 else ConvAutoencoder(code)
    return DenseAutoencoder(code=min(code, prod(shape)))


def _built(spec: Spec, shape: tuple[int, ...], seed: int) -> Autoencoder:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(fold_in(seed, "encoder"))
        return spec.build(shape)


def pretrain(
    data: str | os.PathLike[str] | Dataset,
    out: str | os.PathLike[str] | None = None,
    epochs: int = 10,
    lr: float = 1e-3,
    batch_size: int = 64,
    code: int = CODE,
    seed: int = 0,
    root: str | os.PathLike[str] | None = None,
    on_epoch: Callable[[int, float], None] | None = None,
    device: str = "cpu",
) -> Autoencoder:
    """Train an autoencoder on the training part of a data set, for use as an encoder:
    `FLT(encoder="encoder.safetensors")`. Labels are not used. Use public data that no client has.

    Args:
        data: A data set, its name, or the path of an .npz file.
        out: The encoder file to write; None to write nothing.
        epochs: The number of epochs.
        lr: The learning rate of Adam, which minimizes the mean squared error of the reconstruction.
        batch_size: The size of a minibatch.
        code: The length of the code (e in FLT).
        seed: The seed of the initial weights and of the order of the samples.
        root: The folder to search first for the data set.
        on_epoch: A function that gets the number and the mean loss of each epoch.
        device: "auto", "cpu" or "cuda".

    Returns:
        The trained autoencoder, on the CPU.

    Example:
        >>> import fedclade as fc
        >>> encoder = fc.pretrain("digits", "encoder.safetensors", epochs=1, code=4)
        >>> method = fc.FLT(encoder="encoder.safetensors")
    """
    for name, value in (("epochs", epochs), ("batch_size", batch_size), ("code", code)):
        require_int(f"pretrain.{name}", value, 1)
    require(lr > 0, "pretrain.lr", lr, "must be a number above 0")
    target = _writable(out) if out is not None else None
    data = data if isinstance(data, Dataset) else load(data, root)
    x = one_tensor(data.x_train, "an autoencoder", "pretrain.data")
    if x.dtype not in (torch.uint8, torch.float32, torch.float64):
        raise InvalidInputError(
            f"pretrain.data: the inputs of '{data.name}' are whole numbers, which an autoencoder"
            " cannot reconstruct. Use images or measurements.",
            "pretrain.data",
        )
    shape = tuple(x.shape[1:])
    spec = spec_for(shape, code)
    module = _built(spec, shape, seed)
    order = torch.Generator().manual_seed(fold_in(seed, "pretrain"))
    _train(module.to(pick_device(device)), x, epochs, lr, batch_size, order, on_epoch)
    module.cpu().pretrained = True
    if target is not None:
        settings = {
            "data": data.name,
            "epochs": epochs,
            "lr": lr,
            "batch_size": batch_size,
            "seed": seed,
        }
        write(target, module, spec, shape, {"pretrained": settings})
    return module


def _writable(out: str | os.PathLike[str]) -> Path:
    """`out`, if it can be written: the check is before the training."""
    path = Path(out)
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidInputError(
            f"pretrain.out = '{path}': give a file in an existing folder.", "pretrain.out"
        )
    return path


def _train(
    module: nn.Module,
    x: Tensor,
    epochs: int,
    lr: float,
    batch_size: int,
    order: torch.Generator,
    on_epoch: Callable[[int, float], None] | None,
) -> None:
    optimizer = torch.optim.Adam(module.parameters(), lr=lr)
    device = next(module.parameters()).device
    for epoch in range(1, epochs + 1):
        total = 0.0
        for rows in torch.split(torch.randperm(len(x), generator=order), batch_size):
            batch = as_inputs(x[rows].to(device)).to(torch.float32)
            loss = ((module(batch) - batch) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(rows)
        if on_epoch is not None:
            on_epoch(epoch, total / len(x))


def write(
    path: str | os.PathLike[str],
    module: Autoencoder,
    spec: Spec,
    shape: tuple[int, ...],
    metadata: dict[str, Any],
) -> None:
    """Write an encoder file.

    Args:
        path: the file.
        module: the module with the weights.
        spec: the spec that builds the module.
        shape: the shape of one input.
        metadata: how the weights were made.
    """
    content = {
        "format": FORMAT,
        "spec": {"name": spec.name, **asdict(spec)},
        "shape": list(shape),
        **metadata,
    }
    write_tensors(Path(path), module.state_dict(), content)


def read(path: str | os.PathLike[str], shape: tuple[int, ...] | None = None) -> Autoencoder:
    """Read an encoder file.

    Args:
        path: a file that `write` or `pretrain` wrote.
        shape: the shape of one input, which the encoder must fit; None to accept any encoder.
    """
    path = Path(path)
    if not path.is_file():
        raise InvalidInputError(
            f"method.encoder = '{path}': there is no such file. Give 'default', or a file of"
            " `fedclade pretrain`.",
            "method.encoder",
        )
    try:
        metadata, weights = read_tensors(path)
        if metadata.get("format") != FORMAT:
            raise InvalidInputError(
                f"method.encoder = '{path}': not an encoder file. Make one with"
                " `fedclade pretrain`.",
                "method.encoder",
            )
        encoder_shape = tuple(metadata["shape"])
        spec = _SPECS[metadata["spec"].pop("name")](**metadata["spec"])
        with torch.device("meta"):  # only shapes: the file may describe a module of any size
            expected = spec.build(encoder_shape).state_dict()
        if {name: value.shape for name, value in expected.items()} != {
            name: value.shape for name, value in weights.items()
        }:
            raise ValueError("its weights do not fit the encoder that it describes")
        module = _built(spec, encoder_shape, seed=0)
        module.load_state_dict(weights)
    except (
        SafetensorError,
        OSError,
        KeyError,
        AttributeError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:
        if isinstance(error, InvalidInputError) or is_out_of_memory(error):
            raise
        raise InvalidInputError(
            f"method.encoder = '{path}': a damaged encoder file ({error}).", "method.encoder"
        ) from error
    if shape is not None and encoder_shape != tuple(shape):
        raise InvalidInputError(
            f"method.encoder = '{path}': it takes inputs of shape {encoder_shape}, the clients"
            f" have {tuple(shape)}. Pretrain an encoder for this shape.",
            "method.encoder",
        )
    module.pretrained = True
    return module
