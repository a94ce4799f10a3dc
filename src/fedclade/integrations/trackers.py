"""The trackers of `--track`: what follows a run in addition to its folder."""

from __future__ import annotations

from pathlib import Path

from fedclade.errors import InvalidInputError
from fedclade.integrations import mlflow, tensorboard

TRACKERS = ("tensorboard", "mlflow")


def check_tracker(name: str) -> None:
    """Raise before the training if the tracker cannot be used."""
    if name not in TRACKERS:
        raise InvalidInputError(f"--track {name}: must be {' or '.join(TRACKERS)}.", "--track")
    if name == "mlflow":
        mlflow.check_installed("--track")
    else:
        tensorboard.check_installed()


def tracker(name: str, folder: Path) -> tensorboard.Tracker | mlflow.MlflowTracker:
    """A context manager around a run whose `after_round` gets each round.

    Args:
        name: one of `TRACKERS`.
        folder: the run directory.
    """
    return mlflow.MlflowTracker(folder) if name == "mlflow" else tensorboard.Tracker(folder)
