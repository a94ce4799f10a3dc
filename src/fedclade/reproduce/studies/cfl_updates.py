"""Updates and gradients of clients before CFL's first split: their similarities and lengths. All
clients train one model with FedAvg.

Sattler et al., arXiv 1910.01991. α_ij = cos(Δθ_i, Δθ_j); g(α) = α_intra^min − α_cross^max over the
true groups. If it is above 0, every bipartition is correct.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
from fedclade.reproduce.panels import StudyResult
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
    rows: list[dict[str, Any]] = []
    for number, updates, _ in rounds(experiment, clients, device, gradients=False):
        share = (clients.sizes / clients.sizes.sum()).to(updates)
        mean, longest = (
            float(update_norms((share @ updates)[None])),
            float(update_norms(updates).max()),
        )
        rows.append(
            {
                "round": number,
                "cosine": float(cosine(updates)[0, 1]),
                "mean": mean,
                "longest": longest,
            }
        )
    scale = max(row["longest"] for row in rows[:WARM_UP]) / 100
    return StudyResult(
        [row | {name: row[name] / scale for name in ("mean", "longest")} for row in rows]
    )


def rounds(
    experiment: Experiment, clients: Clients, device: str, gradients: bool = True
) -> Iterator[Round]:
    """Rounds of FedAvg with all clients, without splits. If `gradients` is False, the gradients are
    empty.
    """
    seed = experiment.run.seed
    fed, everyone = (
        Simulator(clients, device=device, **asdict(experiment.engine)),
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
    learning. `members` clients have the same gradient, each plus random noise that is γ (`noise`)
    times as long as the gradient.
    """

    groups: int = 4
    noise: float = 0.1
    members: int = 5
    dimensions: int = 100
    draws: int = 1000

    def __post_init__(self) -> None:
        for name, minimum in (("groups", 2), ("members", 1), ("dimensions", 1), ("draws", 1)):
            require_int(f"study.{name}", getattr(self, name), minimum)
        require(self.noise >= 0, "study.noise", self.noise, "must be at least 0")

    def bound(self) -> float:
        """The γ below which every bipartition is correct: sin(π / (4 (k − 1))).

        k gradients that add up to 0 can be split so that the angle between the two sides is at
        least π/(k−1). Noise rotates a vector by at most arcsin γ. So the angle between clients with
        the same gradient is at most 2 arcsin γ, and between the two sides it is more than
        π/(k−1) − 2 arcsin γ.
        """
        return math.sin(math.pi / (4 * (self.groups - 1)))

    def draw(self, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The gradients, one row per client, and the group of each client."""
        gradients = rng.standard_normal((self.groups, self.dimensions))
        gradients -= gradients.mean(0)
        groups = np.repeat(np.arange(self.groups), self.members)
        noise = rng.standard_normal((len(groups), self.dimensions))
        lengths = np.linalg.norm(gradients, axis=1)[groups] / np.linalg.norm(noise, axis=1)
        return gradients[groups] + self.noise * lengths[:, None] * noise, groups


def noisy_directions(tables: Tables, clients: Clients | None, device: str) -> StudyResult:
    """The percentage of draws of `Directions` in which the bipartition keeps every group
    together.
    """
    setting = experiment_file.build(Directions, tables.get("study", {}), "study")
    rng = np.random.default_rng(tables["run"]["seed"])
    right = 0
    for _ in range(setting.draws):
        gradients, groups = setting.draw(rng)
        right += keeps_whole(cosine(torch.from_numpy(gradients)).numpy(), groups)
    return StudyResult([{"round": 1, "right": 100 * right / setting.draws}])
