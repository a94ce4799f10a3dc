"""Read the folders of runs and diagnoses. A run may be unfinished."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedclade.core.names import NO_NAMES, Names
from fedclade.errors import InvalidInputError
from fedclade.io import schemas
from fedclade.io.run_dir import RunDirectory
from fedclade.training import plot_data
from fedclade.training.plot_data import ClientFeatures

Row = Mapping[str, Any]
_SEED = re.compile(r"-seed\d+$")


@dataclass(frozen=True)
class StoredRun:
    """A run's folder. `summary` and `clients` are None for an unfinished run; `features` is None if
    the run wrote none.
    """

    name: str
    title: str  # of the setting, without the seed
    folder: Path
    tables: dict[str, dict[str, Any]]
    rounds: list[Row]
    summary: Row | None
    clients: dict[str, list[Any]] | None
    features: ClientFeatures | None
    names: Names = NO_NAMES

    @property
    def method(self) -> str:
        return str(self.tables["method"]["name"])

    @property
    def data_name(self) -> str:
        """The name of the data set, or of its file without the folder."""
        table = self.tables.get("data", {})
        dataset = (self.summary or {}).get("dataset") or "clients"
        return str(table.get("name") or Path(str(table.get("path") or dataset)).stem)

    @property
    def rounds_planned(self) -> int:
        return int(self.tables["run"]["rounds"])

    @property
    def round_reached(self) -> int:
        """The number of the last finished round."""
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    @property
    def last(self) -> Row:
        """The newest results: the summary, or the row of the last evaluation."""
        evaluated = [row for row in self.rounds if "loss" in row]
        return self.summary or (evaluated[-1] if evaluated else {})


@dataclass(frozen=True)
class PlannedRun:
    """A run of a comparison, which may not have begun.

    Args:
        name: the name of its folder.
        title: its title, without the seed.
        rounds: its number of rounds.
    """

    name: str
    title: str
    rounds: int


@dataclass(frozen=True)
class ReportData:
    """The contents of folders. `planned` has all runs of a comparison that may be running; it is
    empty for other folders.
    """

    runs: list[StoredRun]
    diagnoses: list[tuple[str, Row]]
    planned: list[PlannedRun]


def read(folders: Sequence[Path]) -> ReportData:
    """All runs and diagnoses in these folders and their subfolders, where `compare` puts runs."""
    if not folders:
        raise InvalidInputError(
            "runs: give at least one folder, for example runs/quickstart-clade.", "runs"
        )
    titles: dict[Path, str] = {}
    diagnoses: list[Path] = []
    planned: list[PlannedRun] = []
    for path in folders:
        if not path.is_dir():
            raise InvalidInputError(f"report: no folder '{path}'.", str(path))
        folder = path.resolve()
        store = RunDirectory(folder)
        compared = store.comparison() if (folder / "comparison.json").exists() else {}
        if len(folders) == 1 and (folder / "plan.json").exists():
            planned = [PlannedRun(**run) for run in store.plan()]
        inside = [folder, *_children(folder, compared)]
        run_titles = {
            child: _title(child.name, compared)
            for child in inside
            if RunDirectory(child).holds_run()
        }
        diagnosed = [child for child in inside if (child / "diagnosis.json").exists()]
        if not run_titles and not diagnosed:
            raise InvalidInputError(
                f"report: '{path}' contains no run, comparison or diagnosis. Give a folder that"
                " fedclade wrote.",
                str(path),
            )
        titles |= run_titles
        diagnoses += diagnosed
    runs = [
        _run(name, titles[path], path)
        for name, path in zip(_names(list(titles)), titles, strict=True)
    ]
    return ReportData(
        runs,
        [
            (path.name, schemas.read(path / "diagnosis.json", schemas.diagnosis))
            for path in dict.fromkeys(diagnoses)
        ],
        planned,
    )


def _children(folder: Path, compared: Row) -> list[Path]:
    """The subfolders, in the order of the comparison if there is one."""
    place = {
        name: number
        for number, name in enumerate(
            name for names in compared.get("folders", {}).values() for name in names
        )
    }
    return sorted(
        (child for child in folder.iterdir() if child.is_dir()),
        key=lambda child: (place.get(child.name, len(place)), child.name),
    )


def _title(name: str, compared: Row) -> str:
    """The title in the comparison; without a comparison, the folder's name without the seed."""
    return next(
        (title for title, names in compared.get("folders", {}).items() if name in names),
        _SEED.sub("", name),
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """A short, unique name for each folder."""
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [f"{folder.parent.name}/{folder.name}" for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return names


def _run(name: str, title: str, folder: Path) -> StoredRun:
    store = RunDirectory(folder)
    summary = store.summary()
    # A run that was resumed still has the clients.csv of its earlier end.
    clients = store.read_clients(summary["clients"]) if summary is not None else None
    features = plot_data.read(folder)
    if (
        features is not None
        and clients is not None
        and not bool((features.ids < len(clients["client"])).all())
    ):
        raise InvalidInputError(
            f"{folder / plot_data.FILE}: damaged (it has clients that are not in the run).",
            str(folder / plot_data.FILE),
        )
    return StoredRun(
        name,
        title,
        folder,
        store.tables(),
        _rounds(folder / "rounds.jsonl"),
        summary,
        clients,
        features,
        store.names(),
    )


def _rounds(path: Path) -> list[Row]:
    """The rounds written so far. A last line without a line break is still being written."""
    if not path.exists():
        return []
    return [*schemas.read(path, lambda text: schemas.rounds(text.rpartition("\n")[0]))]
