"""The data sets on which the encoders of FLT's tables are trained."""

from __future__ import annotations

import torch

from fedclade.core.inputs import one_tensor
from fedclade.data.datasets import Dataset, load

# Of each combined set, its parts and the classes used of each part; None for all. The classes are
# those of the authors' settings.
COMBINED: dict[str, tuple[tuple[str, tuple[int, ...] | None], ...]] = {
    "cifar20": (("cifar10", None), ("cifar100", (11, 20, 22, 31, 37, 51, 54, 65, 86, 90))),
}


def encoder_data(name: str, root: str | None = None) -> Dataset:
    """The data set of this name, or one combined of others.

    "cifar20" is CIFAR-10 with ten classes of CIFAR-100 (Enc1 of FLT). An encoder is trained without
    labels, so those of the result are the labels of its parts.

    Args:
        name: a data set, or a key of `COMBINED`.
        root: the folder to search first for data sets.
    """
    if name not in COMBINED:
        return load(name, root)
    inputs, labels = [], []
    for part, classes in COMBINED[name]:
        data = load(part, root)
        used = slice(None) if classes is None else torch.isin(data.y_train, torch.tensor(classes))
        inputs.append(one_tensor(data.x_train, "an autoencoder", "pretrain.data")[used])
        labels.append(data.y_train[used])
    x, y = torch.cat(inputs), torch.cat(labels)
    return Dataset(name, x, y, x[:0], y[:0], {})
