"""Updates and gradients of clients before CFL's first split: their similarities and lengths. All
clients train one model with FedAvg.

Sattler et al., arXiv 1910.01991. α_ij = cos(Δθ_i, Δθ_j). The gap g(α) = α_intra^min − α_cross^max
compares the true groups with the optimal bipartition. If it is above 0, the bipartition is correct.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.aggregation.mean import mix_models
from fedclade.clustering.cfl import WARM_UP, bipartition, separation_gap, update_norms
from fedclade.clustering.cosine import cosine
from fedclade.core.batching import Batches
from fedclade.core.federation import ModelAssignment
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.local_sgd import sgd
from fedclade.core.program import Program
from fedclade.core.pytree import Tree, flatten, stack, tree_map
from fedclade.core.rng import fold_in
from fedclade.data.federated_dataset import Clients
from fedclade.engines.simulator import Simulator
from fedclade.errors import InvalidInputError, require, require_int
from fedclade.reproduce.panels import Panel, Series, StudyResult
from fedclade.training import experiment_file
from fedclade.training.experiment_file import Experiment
from fedclade.training.setup import module_for

Tables = dict[str, dict[str, Any]]
Similarity = NDArray[np.float64]


class Round(NamedTuple):
    """One round: Δθ_i of all clients, and their gradients at the round's initial model, one row
    per client.
    """

    number: int
    updates: Tensor
    gradients: Tensor


def separation(tables: Tables, clients: Clients | None, device: str) -> StudyResult:
    """By round, for updates and for gradients: the gap g(α), whether it is above 0, and whether the
    best bipartition keeps every group together. The last two are 0 or 100, so that the mean over
    seeds is a percentage.
    """
    assert clients is not None
    experiment = experiment_file.experiment(tables)
    if clients.groups is None:
        raise InvalidInputError(
            f"partition.name = '{clients.partition}': has no true groups. Use a partition with"
            " groups, such as label_swap.",
            "partition.name",
        )
    groups, rows = clients.groups.numpy(), []
    for number, *vector_sets in rounds(experiment, clients, device):
        row: dict[str, Any] = {"round": number}
        for name, vectors in zip(("updates", "gradients"), vector_sets, strict=True):
            similarity = cosine(vectors).cpu().numpy()
            gap = separation_gap(similarity, groups)
            row |= {
                f"gap {name}": gap,
                f"separated {name}": 100.0 * (gap > 0),
                f"right {name}": 100.0 * keeps_whole(similarity, groups),
            }
        rows.append(row)
    return StudyResult(rows)


def two_clients(tables: Tables, clients: Clients | None, device: str) -> StudyResult:
    """By round: the cosine of the two clients' updates, and the lengths ‖mean Δθ‖ and max ‖Δθ_i‖ in
    percent of the longest update of the first three rounds (the scale of `CFL`).
    """
    assert clients is not None
    experiment = experiment_file.experiment(tables)
    require(len(clients) == 2, "partition.clients", len(clients), "this study needs 2 clients")
    share = clients.sizes / clients.sizes.sum()
    all_updates = (made.updates for made in rounds(experiment, clients, device, gradients=False))
    rows = norms_by_round(all_updates, share)
    return StudyResult(rows, (norms_panel(rows),))


def norms_by_round(all_updates: Iterable[Tensor], share: Tensor) -> list[dict[str, Any]]:
    """The rows of `two_clients` from the updates (2, P) of each round, and the clients' weights."""
    rows: list[dict[str, Any]] = []
    for number, updates in enumerate(all_updates, start=1):
        mean = share.to(updates) @ updates
        rows.append(
            {
                "round": number,
                "cosine": float(cosine(updates)[0, 1]),
                "mean": float(update_norms(mean[None])),
                "longest": float(update_norms(updates).max()),
            }
        )
    scale = max(row["longest"] for row in rows[:WARM_UP]) / 100
    return [row | {name: row[name] / scale for name in ("mean", "longest")} for row in rows]


def norms_panel(rows: list[dict[str, Any]]) -> Panel:
    """The lengths of the mean and of the longest update by round, with at most 60 points a line."""
    step = max(1, len(rows) // 60)
    shown = [*rows[:-1:step], rows[-1]]
    numbers = tuple(float(row["round"]) for row in shown)
    series = tuple(
        Series(name, numbers, tuple(row[key] for row in shown))
        for name, key in (("‖mean Δθ‖", "mean"), ("max ‖Δθ_i‖", "longest"))
    )
    return Panel("norms of updates", "lines", "round", "% of the first rounds' largest", series)


def rounds(
    experiment: Experiment, clients: Clients, device: str, gradients: bool = True
) -> Iterator[Round]:
    """Rounds of FedAvg with all clients, without splits. If `gradients` is False, the gradients are
    empty.
    """
    seed = experiment.run.seed
    fed, everyone = (
        Simulator(clients, device=device, **experiment.engine.simulator_options()),
        torch.arange(len(clients)),
    )
    module = module_for(experiment.model, clients.metadata, seed, experiment.local.loss)
    objective = Objective(module.to(fed.device), experiment.local.loss_for(None))
    model = stack([objective.params()])
    for number in range(1, experiment.run.rounds + 1):
        assignment, key = (
            ModelAssignment.all_same(model, len(everyone)),
            fold_in(seed, "round", number),
        )
        trained = fed.map(
            sgd(experiment.local.training(objective, number, experiment.run.rounds)),
            everyone,
            per_client=assignment,
            key=key,
        ).outputs
        slopes = (
            flatten(fed.map(gradient(objective), everyone, per_client=assignment, key=key).outputs)
            if gradients
            else torch.empty(0)
        )
        yield Round(number, flatten(trained) - flatten(model), slopes)
        model = mix_models(clients.sizes[None], trained)


@lru_cache(maxsize=4)
def gradient(objective: Objective) -> Program:
    """The gradient of the loss, summed over all examples of a client, at the client's model."""

    def start(shared: Tree, mine: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return mine, tree_map(torch.zeros_like, mine)

    def step(shared: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        return objective.add_scaled_gradient(carry, batch.examples, const, batch)

    def finish(shared: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return carry, None

    return Program(start, step, finish, Batches.whole(), "gradient")


def keeps_whole(similarity: Similarity, groups: NDArray[np.integer[Any]]) -> bool:
    """Whether CFL's bipartition (Algorithm 1) has every group on one side."""
    side, _ = bipartition(similarity)
    return all(len(set(side[groups == group])) == 1 for group in set(groups.tolist()))


@dataclass(frozen=True)
class Directions:
    """k (`groups`) random gradients that add up to 0, as at a stationary point of federated
    learning. `members` clients have the same gradient, each plus random noise that is γ times as
    long as the gradient. The study measures each γ of `noises` with `draws` draws.
    """

    groups: int = 4
    noises: tuple[float, ...] = (0.1, 0.5, 1.0)
    members: int = 3
    dimensions: int = 100
    draws: int = 1000

    def __post_init__(self) -> None:
        for name, minimum in (("groups", 2), ("members", 1), ("dimensions", 1), ("draws", 1)):
            require_int(f"study.{name}", getattr(self, name), minimum)
        allowed = "must have a number, and none below 0"
        valid = len(self.noises) > 0 and min(self.noises) >= 0
        require(valid, "study.noises", self.noises, allowed)

    def bound(self) -> float:
        """The γ below which every bipartition is correct (CFL's Theorem 1): sin(π / (4 (k − 1))).

        k gradients that add up to 0 can be split so that the angle between the two sides is at
        least π/(k−1). Noise rotates a vector by at most arcsin γ. So the angle between clients with
        the same gradient is at most 2 arcsin γ, and between the two sides it is more than
        π/(k−1) − 2 arcsin γ.
        """
        return math.sin(math.pi / (4 * (self.groups - 1)))

    def draw(
        self, noise: float, rng: np.random.Generator
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The gradients with this γ, one row per client, and the group of each client."""
        gradients = rng.standard_normal((self.groups, self.dimensions))
        gradients -= gradients.mean(0)
        groups = np.repeat(np.arange(self.groups), self.members)
        errors = rng.standard_normal((len(groups), self.dimensions))
        lengths = np.linalg.norm(gradients, axis=1)[groups] / np.linalg.norm(errors, axis=1)
        return gradients[groups] + noise * lengths[:, None] * errors, groups


def noisy_directions(tables: Tables, clients: Clients | None, device: str) -> StudyResult:
    """For each γ of `Directions`, the percentage of draws with a gap g(α) above 0 ("separated"),
    and of draws in which the bipartition divides no group ("right"); and the γ below which the
    theorem guarantees both ("bound").
    """
    setting = experiment_file.build(Directions, tables.get("study", {}), "study")
    row: dict[str, Any] = {"round": 1, "bound": setting.bound()}
    for noise in setting.noises:
        rng = np.random.default_rng(tables["run"]["seed"])
        separated = right = 0
        for _ in range(setting.draws):
            gradients, groups = setting.draw(noise, rng)
            similarity = cosine(torch.from_numpy(gradients)).numpy()
            separated += separation_gap(similarity, groups) > 0
            right += keeps_whole(similarity, groups)
        row[f"separated {noise}"] = 100 * separated / setting.draws
        row[f"right {noise}"] = 100 * right / setting.draws
    shares = tuple(
        Series(name, setting.noises, tuple(row[f"{key} {noise}"] for noise in setting.noises))
        for key, name in (("separated", "g(α) > 0"), ("right", "bipartition right"))
    )
    limit = Series("Theorem 1: always, left of this", (row["bound"],) * 2, (0.0, 100.0))
    panel = Panel("share of draws", "lines", "noise γ", "%", (limit, *shares))
    return StudyResult([row], (panel,))
