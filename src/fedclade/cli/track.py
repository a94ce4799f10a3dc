"""`fedclade track`: write runs that have ended to a tracking server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedclade.cli.console import print_out
from fedclade.errors import InvalidInputError


def track(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of a run, a comparison or a sweep.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="mlflow", help="The tracker.")] = "mlflow",
) -> None:
    """Write finished runs to MLflow: parameters, metrics, report and models.

    MLFLOW_TRACKING_URI is the address of the server, MLFLOW_EXPERIMENT_NAME the experiment (default
    fedclade).
    """
    from fedclade.integrations import mlflow
    from fedclade.io.run_dir import RunDirectory

    if to != "mlflow":
        raise InvalidInputError(f"--to {to}: must be mlflow.", "--to")
    mlflow.check_installed("--to")
    if not folder.is_dir():
        raise InvalidInputError(f"{folder}: there is no such folder.", str(folder))
    inside = sorted(path for path in folder.iterdir() if RunDirectory(path).holds_run())
    for run in inside if inside and not RunDirectory(folder).holds_run() else [folder]:
        print_out(f"{run}: run {mlflow.track(run)} of MLflow")
