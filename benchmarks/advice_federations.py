"""Natural and mixed federations of benchmarks/diagnosis_advice.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from scipy import ndimage
from torch import Tensor

import fedclade as fc
from fedclade.data import Clients, Dataset
from fedclade.data.bundled_tables import heart
from fedclade.data.partitioning.base import Split, blocks
from fedclade.data.partitioning.transforms import distinct_permutations, relabel, rotate
from fedclade.data.tables import TableSettings, clients_from_table

MODEL = fc.models.MLP(100)
TRAIN, TEST, CLIENTS, WRITERS, ROLES, MOST_LETTERS = 8000, 2000, 40, 60, 30, 400


@dataclass(frozen=True)
class GroupsWithLabelSkew:
    """Four groups with rotated images or permuted labels, and Dirichlet label skew inside them."""

    name: ClassVar[str] = "groups_with_label_skew"
    groups: Literal["rotated", "permuted"] = "rotated"
    alpha: float = 0.3
    clusters: int = 4

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        split = fc.data.Dirichlet(alpha=self.alpha).split(data, clients, rng)
        labels = np.unique(data.y_train.numpy())
        transform = (
            rotate(self.clusters)
            if self.groups == "rotated"
            else relabel(distinct_permutations(labels, self.clusters, len(labels), rng))
        )
        groups = rng.permutation(blocks(clients, self.clusters))
        return replace(split, groups=groups, transform=transform)


@dataclass(frozen=True)
class OwnAngle:
    """Each client's images are rotated by its own angle, uniform in ± 45 degrees."""

    name: ClassVar[str] = "own_angle"
    most: float = 45.0

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        angle = rng.uniform(-self.most, self.most, clients)

        def transform(x: Tensor, y: Tensor, client: int) -> tuple[Tensor, Tensor]:
            images = x.numpy().astype(np.float32)
            turned = ndimage.rotate(images, angle[client], axes=(-1, -2), reshape=False, order=1)
            return torch.from_numpy(turned).round().to(x.dtype), y

        split = fc.data.Iid().split(data, clients, rng)
        return replace(split, groups=np.arange(clients), transform=transform)


@dataclass(frozen=True)
class Federation:
    """Clients, and how they train."""

    clients: Callable[[str, int], Clients]
    model: Any = MODEL
    rounds: int = 50
    per_round: float = 0.25
    local: dict[str, Any] = field(
        default_factory=lambda: {"lr": 0.05, "batch_size": 10, "epochs": 2}
    )
    groups: int | None = None  # planted


def _mnist(scheme: Any) -> Callable[[str, int], Clients]:
    def clients(root: str, seed: int) -> Clients:
        data = _some(_small_images(root), seed)
        return fc.data.partition(data, scheme, clients=CLIENTS, seed=seed, probe=None)

    return clients


def _writers(root: str, seed: int) -> Clients:
    scheme = fc.data.NaturalId(key="writer", test_fraction=0.25)
    return fc.data.partition(_small_images(root), scheme, WRITERS, seed, probe=None)


def _roles(root: str, seed: int) -> Clients:
    """The next letter from four letters. Random roles with enough of them."""
    roles = fc.data.NaturalId(key="role")
    clients = fc.data.partition(_letters(root), roles, 200, seed, probe=None)
    large = (clients.sizes >= MOST_LETTERS // 2) & (clients.test_sizes >= MOST_LETTERS // 10)
    clients = clients.only(large.nonzero().flatten()[:ROLES].tolist())
    train = [clients.train[number][:MOST_LETTERS] for number in range(len(clients))]
    return replace(clients, train=fc.data.RaggedIndex.of(train))


@lru_cache(maxsize=1)
def _letters(root: str) -> Dataset:
    """Eight samples of each window of 80 letters."""
    data = _loaded("shakespeare", root)
    (train_ids, test_ids), at = data.keys["role"], torch.arange(9, 80, 10)
    known = data.classes or 0

    def letters(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        before = torch.stack([x[:, at - back] for back in range(4)], 2).flatten(0, 1)
        return F.one_hot(before, known).flatten(1).float(), y[:, at].flatten()

    x, y = letters(data.x_train, data.y_train)
    x_test, y_test = letters(data.x_test, data.y_test)
    ids = (train_ids.repeat_interleave(len(at)), test_ids.repeat_interleave(len(at)))
    return Dataset("letters", x, y, x_test, y_test, {"role": ids}, data.key_names)


def _hospitals(root: str, seed: int) -> Clients:
    settings = TableSettings(
        client="hospital",
        target="disease",
        test=0.2,
        categorical=("cp", "restecg", "slope", "thal"),
        seed=seed,
    )
    return clients_from_table(heart().drop(["num"]), settings, "heart")


@lru_cache(maxsize=1)
def _small_images(root: str) -> Dataset:
    """MNIST with 14 x 14 pixels, the means of 2 x 2, so that twelve federations are cheap."""
    data = _loaded("mnist", root)
    train, test = (
        F.avg_pool2d(x.float(), 2).round().to(x.dtype) for x in (data.x_train, data.x_test)
    )
    return replace(data, x_train=train, x_test=test)


@lru_cache(maxsize=2)
def _loaded(name: str, root: str) -> Dataset:
    return fc.data.load(name, root)


def _some(data: Dataset, seed: int) -> Dataset:
    """A random part of the samples."""
    draw = np.random.default_rng([seed, 7])
    train, test = draw.permutation(len(data.x_train)), draw.permutation(len(data.x_test))
    train, test = train[:TRAIN], test[:TEST]
    arrays = (data.x_train[train], data.y_train[train], data.x_test[test], data.y_test[test])
    return fc.data.dataset(*arrays, name=data.name)


FEDERATIONS = {
    "IID": Federation(_mnist(fc.data.Iid())),
    "quantity skew": Federation(_mnist(fc.data.QuantitySkew(0.5))),
    "Dirichlet(5)": Federation(_mnist(fc.data.Dirichlet(alpha=5.0))),
    "Dirichlet(0.1)": Federation(_mnist(fc.data.Dirichlet(alpha=0.1))),
    "any two classes": Federation(_mnist(fc.data.Pathological(classes_per_client=2))),
    "label clusters": Federation(_mnist(fc.data.LabelClusters(5, 2)), groups=5),
    "rotated, Dirichlet(0.3)": Federation(_mnist(GroupsWithLabelSkew("rotated")), groups=4),
    "permuted, Dirichlet(0.3)": Federation(_mnist(GroupsWithLabelSkew("permuted")), groups=4),
    "own angle": Federation(_mnist(OwnAngle())),
    "MNIST by writer": Federation(_writers),
    "Shakespeare's roles": Federation(_roles, per_round=0.4),
    "four hospitals": Federation(_hospitals, fc.models.MLP(16), 30, 1.0),
}
