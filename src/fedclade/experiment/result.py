"""What a run gives back, whether it has just ended or is read from its folder."""

from __future__ import annotations

import copy
import json
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedclade.client.tree import Tree
from fedclade.errors import InvalidInput
from fedclade.experiment.store import RunStore, StoredModels
from fedclade.registry import REGISTRY


@dataclass(frozen=True)
class Result:
    """summary: the numbers over all clients; history: a row a round; clusters: the cluster of each client (-1: none yet);
    clients: a column of per-client values for each name, as in clients.csv."""

    summary: dict[str, Any]
    history: list[dict[str, Any]]
    clusters: Tensor
    clients: dict[str, list[Any]] = field(repr=False)
    module: nn.Module = field(repr=False)
    row_of: Callable[[int], Tree | None] = field(repr=False)
    folder: Path | None = None
    already_finished: bool = False  # a resumed run that had nothing left to do

    def model_of(self, client: int) -> nn.Module:
        """The model this client uses: a plain module in evaluation mode, ready to predict."""
        if not 0 <= client < len(self.clusters):
            raise InvalidInput(f"client {client}: there are {len(self.clusters)}, numbered 0 to {len(self.clusters) - 1}.")
        weights = self.row_of(client)
        if weights is None:
            raise InvalidInput(f"client {client} has no model: it has not answered yet, so its cluster is not known.")
        module = copy.deepcopy(self.module).cpu().eval()
        module.load_state_dict({name: value.cpu() for name, value in weights.items()}, strict=False)
        return module


def load(folder: str | os.PathLike[str], model: nn.Module | None = None) -> Result:
    """Read a finished run. `model`: a module of the same form, where the run was made with a module of your own."""
    path = Path(folder)
    if not path.is_dir():
        raise InvalidInput(f"load: there is no folder '{path}'.")
    store, models = RunStore(path), StoredModels(path)
    summary = store.summary()
    if summary is None:
        raise InvalidInput(f"{path}: the run has not ended (there is no summary.json); resume it with --resume.")
    history = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    clients = store.read_clients()

    def row_of(client: int) -> Tree | None:
        row = int(models.assignment[client])
        return models.row(row) if row >= 0 else None

    return Result(summary, history, models.clusters, clients, model or _rebuilt(path, models), row_of, path)


def _rebuilt(folder: Path, models: StoredModels) -> nn.Module:
    table = dict(tomllib.loads((folder / "experiment.toml").read_text())["model"])
    name = table.pop("name")
    if name not in REGISTRY["model"]:
        raise InvalidInput(f"{folder}: the run used the model '{name}', which is not registered: give such a module, load(…, model=…).")
    module: nn.Module = REGISTRY["model"][name](**table).build(models.shape, models.classes)
    return module
