"""The parts of a finished run that an export needs."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from fedclade.analysis.export.onnx import samples_for
from fedclade.core.pytree import Tree
from fedclade.errors import InvalidInputError
from fedclade.io.file_names import safe_file_name
from fedclade.io.run_dir import RunDirectory, StoredModels
from fedclade.registry import REGISTRY
from fedclade.training import plot_data
from fedclade.training.result import load, with_weights


class FinishedRun:
    """A finished run as the export reads it. `module` is None if the run used the user's own module
    and `model` is None.
    """

    def __init__(self, folder: Path, model: nn.Module | None) -> None:
        if not folder.is_dir():
            raise InvalidInputError(f"export: no folder '{folder}'.", str(folder))
        if (folder / "comparison.json").exists() and not RunDirectory(folder).holds_run():
            inside = sorted(
                child.name for child in folder.iterdir() if RunDirectory(child).holds_run()
            )
            raise InvalidInputError(
                f"{folder}: contains several runs. Export one of them, for example"
                f" {folder / inside[0] if inside else folder}.",
                str(folder),
            )
        if not RunDirectory(folder).holds_run():
            raise InvalidInputError(
                f"{folder}: contains no run. Give a folder that 'fedclade run' wrote.", str(folder)
            )
        store = RunDirectory(folder)
        summary = store.summary()
        if summary is None:
            raise InvalidInputError(
                f"{folder}: the run is not finished (no summary.json). Continue it with --resume.",
                str(folder),
            )
        self.summary, self.tables, self.models = summary, store.tables(), StoredModels(folder)
        self.columns, self.features = (
            store.read_clients(summary["clients"]),
            plot_data.read(folder),
        )
        self.names, self.adapter = store.names(), store.adapter()
        known = model is not None or self.tables["model"]["name"] in REGISTRY["model"]
        self.module = load(folder, model).module if known else None

    @property
    def clients(self) -> int:
        return len(self.models.model_ids)

    @property
    def input_dtype(self) -> str | None:
        """float32, or int64 if the model has an embedding; None if the module is not known or takes
        several tensors.
        """
        if self.module is None or self.models.shape is None:
            return None
        return str(samples_for(self.module, self.models.shape, 1).dtype).removeprefix("torch.")

    def groups(self) -> list[tuple[str, int, list[int]]]:
        """Name, row and clients of each model. The name has the number of the cluster if each
        cluster has one model, else the number of the row.
        """
        rows, clusters = self.models.model_ids, self.models.clusters
        served: Tensor = rows >= 0
        if not bool(served.any()):
            raise InvalidInputError(
                "export: this run folder contains no model, because every model stayed with its"
                " client.",
                "run",
            )
        pairs = {
            (int(row), int(cluster))
            for row, cluster in zip(rows[served], clusters[served], strict=True)
        }
        one_to_one = (
            len(pairs) == len({row for row, _ in pairs}) == len({cluster for _, cluster in pairs})
        )
        groups = []
        for row in sorted(set(rows[served].tolist())):
            ids = (rows == row).nonzero().flatten().tolist()
            groups.append(
                (f"group-{int(clusters[ids[0]])}" if one_to_one else f"model-{row}", row, ids)
            )
        return self._named_by_client(groups)

    def state(self, row: int) -> Tree:
        """The state dict of one model; of an adapter only what it adds to the base model, under
        peft's names.
        """
        if self.adapter is not None:
            own = self.models.row(row)
            if own.keys() != self.adapter["keys"].keys():
                raise InvalidInputError(
                    "export: models/adapter.json has not the weights of models.safetensors. One of"
                    " the files is damaged.",
                    "run",
                )
            return {self.adapter["keys"][name]: value for name, value in own.items()}
        weights = self.models.fixed | self.models.row(row)
        return (
            weights
            if self.module is None
            else dict(with_weights(self.module, weights).state_dict())
        )

    def _named_by_client(
        self, models: list[tuple[str, int, list[int]]]
    ) -> list[tuple[str, int, list[int]]]:
        """The same models. If each has one client and clients have names, the model has the
        client's name, as far as a folder can have it.
        """
        if self.names.clients is None or any(len(ids) != 1 for _, _, ids in models):
            return models
        folders = [safe_file_name(self.names.client(ids[0])) for _, _, ids in models]
        if len({folder.lower() for folder in folders}) < len(folders):
            return models  # some disks do not distinguish "North" and "north"
        return [(folder, row, ids) for folder, (_, row, ids) in zip(folders, models, strict=True)]
