"""What a run gives back, whether it has just ended or is read from its folder."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedclade.core.pytree import Tree
from fedclade.engines.oom import is_out_of_memory
from fedclade.engines.profiler import Profile
from fedclade.errors import InvalidInputError
from fedclade.io import safe_read
from fedclade.io.run_dir import RunDirectory, StoredModels
from fedclade.registry import REGISTRY


@dataclass(frozen=True)
class Result:
    """summary: the numbers over all clients; history: a row a round; clusters: the cluster of each
    client (-1: none yet); clients: a column of per-client values for each name, as in
    clients.csv.
    """

    summary: dict[str, Any]
    history: list[dict[str, Any]]
    clusters: Tensor
    clients: dict[str, list[Any]] = field(repr=False)
    module: nn.Module = field(repr=False)
    weights_of: Callable[[int], Tree | None] = field(repr=False)
    folder: Path | None = None
    already_finished: bool = False  # a resumed run that had nothing left to do
    profile: Profile | None = None  # where the time went, if it was asked for; printed, a table
    describe: Callable[[Path], None] | None = field(
        default=None, repr=False
    )  # writes what a report reads; None: it is in `folder`

    def __repr__(self) -> str:
        accuracy = self.summary["accuracy"]
        score = f", accuracy {accuracy:.2f} %" if accuracy is not None else ""
        return (
            f"Result({self.summary['method']}, {self.summary['clients']} clients,"
            f" {self.summary['clusters']} clusters{score})"
        )

    def model_of(self, client: int) -> nn.Module:
        """The model this client uses: a plain module in evaluation mode, ready to predict."""
        client = int(client)
        if not 0 <= client < len(self.clusters):
            raise InvalidInputError(
                f"client {client}: there are {len(self.clusters)}, numbered 0 to"
                f" {len(self.clusters) - 1}."
            )
        weights = self.weights_of(client)
        if weights is None:
            raise InvalidInputError(
                f"client {client} has no model: it has not answered yet, so its cluster is not"
                " known."
            )
        return with_weights(self.module, weights)

    def report(self, out: str | os.PathLike[str]) -> Path:
        """Write this run as one HTML page that needs no network, and give its path."""
        from fedclade.analysis import report

        if self.folder is not None:
            return report.write_report([self.folder], Path(out))
        assert self.describe is not None
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / str(self.summary["method"])
            self.describe(run)
            return report.write_report([run], Path(out))


def untrained(module: nn.Module, trained: Collection[str]) -> Tree:
    """Buffers and frozen weights: what belongs to the model and is in no row."""
    names = _names(module)
    return {
        name: value
        for name, value in module.state_dict().items()
        if names.get(name, name) not in trained
    }


def with_weights(module: nn.Module, weights: Tree) -> nn.Module:
    """A copy of the module, on the CPU and ready to predict, in which everything named in `weights`
    is replaced.
    """
    result = copy.deepcopy(module).cpu().eval()
    names, state = _names(result), result.state_dict()
    for name, value in weights.items():
        if name not in state or state[name].shape != value.shape:
            found = tuple(state[name].shape) if name in state else "none of that name"
            raise InvalidInputError(
                f"model: the run's '{name}' has shape {tuple(value.shape)}, the module given has"
                f" {found}."
            )
    result.load_state_dict(
        {name: weights.get(names.get(name, name), value).cpu() for name, value in state.items()}
    )
    return result


def _names(module: nn.Module) -> dict[str, str]:
    """For each parameter the name under which it is trained: tied weights have several names and
    one value.
    """
    first = {id(value): name for name, value in module.named_parameters()}
    return {
        name: first[id(value)] for name, value in module.named_parameters(remove_duplicate=False)
    }


def load(folder: str | os.PathLike[str], model: nn.Module | None = None) -> Result:
    """Read a finished run. `model`: a module of the same form, where the run was made with a module
    of your own.
    """
    path = Path(folder)
    if not path.is_dir():
        raise InvalidInputError(f"load: there is no folder '{path}'.")
    store, models = RunDirectory(path), StoredModels(path)
    summary = store.summary()
    if summary is None:
        raise InvalidInputError(
            f"{path}: the run has not ended (there is no summary.json); resume it with --resume."
        )
    history, clients = store.history(), store.read_clients(summary["clients"])
    weights = models.fixed | models.row(0)
    module = model or _rebuilt(path, dict(store.tables()["model"]), models, weights)
    with_weights(
        module, weights
    )  # a module of another form is refused here, not at the first prediction

    def row_of(client: int) -> Tree | None:
        row = int(models.assignment[client])
        return models.fixed | models.row(row) if row >= 0 else None

    return Result(summary, history, models.clusters, clients, module, row_of, path)


def _rebuilt(folder: Path, table: dict[str, Any], models: StoredModels, weights: Tree) -> nn.Module:
    name = table.pop("name")
    if name not in REGISTRY["model"]:
        raise InvalidInputError(
            f"{folder}: the run used the model '{name}', which is not registered: give such a"
            " module, load(…, model=…)."
        )
    try:
        spec = REGISTRY["model"][name](**table)
        _check_size(spec, models, weights)
        module: nn.Module = spec.build(models.shape, models.classes)
    except (TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise InvalidInputError(
            f"{folder / 'experiment.toml'}: [model] cannot be built ({error}): give a module,"
            " load(…, model=…)."
        ) from error
    return module


def _check_size(spec: Any, models: StoredModels, weights: Tree) -> None:
    """Refuse to build another model than the run's, or one that the machine cannot hold."""
    try:
        with torch.device("meta"):  # a module of the size that the file tells, without its memory
            told = spec.build(models.shape, models.classes)
    except RuntimeError:
        # whoever builds it looks at values, which there are none of; a model of the package never
        # does
        return
    if any(
        weights[key].shape != value.shape
        for key, value in told.named_parameters()
        if key in weights
    ):
        raise ValueError("it is not the run's model")
    safe_read.fit(
        "it", sum(value.nbytes for value in told.parameters())
    )  # layers that stay with clients are not in the run
