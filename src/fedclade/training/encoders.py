"""Encoders for methods that compare clients by embeddings: the shipped one, one built for any other
shape, files, pretraining.
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

from fedclade.core.rng import fold_in
from fedclade.data import Dataset, load
from fedclade.data.federated_dataset import as_inputs
from fedclade.engines.oom import is_out_of_memory
from fedclade.engines.simulator import pick_device
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
    """The encoder that `encoder` ("default", or the path of an encoder file) means for inputs of
    `shape`.

    The default for (1, 28, 28) is the shipped one, trained on Fashion-MNIST. For any other shape it
    is that of `spec_for` with random weights from the seed (`pretrained` is False): FLT then trains
    it by `fine_tune="federated"` unless `fine_tune` says otherwise.
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
    """FLT's autoencoders for images that fit them, the residual one for three channels, a dense one
    for everything else.

    An image fits when its sides are divisible by 4 and it is large enough for the convolutions to
    hand on at least as many numbers as the code has: on 8 x 8 digits they would hand on 16, and the
    groups a dense one finds are lost. A dense code is no longer than the input.
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
        torch.manual_seed(fold_in(seed, "encoder"))
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
    """Train an encoder on the training part of a data set, and write it to `out`: for
    `FLT(encoder="encoder.safetensors")`.

    Adam on the mean squared error of the reconstruction; labels are not looked at. Use public data
    that no client holds. `root` is the folder in which a data set is looked for first; `on_epoch`
    is called with each epoch's number and mean loss.
    """
    for name, value in (("epochs", epochs), ("batch_size", batch_size), ("code", code)):
        require_int(f"pretrain: {name}", value, 1)
    require(lr > 0, "pretrain: lr", lr, "must be a number above 0")
    target = _writable(out) if out is not None else None
    data = data if isinstance(data, Dataset) else load(data, root)
    if data.x_train.dtype not in (torch.uint8, torch.float32, torch.float64):
        raise InvalidInputError(
            f"pretrain: the inputs of '{data.name}' are whole numbers, not images or measurements;"
            " nothing to reconstruct."
        )
    shape = tuple(data.x_train.shape[1:])
    spec = spec_for(shape, code)
    module = _built(spec, shape, seed)
    order = torch.Generator().manual_seed(fold_in(seed, "pretrain"))
    _train(module.to(pick_device(device)), data.x_train, epochs, lr, batch_size, order, on_epoch)
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
    """`out`, refused before minutes of training where it cannot be written."""
    path = Path(out)
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidInputError(f"pretrain: out = '{path}': give a file in a folder that is there.")
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
    optimiser = torch.optim.Adam(module.parameters(), lr=lr)
    device = next(module.parameters()).device
    for epoch in range(1, epochs + 1):
        total = 0.0
        for rows in torch.split(torch.randperm(len(x), generator=order), batch_size):
            batch = as_inputs(x[rows].to(device)).to(torch.float32)
            loss = ((module(batch) - batch) ** 2).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
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
    """An encoder file: the weights, what builds the module for them, and how they were made."""
    facts = {
        "format": FORMAT,
        "spec": {"name": spec.name, **asdict(spec)},
        "shape": list(shape),
        **metadata,
    }
    write_tensors(Path(path), module.state_dict(), facts)


def read(path: str | os.PathLike[str], shape: tuple[int, ...] | None = None) -> Autoencoder:
    """The encoder of a file that `write` or `pretrain` wrote; refused where it is for inputs of
    another shape than `shape`.
    """
    path = Path(path)
    if not path.is_file():
        raise InvalidInputError(
            f"encoder = '{path}': there is no such file; 'default', or one that `fedclade pretrain`"
            " wrote."
        )
    try:
        metadata, weights = read_tensors(path)
        if metadata.get("format") != FORMAT:
            raise InvalidInputError(
                f"encoder = '{path}': not an encoder file; make one with `fedclade pretrain`."
            )
        own = tuple(metadata["shape"])
        spec = _SPECS[metadata["spec"].pop("name")](**metadata["spec"])
        with torch.device("meta"):  # a module of the size that the file tells, without its memory
            expected = spec.build(own).state_dict()
        if {name: value.shape for name, value in expected.items()} != {
            name: value.shape for name, value in weights.items()
        }:
            raise ValueError("its weights are not those of the encoder that it tells of")
        module = _built(spec, own, seed=0)
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
        raise InvalidInputError(f"encoder = '{path}': a damaged encoder file ({error}).") from error
    if shape is not None and own != tuple(shape):
        raise InvalidInputError(
            f"encoder = '{path}': it takes inputs of shape {own}, the clients have {tuple(shape)};"
            " pretrain one for them."
        )
    module.pretrained = True
    return module
