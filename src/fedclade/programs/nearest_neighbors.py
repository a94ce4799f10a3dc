"""A model mixed with the nearest training samples of a client: the store, and predictions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedclade.core.batching import HELD_OUT, Batches
from fedclade.core.functional_model import Batch, Objective, last_linear_layer
from fedclade.core.inputs import outputs_tensor
from fedclade.core.module_copy import copy_sharing, frozen_parameters
from fedclade.core.program import Program
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree
from fedclade.programs.client_slots import SLOTS, slot_rows, write_rows

MIN_HELD_OUT = 5  # with fewer samples held out, λ is `default_weight`
GRID = 101  # values of λ: 0, 0.01, … 1
NEIGHBORS = 10  # k by default
SCALE = 1.0  # s by default
PREFIX = "model."  # of the parameters of h in `NearestNeighbors`
_BY_DIFFERENCES = "donot_use_mm_for_euclid_dist"
LEAST_PROBABILITY = 1e-12  # before its logarithm


def neighbor_weights(distance: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k nearest samples of each row: their weights, which sum to 1, and their labels.

    Args:
        distance: (B, n) ‖φ(x) - φ(x_j)‖² / (dim · s); infinite for a slot without a sample.
        labels: (n,) the labels of the samples.
        k: the number of neighbors; all samples if there are fewer.
    """
    nearest, index = distance.topk(min(k, distance.shape[-1]), largest=False)
    return (-nearest).softmax(-1).nan_to_num(), labels[index]


def neighbor_probabilities(distance: Tensor, labels: Tensor, k: int, classes: int) -> Tensor:
    """(B, classes) p_kNN(y|x). The arguments are those of `neighbor_weights`."""
    weights, near = neighbor_weights(distance, labels, k)
    of_class = near[..., None] == torch.arange(classes, device=labels.device)
    return (weights[..., None] * of_class.to(weights.dtype)).sum(-2)


def scaled_distance(z: Tensor, features: Tensor, labels: Tensor, scale: float) -> Tensor:
    """‖z - φ_j‖² / (dim · s) for each sample j of a store; infinite for an empty slot."""
    # By differences, not by products, whose bits depend on the number of clients; ONNX has only
    # the latter.
    mode = "use_mm_for_euclid_dist" if torch.compiler.is_exporting() else _BY_DIFFERENCES
    squares = torch.cdist(z, features, compute_mode=mode).square()
    return torch.where(labels >= 0, squares / (z.shape[-1] * scale), torch.inf)


class NearestNeighbors(nn.Module):
    """log(λ p_kNN(y|x) + (1 - λ) softmax h(x)): probabilities are mixed, not outputs.

    Args:
        module: a model of the form of h.
        slots: the number of samples in the store.
        k: the number of neighbors.
        scale: s.
    """

    def __init__(self, module: nn.Module, slots: int, k: int, scale: float) -> None:
        super().__init__()
        self.model = copy_sharing(module, frozen_parameters(module))
        self.k, self.scale = k, scale
        like = next(module.parameters()).detach()
        width = last_linear_layer(module).in_features
        self.features = nn.Parameter(like.new_zeros(slots, width))
        self.labels = nn.Parameter(like.new_full((slots,), -1.0))  # -1: no sample
        self.knn_weight = nn.Parameter(like.new_zeros(()))  # λ

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        captured: list[Tensor] = []
        hook = last_linear_layer(self.model).register_forward_pre_hook(
            lambda _, inputs: captured.append(inputs[0])
        )
        try:
            outputs = outputs_tensor(self.model(*args, **kwargs), self.model)
        finally:
            hook.remove()
        distance = scaled_distance(captured[-1], self.features, self.labels, self.scale)
        p_knn = neighbor_probabilities(distance, self.labels, self.k, outputs.shape[-1])
        p = self.knn_weight * p_knn + (1 - self.knn_weight) * outputs.softmax(-1)
        return p.clamp_min(LEAST_PROBABILITY).log()


def empty_store(like: Tensor, slots: int, width: int) -> Tree:
    """A store without samples.

    Args:
        like: a tensor of the type of the features.
        slots: the number of samples that the store can have.
        width: the number of entries of φ.
    """
    return {
        "features": like.new_zeros(slots, width),
        "labels": like.new_full((slots,), -1.0),
        "count": like.new_zeros((), dtype=torch.int64),
    }


def add_samples(store: Tree, weight: Tensor, new: Tree) -> Tree:
    """The store with the samples of a batch.

    Args:
        store: the store.
        weight: the weights of the batch; 0 for padding.
        new: for each sample of the batch the values to write, by their names in the store.
    """
    rows = slot_rows(store["count"], weight, len(store["labels"]))
    after = {name: write_rows(store[name], rows, value) for name, value in new.items()}
    return store | after | {"count": store["count"] + (weight > 0).sum()}


@serializable_program
def build_store(
    objective: Objective, k: int, scale: float, hold_out: bool, default_weight: float
) -> Program:
    """The parameters of a client's `NearestNeighbors`: the model that it received, φ and the label
    of all its training samples, and λ.

    λ is the value of the grid with the largest likelihood of the samples that are held out, whose
    neighbors are among the others.

    Args:
        objective: the model and its loss.
        k: the number of neighbors.
        scale: s.
        hold_out: whether samples were held out, see `Batches.part`.
        default_weight: λ of a client with less than `MIN_HELD_OUT` samples held out.
    """
    width = objective.head_layer().in_features

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        model = {n.removeprefix(PREFIX): v for n, v in params.items() if n != SLOTS}
        like = next(iter(model.values()))
        # p: the model's probability of the true label
        store = empty_store(like, len(params[SLOTS]), width)
        return model, store | {"p": like.new_zeros(len(params[SLOTS]))}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        features, outputs = objective.features(const, batch.x)
        p = outputs.softmax(-1).gather(-1, batch.y[:, None])[:, 0]
        new = {"features": features, "labels": batch.y.to(features.dtype), "p": p}
        return add_samples(carry, batch.weight, new)

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        store = {name: carry[name] for name in ("features", "labels")}
        weight = torch.full_like(carry["p"][0], default_weight)
        if hold_out:
            chosen, held_out = _choose_weight(carry, k, scale)
            weight = torch.where(held_out >= MIN_HELD_OUT, chosen, weight)
        served = {f"{PREFIX}{name}": value for name, value in const.items()}
        return served | store | {"knn_weight": weight}, None

    return Program(start, step, finish, Batches.whole(), "build_store")


def _choose_weight(store: Tree, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """λ by the samples of a store that are held out, and their number."""
    labels, count = store["labels"], store["count"]
    place = torch.arange(len(labels), device=labels.device)
    is_held_out = place % HELD_OUT == HELD_OUT - 1
    others = torch.where(is_held_out, -1.0, labels)
    rows = place[HELD_OUT - 1 :: HELD_OUT]
    if not len(rows):
        return torch.zeros_like(store["p"][0]), torch.zeros_like(count)
    distance = scaled_distance(store["features"][rows], store["features"], others, scale)
    weights, near = neighbor_weights(distance, others, k)
    p_knn = (weights * (near == labels[rows][:, None])).sum(-1)
    grid = torch.linspace(0, 1, GRID, dtype=p_knn.dtype, device=p_knn.device)[:, None]
    p = (grid * p_knn + (1 - grid) * store["p"][rows]).clamp_min(LEAST_PROBABILITY)
    likelihood = (p.log() * (rows < count)).sum(-1)
    return grid[likelihood.argmax()][0], (rows < count).sum()
