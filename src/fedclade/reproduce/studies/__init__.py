"""Studies: cells of a table that are not training runs. A study computes its own numbers from the
table's [experiment].

study(tables, clients, device) -> StudyResult: the numbers by round, as rows of a history of which
the last is the result, and the panels of a picture, if it has one. `tables` are
the tables of an experiment file with the settings of column, row and --quick; `clients` is their
partition, or None if the study makes its data or reads them from the package. All randomness comes
from `run.seed`. A study reads and writes no other file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedclade.data.federated_dataset import Clients
from fedclade.reproduce.panels import StudyResult
from fedclade.reproduce.studies.cfl_toys import plane, toy
from fedclade.reproduce.studies.cfl_tree import tree
from fedclade.reproduce.studies.cfl_updates import noisy_directions, separation, two_clients
from fedclade.reproduce.studies.fedgmcc_paths import curves
from fedclade.reproduce.studies.flt_relations import relations
from fedclade.reproduce.studies.hospitals import hospitals

Study = Callable[[dict[str, dict[str, Any]], Clients | None, str], StudyResult]

STUDIES: dict[str, Study] = {
    "cfl_directions": noisy_directions,
    "cfl_plane": plane,
    "cfl_separation": separation,
    "cfl_toy": toy,
    "cfl_tree": tree,
    "cfl_two_clients": two_clients,
    "fedgmcc_curves": curves,
    "flt_relations": relations,
    "hospitals": hospitals,
}
