"""Cells of a table that are no training run: a study takes the table's [experiment] and gives
numbers of its own.

study(tables, clients, device) -> the numbers by round: rows of a history, of which the last is the
study's result. `tables` are those of an experiment file with all that column, row and --quick set;
`clients` are dealt by them, None where the data are "synthetic". All that is random comes from
`run.seed`. A study reads and writes no file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedclade.data.federated_dataset import Clients
from fedclade.reproduce.paper_metrics import History
from fedclade.reproduce.studies.cfl_updates import noisy_directions, separation, two_clients
from fedclade.reproduce.studies.fedgmcc_paths import curves

Study = Callable[[dict[str, dict[str, Any]], Clients | None, str], History]

STUDIES: dict[str, Study] = {
    "cfl_directions": noisy_directions,
    "cfl_separation": separation,
    "cfl_two_clients": two_clients,
    "fedgmcc_curves": curves,
}
