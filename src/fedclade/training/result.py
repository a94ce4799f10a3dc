"""The result of a run that has just ended or is read from its folder."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fedclade.core.losses import LOSSES, LossName
from fedclade.core.names import NO_NAMES, Names, client_number
from fedclade.core.notebook_html import html_table
from fedclade.core.pytree import Tree
from fedclade.data.column_encoding import ColumnEncoding
from fedclade.data.encoding import Encoding, encoding_from_json
from fedclade.data.image_encoding import ImageEncoding
from fedclade.data.table_columns import read_frame
from fedclade.data.text_encoding import TextEncoding
from fedclade.engines.oom import is_out_of_memory
from fedclade.engines.profiler import Profile
from fedclade.errors import InvalidInputError
from fedclade.io import safe_read
from fedclade.io.run_dir import RunDirectory, StoredModels
from fedclade.io.schemas import RoundRecord, Summary
from fedclade.methods.base import Method
from fedclade.registry import REGISTRY
from fedclade.training import plot_data
from fedclade.training.personal_layer import needs_neighbors, with_neighbors
from fedclade.training.plot_data import ClientFeatures
from fedclade.training.prediction import PredictionKind, TaskSpec, least_loss, outputs_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from fedclade.analysis.export import Exported


class ClientModels(Protocol):
    """The models of a finished run, in memory or on disk."""

    @property
    def model_ids(self) -> Tensor:
        """(clients,) the row of each client's model; -1: none."""

    def weights_of(self, client: int) -> Tree | None:
        """The weights of this client's model, or None where it has none."""


@dataclass(frozen=True, eq=False)
class FinalModels:
    """The models with which a run ended, on the CPU, and which of them each client uses."""

    models: Tree  # a row for each model
    model_ids: Tensor  # (clients,) the row of each client; -1: none
    # (clients,) whether the client alone has its model, or a part of it
    kept_by_client: Tensor
    shared: Tree = field(default_factory=dict)  # what is the same in all models

    def weights_of(self, client: int) -> Tree | None:
        if self.kept_by_client[client]:
            raise InvalidInputError(
                "model: these clients have personal models, which the run has not stored: each site"
                " has them on its disk, or they are too large together.",
                "model",
            )
        row = int(self.model_ids[client])
        if row < 0:
            return None
        return self.shared | {name: value[row] for name, value in self.models.items()}


@dataclass(frozen=True, eq=False)
class ReportInputs:
    """What a report reads from a run folder in addition to the fields of `Result`."""

    tables: dict[str, dict[str, Any]]
    features: ClientFeatures


@dataclass(frozen=True)
class Result:
    """The outcome of a run. It can be pickled and sent to another process.

    Attributes:
        summary: The numbers over all clients.
        history: One record for each round.
        clusters: The cluster of each client, in the order of `clients["client"]`; -1 where it has
            none yet. `groups` is the same by name.
        clients: A column of per-client values for each name, as in clients.csv. The column
            "client" has the names of the clients, or their numbers.
        folder: The run directory, None for a run that wrote none.
        already_finished: Whether a resumed run had nothing left to do.
        profile: Where the time went, for a run with `profile=True`; printed, a table.
        names: The names of clients, classes and features, where the data have them.
        encoding: How rows of a table, texts or images become inputs; None for other data.
        task: What the models read and predict.

    Example:
        >>> import fedclade as fc
        >>> clients = fc.data.partition(fc.data.load("digits"), fc.data.Iid(), clients=4)
        >>> result = fc.run(fc.FedAvg(), clients, fc.models.MLP(8), rounds=1)
        >>> result.groups
        {0: [0, 1, 2, 3]}
        >>> result.predict(clients.arrays(2)[2], client=2).shape == clients.arrays(2)[3].shape
        True
    """

    summary: Summary
    history: list[RoundRecord]
    clusters: Tensor
    clients: dict[str, list[Any]] = field(repr=False)
    module: nn.Module = field(repr=False)
    models: ClientModels = field(repr=False)
    task: TaskSpec = field(repr=False)
    folder: Path | None = None
    already_finished: bool = False
    profile: Profile | None = None
    report_inputs: ReportInputs | None = field(default=None, repr=False)  # None: read `folder`
    names: Names = field(default=NO_NAMES, repr=False)
    encoding: Encoding | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        accuracy = self.summary["accuracy"]
        score = f", accuracy {accuracy:.2f} %" if accuracy is not None else ""
        return (
            f"Result({self.summary['method']}, {self.summary['clients']} clients,"
            f" {self.summary['clusters']} groups{score})"
        )

    def _repr_html_(self) -> str:
        """The result in a notebook."""
        summary = self.summary
        rows: dict[str, object] = {
            "data": f"{summary['dataset']}, {summary['partition']}",
            "clients": f"{summary['clients']:,}",
            "groups": summary["clusters"],
            "rounds": summary["rounds"],
        }
        if summary["accuracy"] is not None:
            rows["accuracy"] = f"{summary['accuracy']:.2f} ± {summary['accuracy_stderr']:.2f} %"
            rows["worst tenth"] = f"{summary['accuracy_worst10']:.2f} %"
        elif summary.get("loss") is not None:
            rows["loss"] = f"{summary['loss']:.4f}"
        up, down = summary["bytes_up"] / 1e6, summary["bytes_down"] / 1e6
        rows |= {"MB up, down": f"{up:.1f}, {down:.1f}", "seconds": f"{summary['seconds']:.1f}"}
        if self.folder is not None:
            rows["folder"] = self.folder
        return html_table(f"Result of {summary['method']}", rows)

    def model_of(self, client: int | str) -> nn.Module:
        """The model that a client uses: a plain module in evaluation mode, ready to predict.

        Args:
            client: The client's name or number.
        """
        number = client_number(client, self.clients["client"])
        weights = self.models.weights_of(number)
        if weights is None:
            reason = (
                "its model is its own and stays at its site, which has it on its disk"
                if int(self.clusters[number]) >= 0
                else "it has no model, because it has not answered yet and its group is not known"
            )
            raise InvalidInputError(f"client = {client!r}: {reason}.", "client")
        return with_weights(self.module, weights)

    @property
    def groups(self) -> dict[int, list[int | str]]:
        """The names (or numbers) of the clients of each cluster; -1 has those without a cluster."""
        members: dict[int, list[int | str]] = {}
        for client, cluster in zip(self.clients["client"], self.clusters.tolist(), strict=True):
            members.setdefault(cluster, []).append(client)
        return dict(sorted(members.items()))

    def cluster_of(self, client: int | str) -> int:
        """The cluster of a client; -1 where it has none yet.

        Args:
            client: The client's name or number.
        """
        return int(self.clusters[client_number(client, self.clients["client"])])

    def predict(
        self,
        x: object,
        client: int | str | None = None,
        *,
        labeled: tuple[object, object] | None = None,
        kind: PredictionKind = "label",
    ) -> Tensor:
        """Predict new rows by the model of a client, or of the group that a new client would join.

        Args:
            x: The rows, in the form of the training inputs: an array, or a tuple or dictionary of
                arrays. In place of them a data frame with the columns of the training table, a
                list of texts, or a list of paths of images, if the training data were such.
            client: The name or number of a client of the run.
            labeled: In place of `client`, for a client that was not in the run: a pair (x, y) of a
                few of its rows with targets, see `closest_client`.
            kind: "label" for classes, or numbers in a regression; "probability" for the
                probability of each class; "output" for the outputs of the model.

        Returns:
            A tensor with one row for each row of `x`. Class c has the name `names.classes[c]`.
        """
        if (client is None) == (labeled is None):
            raise InvalidInputError(
                "client: give client=… for a client of the run, or labeled=(x, y) for a new one.",
                "client",
            )
        self.task.check_kind(kind)
        rows = self.task.inputs(self._encoded(x, client))
        if labeled is not None:
            client = self.closest_client(*labeled)
        assert client is not None
        return self.task.decode(outputs_of(self.model_of(client), rows), kind)

    def closest_client(self, x: object, y: object) -> int | str:
        """The client whose model has the least loss on a few labeled rows of a new client. If
        clients share models, it is the first client of the group that the new client would join.

        Args:
            x: The rows, as in `predict`.
            y: Their targets, as numbers.

        Returns:
            The name or number of the client, for `predict`, `model_of` and `cluster_of`.
        """
        inputs, targets = self.task.labeled(self._encoded(x, None), y)
        first: dict[int, int] = {}  # for each model, the first client that has it
        for number, row in enumerate(self.models.model_ids.tolist()):
            if row >= 0:
                first.setdefault(row, number)
        candidates = ((number, self.model_of(number)) for number in first.values())
        closest = least_loss(self.task, candidates, inputs, targets)
        if closest is None:
            raise InvalidInputError(
                "labeled: the run has no model here; personal models stay with their clients.",
                "labeled",
            )
        name: int | str = self.clients["client"][closest]
        return name

    def _encoded(self, x: object, client: int | str | None) -> object:
        """Inputs from a data frame, from texts or from paths of images; others as they are."""
        encoding = self.encoding
        if isinstance(encoding, ColumnEncoding) and hasattr(x, "columns"):
            return encoding.encode(read_frame(x), client if isinstance(client, str) else None)
        if isinstance(encoding, TextEncoding | ImageEncoding) and isinstance(x, list | tuple):
            raw = [os.fspath(value) for value in x if isinstance(value, str | os.PathLike)]
            if raw and len(raw) == len(x):
                return encoding.encode(raw)
        return x

    def to_frame(self) -> DataFrame:
        """The table of clients as a pandas DataFrame: a row for each client."""
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise InvalidInputError(
                f"to_frame: pandas is not installed ({error}); pip install 'fedclade[frame]'.",
                "to_frame",
            ) from error
        return DataFrame(self.clients)

    def report(self, out: str | os.PathLike[str]) -> Path:
        """Write this run as one HTML page that needs no network.

        Args:
            out: the file to write, such as "report.html".

        Returns:
            The path of the file.
        """
        from fedclade.analysis import report

        return report.write_report(self, out)

    def plot(self, figure: str | None = None) -> Figure:
        """Draw a figure of the report with matplotlib; a notebook shows it.

        Args:
            figure: The name of the figure; None for the first. An unknown name is an error that
                lists those of this run.

        Returns:
            The figure, for `savefig` or more drawing.
        """
        from fedclade.analysis.report import draw_figure

        return draw_figure(self, figure)

    def export(
        self,
        out: str | os.PathLike[str] | None = None,
        formats: Sequence[str] = ("safetensors", "onnx"),
    ) -> Exported:
        """Write every model with a model card, as `fc.export` does; for a run with a folder.

        Args:
            out: The folder to write, new or empty; None for export/ in the run's folder.
            formats: Any of "safetensors" and "onnx".

        Returns:
            The folder, the model cards, and what could not be written.
        """
        from fedclade.analysis.export import export

        return export(self, out, formats)

    def write_for_report(self, folder: Path) -> None:
        """Write what a report reads into this new folder, for a run that wrote no folder."""
        assert self.report_inputs is not None
        store = RunDirectory.open(folder, resume=False)
        store.begin(self.report_inputs.tables, self.history)
        features = self.report_inputs.features
        write_outcome(store, self.clients, features, self.summary, self.names)


def write_outcome(
    store: RunDirectory,
    clients: dict[str, list[Any]],
    features: ClientFeatures,
    summary: Summary,
    names: Names,
) -> None:
    """Write what a finished run has in addition to its models. The summary is last: it marks the
    end.
    """
    store.write_names(names)
    store.write_clients(clients)
    plot_data.write(store.folder, features)
    store.write_summary(summary)


def untrained(module: nn.Module, trained: Collection[str]) -> Tree:
    """The buffers and frozen weights of the module, which are in no row."""
    names = _names(module)
    return {
        name: value
        for name, value in module.state_dict().items()
        # of a tied weight only the first name, under which it is one value
        if names.get(name, name) == name and name not in trained
    }


def with_weights(module: nn.Module, weights: Tree) -> nn.Module:
    """A copy of the module, on the CPU and ready to predict, in which everything named in `weights`
    is replaced.
    """
    _check_form(module, weights)
    result = copy.deepcopy(module).cpu().eval()
    names, state = _names(result), result.state_dict()
    result.load_state_dict(
        {name: weights.get(names.get(name, name), value).cpu() for name, value in state.items()}
    )
    return result


def _check_form(module: nn.Module, weights: Tree) -> None:
    """Raise `InvalidInputError` unless the module has all of `weights`, in their shapes."""
    state = module.state_dict()
    for name, value in weights.items():
        if name not in state or state[name].shape != value.shape:
            shape = tuple(state[name].shape) if name in state else "none of that name"
            raise InvalidInputError(
                f"model: the run's '{name}' has shape {tuple(value.shape)}, the module given has"
                f" {shape}.",
                "model",
            )


def _names(module: nn.Module) -> dict[str, str]:
    """For each parameter the name under which it is trained: tied weights have several names and
    one value.
    """
    first = {id(value): name for name, value in module.named_parameters()}
    return {
        name: first[id(value)] for name, value in module.named_parameters(remove_duplicate=False)
    }


def load(folder: str | os.PathLike[str], model: nn.Module | None = None) -> Result:
    """Read a finished run.

    Args:
        folder: The run directory.
        model: A module of the same form, if the run trained a module of your own.

    Example:
        >>> import fedclade as fc
        >>> clients = fc.data.partition(fc.data.load("digits"), fc.data.Iid(), clients=4)
        >>> result = fc.run(fc.FedAvg(), clients, fc.models.MLP(8), rounds=1, out="runs/loaded")
        >>> fc.load("runs/loaded").summary["rounds"]
        1
    """
    path = Path(folder)
    if not path.is_dir():
        raise InvalidInputError(f"folder = '{path}': there is no such folder.", "folder")
    store, models = RunDirectory(path), StoredModels(path)
    summary = store.summary()
    if summary is None:
        raise InvalidInputError(
            f"{path}: the run has not ended (there is no summary.json); resume it with --resume.",
            str(path),
        )
    history, clients = store.history(), store.read_clients(summary["clients"])
    weights = models.fixed | models.row(0)
    module = model or _rebuilt(path, dict(store.tables()["model"]), models, weights)
    module = _served(dict(store.tables()["method"]), module, weights)
    # A module of another form is refused here, not at the first prediction.
    _check_form(module, weights)
    return Result(
        summary,
        history,
        models.clusters,
        clients,
        module,
        models,
        TaskSpec(models.shape, models.classes, _loss_name(store)),
        path,
        names=store.names(),
        encoding=store.encoding(encoding_from_json),
    )


def _served(table: dict[str, Any], module: nn.Module, weights: Tree) -> nn.Module:
    """The module with which the clients of a run predict, see `Method.served_module` and
    `PersonalLayer`.

    Args:
        table: the table [method] of the run.
        module: the run's model, or already the module of its clients.
        weights: the weights of a client.
    """
    method = REGISTRY["method"].get(table.pop("name"))
    if method is None or method.served_module is Method.served_module:
        return with_neighbors(module, weights) if needs_neighbors(module, weights) else module
    if weights.keys() <= module.state_dict().keys():
        return module
    try:
        served: nn.Module = method(**table).served_module(module, weights)
    except TypeError as error:
        raise InvalidInputError(
            f"experiment.toml: [method] cannot be read ({error}).", "method"
        ) from error
    return served


def _loss_name(store: RunDirectory) -> LossName:
    """The setting local.loss of a stored run; the default where it has none."""
    name = store.tables().get("local", {}).get("loss", "cross_entropy")
    for known in LOSSES:
        if name == known:
            return known
    raise InvalidInputError(
        f"{store.folder / 'experiment.toml'}: local.loss = {name!r}: must be one of"
        f" {', '.join(LOSSES)}.",
        "local.loss",
    )


def _rebuilt(folder: Path, table: dict[str, Any], models: StoredModels, weights: Tree) -> nn.Module:
    name = table.pop("name")
    if name not in REGISTRY["model"]:
        module = "such a module"
        if RunDirectory(folder).adapter() is not None:
            module = "the base model with an adapter of the same form (fc.models.from_transformers)"
        raise InvalidInputError(
            f"{folder}: the run used the model '{name}', which is not registered: give {module},"
            " load(…, model=…).",
            "model",
        )
    try:
        spec = REGISTRY["model"][name](**table)
        if models.shape is None or models.outputs is None:
            raise ValueError("the run has no shape of its inputs or no number of outputs")
        _check_size(spec, models, weights)
        built: nn.Module = spec.build(models.shape, models.outputs)
    except (TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise InvalidInputError(
            f"{folder / 'experiment.toml'}: [model] cannot be built ({error}): give a module,"
            " load(…, model=…).",
            "model",
        ) from error
    return built


def _check_size(spec: Any, models: StoredModels, weights: Tree) -> None:
    """Refuse to build another model than the run's, or one that the machine cannot hold."""
    try:
        with torch.device("meta"):  # the module's shapes, without its memory
            module = spec.build(models.shape, models.outputs)
    except RuntimeError:
        # build() inspects tensor values, which meta tensors do not have; no model of the package
        # does that
        return
    if any(
        weights[name].shape != value.shape
        for name, value in module.named_parameters()
        if name in weights
    ):
        raise ValueError("it is not the run's model")
    # layers that stay with clients are not in the run
    safe_read.fit("it", sum(value.nbytes for value in module.parameters()))
