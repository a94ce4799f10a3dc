"""A run as a run of MLflow: settings as parameters, rounds as metrics, files as artifacts; during
the run, or afterwards from its folder.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fedclade.errors import FedcladeError, FedcladeWarning, InvalidInputError
from fedclade.io import safe_read, schemas
from fedclade.io.atomic import write_text
from fedclade.io.run_dir import RunDirectory
from fedclade.io.schemas import RoundRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_ID_FILE = "mlflow.json"
EXPERIMENT = "fedclade"  # the experiment of MLflow, unless MLFLOW_EXPERIMENT_NAME is set
MAX_METRICS, MAX_PARAMS = 1000, 100  # of one request to MLflow
MAX_VALUE = 500  # characters of a parameter
FILES = (
    "experiment.toml",
    "rounds.jsonl",
    "clients.csv",
    "summary.json",
    "names.json",
    "encoding.json",
)


def check_installed(option: str) -> None:
    """Raise `InvalidInputError` if MLflow is not installed.

    Args:
        option: the option that needs it.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise InvalidInputError(
            f"{option} mlflow: MLflow is not installed. Install it with: pip install"
            " 'fedclade[mlflow]'",
            option,
        )


class MlflowTracker:
    """A context manager around a run. It connects at its start, so that an unreachable server is an
    error before the training; later problems are a warning, and the run continues.

    MLflow's variables select the server and the experiment: MLFLOW_TRACKING_URI and
    MLFLOW_EXPERIMENT_NAME.

    Args:
        folder: the run directory. Its mlflow.json has the id of MLflow's run, which a resumed run
            continues.
        option: the option in messages.
    """

    def __init__(self, folder: Path, option: str = "--track") -> None:
        self.folder, self.option = folder, option
        self.run_id: str | None = None
        self._logged: set[tuple[str, int]] = set()  # names and rounds of metrics
        self._failed = False

    def __enter__(self) -> Self:
        return self.connect()

    def connect(self) -> Self:
        """Find the experiment at MLflow. That fails if MLflow cannot be reached."""
        # MLflow reads these when it is imported: fedclade reports nothing to third parties, and
        # --quiet prints nothing. A user may set them otherwise.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            self.client: MlflowClient = MlflowClient()
            self.experiment_id = self._experiment()
        except (MlflowException, OSError, ImportError) as error:
            raise InvalidInputError(
                f"{self.option} mlflow: MLflow cannot be used ({_first_line(error)}). Start a"
                " server and set MLFLOW_TRACKING_URI, such as http://127.0.0.1:5000.",
                self.option,
            ) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if RunDirectory(self.folder).holds_run():
            self._attempt(lambda: self._end(kind))

    def _end(self, kind: type[BaseException] | None) -> None:
        if kind is None:
            self.finish()
        else:
            self._log_all()
            status = "KILLED" if kind is KeyboardInterrupt else "FAILED"
            self.client.set_terminated(self._begin(), status)

    def after_round(self, row: RoundRecord) -> None:
        # After a failure there is one more attempt, at the end of the run.
        if not self._failed:
            # A resumed run may have earlier rounds that were not tracked.
            work = self._log_all if self.run_id is None else lambda: self._log([row])
            self._attempt(work)

    def finish(self) -> str:
        """Write what MLflow does not have yet, end its run and return the run's id."""
        store, run_id = RunDirectory(self.folder), self._begin()
        self._log_all()
        self._log_outcome(run_id, store)
        finished = store.summary() is not None
        self.client.set_terminated(run_id, "FINISHED" if finished else "KILLED")
        return run_id

    def _log_all(self) -> None:
        self._begin()
        self._log(RunDirectory(self.folder).history())

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        known = self.client.get_experiment_by_name(name)
        return str(
            known.experiment_id if known is not None else self.client.create_experiment(name)
        )

    def _begin(self) -> str:
        """MLflow's run of this folder, new or continued."""
        if self.run_id is not None:
            return self.run_id
        path, uri = self.folder / RUN_ID_FILE, self.client.tracking_uri
        self.run_id = self._continued(path, uri)
        if self.run_id is None:
            run = self.client.create_run(self.experiment_id, run_name=self.folder.name)
            self.run_id = str(run.info.run_id)
            write_text(path, json.dumps({"uri": uri, "run_id": self.run_id}, indent=1) + "\n")
            self._log_params(self.run_id)
        return self.run_id

    def _continued(self, path: Path, uri: str) -> str | None:
        """The id of the run that the folder has at this server; None if it has none."""
        from mlflow.exceptions import MlflowException

        if not path.exists():
            return None
        content = schemas.read(path, safe_read.parse_json)
        if not isinstance(content, dict) or content.get("uri") != uri:
            return None
        try:
            run = self.client.get_run(str(content.get("run_id")))
        except MlflowException:  # it was deleted
            return None
        if run.info.lifecycle_stage != "active":
            return None
        run_id = str(run.info.run_id)
        self.client.update_run(run_id, status="RUNNING")
        for name in run.data.metrics:
            steps = self.client.get_metric_history(run_id, name)
            self._logged |= {(name, metric.step) for metric in steps}
        return run_id

    def _log_params(self, run_id: str) -> None:
        from mlflow.entities import Param

        params = [
            Param(f"{table}.{key}", str(value)[:MAX_VALUE])
            for table, values in RunDirectory(self.folder).tables().items()
            for key, value in values.items()
        ]
        for start in range(0, len(params), MAX_PARAMS):
            self.client.log_batch(run_id, params=params[start : start + MAX_PARAMS])

    def _log(self, rows: list[RoundRecord]) -> None:
        """Log the numbers of these rounds that MLflow does not have yet."""
        numbers = {(name, row["round"]): value for row in rows for name, value in _metrics(row)}
        self._log_numbers(numbers)

    def _log_numbers(self, numbers: dict[tuple[str, int], float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        new = [key for key in numbers if key not in self._logged]
        for start in range(0, len(new), MAX_METRICS):
            keys = new[start : start + MAX_METRICS]
            metrics = [Metric(name, numbers[name, step], now, step) for name, step in keys]
            self.client.log_batch(str(self.run_id), metrics=metrics)
            self._logged |= set(keys)

    def _log_outcome(self, run_id: str, store: RunDirectory) -> None:
        """The summary, the report and the files of the run."""
        summary = store.summary()
        if summary is not None:
            step = summary["rounds"]
            self._log_numbers({(f"final/{n}", step): v for n, v in _numbers(summary)})
            if summary["stopped"] is not None:
                self.client.set_tag(run_id, "stopped", summary["stopped"])
        for name in FILES:
            if (self.folder / name).exists():
                self.client.log_artifact(run_id, str(self.folder / name))
        if (self.folder / "models").is_dir():
            self.client.log_artifacts(run_id, str(self.folder / "models"), "models")
        with tempfile.TemporaryDirectory() as folder:
            from fedclade.analysis.report import write_report

            page = write_report([self.folder], Path(folder) / "report.html")
            self.client.log_artifact(run_id, str(page))

    def _attempt(self, work: Callable[[], None]) -> None:
        """A problem with MLflow is a warning: the run itself is more important."""
        from mlflow.exceptions import MlflowException

        try:
            work()
        except (MlflowException, FedcladeError, OSError) as error:
            self._failed = True
            message = (
                f"{self.option} mlflow: the run is not tracked completely ({_first_line(error)})."
                f" Try again after the run: fedclade track {self.folder} --to mlflow"
            )
            warnings.warn(FedcladeWarning(message, self.option), stacklevel=4)


def track(folder: Path) -> str:
    """Write a run that is in a folder to MLflow, and return the id of MLflow's run. What MLflow has
    already is not written twice.

    Args:
        folder: the run directory.
    """
    from mlflow.exceptions import MlflowException

    if not RunDirectory(folder).holds_run():
        raise InvalidInputError(f"{folder}: there is no run in this folder.", str(folder))
    tracker = MlflowTracker(folder, "--to").connect()
    try:
        return tracker.finish()
    except MlflowException as error:
        raise InvalidInputError(f"--to mlflow: {_first_line(error)}", "--to") from error


def _metrics(row: RoundRecord) -> Iterator[tuple[str, float]]:
    """The numbers of a round, and those of each group."""
    yield from _numbers(row)
    metric = row.get("by_cluster_of")
    for group, clients, value in row.get("by_cluster", ()):
        yield f"group_{group}/clients", float(clients)
        if value is not None:
            yield f"group_{group}/{_metric_name(str(metric))}", float(value)


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """All numbers but the number of the round. MLflow's databases refuse numbers that are not
    finite.
    """
    for name, value in values.items():
        if (
            name != "round"
            and isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
        ):
            yield _metric_name(name), float(value)


def _metric_name(name: str) -> str:
    """A name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:300].rstrip(".")
