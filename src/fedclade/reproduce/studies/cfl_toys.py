"""The toys of the CFL paper: clients whose data no single model fits (Figure 1), and the path of
federated learning in two parameters (Figure 2).

Sattler et al., arXiv 1910.01991.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedclade.data.datasets import from_arrays
from fedclade.data.federated_dataset import Clients
from fedclade.errors import require_int
from fedclade.methods import CFL, METHODS
from fedclade.models import Logistic
from fedclade.reproduce.panels import Panel, Series, StudyResult
from fedclade.reproduce.studies.cfl_tree import ClientUpdates, record
from fedclade.reproduce.studies.cfl_updates import norms_by_round, norms_panel
from fedclade.training import experiment_file
from fedclade.training.config import EngineConfig, LocalConfig, TrainingConfig
from fedclade.training.runner import TrainingRun

Tables = dict[str, dict[str, Any]]
Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
SHOWN = 60  # points of a label of a group in the picture
SIDE = 1.6  # the picture shows −SIDE to SIDE


@dataclass(frozen=True)
class Toy:
    """Two groups of clients with points in the plane and two labels, and a linear classifier.

    "xor": the labels of four clouds of points are an XOR; a group has the left or the right two.
    "conditionals": both groups have the same points, and their labels depend on different
    coordinates.
    """

    kind: Literal["xor", "conditionals"] = "xor"
    method: Literal["fedavg", "cfl", "oracle"] = "fedavg"
    members: int = 5
    points: int = 100
    rounds: int = 60

    def __post_init__(self) -> None:
        for name in ("members", "points", "rounds"):
            require_int(f"study.{name}", getattr(self, name), 1)

    def draw(self, group: int, rng: np.random.Generator) -> tuple[Floats, Labels]:
        """The points and labels of a client."""
        if self.kind == "xor":
            upper = rng.integers(0, 2, self.points)
            center = np.stack([np.full(self.points, 2 * group - 1), 2 * upper - 1], 1)
            x = 0.8 * center + rng.normal(0, 0.2, (self.points, 2))
            return x, upper if group == 0 else 1 - upper
        x = rng.uniform(-1, 1, (self.points, 2))
        x += 0.15 * np.sign(x)  # no point is near a border
        return x, (x[:, group] > 0).astype(np.int64)

    def clients(self, seed: int) -> Clients:
        rng = np.random.default_rng(seed)
        groups = np.repeat([0, 1], self.members)
        parts = [(*self.draw(group, rng), *self.draw(group, rng)) for group in groups.tolist()]
        return from_arrays(
            [(x.astype(np.float32), y, u.astype(np.float32), v) for x, y, u, v in parts],
            groups.tolist(),
        )


def toy(tables: Tables, clients: Clients | None, device: str) -> StudyResult:
    """The accuracy and the number of models of a method on a `Toy`, and the borders that its models
    draw.
    """
    setting = experiment_file.build(Toy, tables.get("study", {}), "study")
    seed = tables["run"]["seed"]
    clients = setting.clients(seed)
    result = TrainingRun(
        METHODS[setting.method](),
        clients,
        Logistic(),
        LocalConfig(lr=0.2, batch_size=20, epochs=3),
        TrainingConfig(rounds=setting.rounds, clients_per_round=1.0, seed=seed, eval_every=0),
        EngineConfig(),
        device,
    ).run()
    rng = np.random.default_rng(seed)
    series = []
    for group in (0, 1):
        x, y = setting.draw(group, rng)
        for label in (0, 1):
            shown = x[y == label][:SHOWN]
            name = f"group {group + 1}, label {label}"
            series.append(Series(name, *_coordinates(shown)))
    found = result.clusters.tolist()
    for number, cluster in enumerate(sorted(set(found)), start=1):
        ends = np.array(border(result.model_of(found.index(cluster))))
        if len(ends) == 2:
            name = f"border of model {number}"
            series.append(Series(name, *_coordinates(ends), connect=True))
    accuracy, models = result.summary["accuracy"], len(set(found))
    row = {"round": setting.rounds, "accuracy": accuracy, "models": models}
    panel = Panel(setting.kind, "points", "x₁", "x₂", tuple(series))
    return StudyResult([row], (panel,))


def border(model: nn.Module) -> list[tuple[float, float]]:
    """The two ends, inside the picture, of the line on which a linear classifier of two labels is
    undecided; fewer if the line does not cross the picture.
    """
    weight, bias = (value.detach().double().numpy() for value in model.parameters())
    (a, b), c = weight[1] - weight[0], float(bias[1] - bias[0])  # a x + b y + c = 0
    ends = []
    for edge in (-SIDE, SIDE):
        if b != 0 and abs(y := -(a * edge + c) / b) <= SIDE:
            ends.append((edge, float(y)))
        if a != 0 and abs(x := -(b * edge + c) / a) < SIDE:
            ends.append((float(x), edge))
    return ends


@dataclass(frozen=True)
class Plane:
    """Two clients with a linear regression of two parameters θ.

    If `congruent`, the inputs of a client have one direction, so that a whole line of θ minimizes
    its risk, and the two lines cross. If not, each client has one minimum, and they differ.
    """

    congruent: bool = True
    points: int = 50
    rounds: int = 60

    def __post_init__(self) -> None:
        for name in ("points", "rounds"):
            require_int(f"study.{name}", getattr(self, name), 1)

    @property
    def minima(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """A θ that minimizes the risk of each client."""
        return ((1.0, 1.0), (1.0, 1.0)) if self.congruent else ((1.5, 0.4), (0.4, 1.5))

    @property
    def directions(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The direction of each client's inputs in the congruent case."""
        return (1.0, 0.25), (0.25, 1.0)

    def clients(self, seed: int) -> Clients:
        rng = np.random.default_rng(seed)
        parts = []
        for minimum, direction in zip(self.minima, self.directions, strict=True):
            x = rng.standard_normal((self.points, 2))
            if self.congruent:
                x = x[:, :1] * direction
            y = x @ minimum
            parts.append((x.astype(np.float32), y.astype(np.float32)[:, None]))
        return from_arrays(parts)


def plane(tables: Tables, clients: Clients | None, device: str) -> StudyResult:
    """By round: the lengths of the mean and of the longest update, in percent of the longest of the
    first three rounds, and the cosine of the two updates. CFL that never splits is FedAvg.
    """
    setting = experiment_file.build(Plane, tables.get("study", {}), "study")
    seed = tables["run"]["seed"]
    clients = setting.clients(seed)
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, -1.0)
    _, made = record(
        TrainingRun(
            CFL(eps1=0.0),
            clients,
            model,
            LocalConfig(lr=0.05, batch_size=setting.points, epochs=5, loss="mse"),
            TrainingConfig(rounds=setting.rounds, clients_per_round=1.0, seed=seed, eval_every=0),
            EngineConfig(),
            device,
        ),
        lambda made, row, state: made,
    )
    rows = norms_by_round((last.updates for last in made), torch.tensor([0.5, 0.5]))
    return StudyResult(rows, (_paths(setting, made), norms_panel(rows)))


def _paths(setting: Plane, rounds: list[ClientUpdates]) -> Panel:
    """The path of the server's θ, and some of the clients' updates from it."""
    theta = np.array([made.start[0].tolist() for made in rounds])
    series = [Series("FedAvg", *_coordinates(theta), connect=True)]
    shown = sorted(
        {*(2**power - 1 for power in range(8)), len(rounds) - 1} & set(range(len(rounds)))
    )
    gap = np.full(2, np.nan)  # no line from the end of an update to the start of the next
    for client in (0, 1):
        steps = [
            point
            for number in shown
            for point in (
                theta[number],
                theta[number] + np.array(rounds[number].updates[client].tolist()),
                gap,
            )
        ]
        series.append(
            Series(
                f"updates of client {client + 1}", *_coordinates(np.array(steps[:-1])), connect=True
            )
        )
        minimum, direction = np.array(setting.minima[client]), setting.directions[client]
        across = np.array([-direction[1], direction[0]])
        line = [minimum - 1.5 * across, minimum + 1.5 * across] if setting.congruent else [minimum]
        series.append(
            Series(
                f"minima of client {client + 1}",
                *_coordinates(np.array(line)),
                connect=setting.congruent,
            )
        )
    return Panel("path", "points", "θ₁", "θ₂", tuple(series))


def _coordinates(points: Floats) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(points[:, 0].tolist()), tuple(points[:, 1].tolist())
