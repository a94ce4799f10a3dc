"""What runs and diagnoses left on disk, read as far as it goes: a run that goes on, or was stopped,
is a run too.
"""

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
    """A run's folder. summary and clients are None until the run has ended; features is None
    where none were written.
    """

    name: str
    title: str  # of the setting: what its seeds have in common
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
    def last(self) -> Row:
        """The newest numbers there are: the summary, or what the last evaluation said."""
        evaluated = [row for row in self.rounds if "loss" in row]
        return self.summary or (evaluated[-1] if evaluated else {})


@dataclass(frozen=True)
class ReportData:
    """All that some folders hold. differences: what comparisons say about which differences are
    real, in sentences.
    """

    runs: list[StoredRun]
    diagnoses: list[tuple[str, Row]]
    differences: list[str]


def read(folders: Sequence[Path]) -> ReportData:
    """All runs and all diagnoses in these folders and one level below, as `compare` nests them."""
    if not folders:
        raise InvalidInputError(
            "report: name at least one folder, for example runs/quickstart-clade."
        )
    titles: dict[Path, str] = {}
    diagnoses: list[Path] = []
    differences: list[str] = []
    for given in folders:
        if not given.is_dir():
            raise InvalidInputError(f"report: there is no folder '{given}'.")
        folder = given.resolve()
        compared = (
            RunDirectory(folder).comparison() if (folder / "comparison.json").exists() else {}
        )
        inside = [folder, *_children(folder, compared)]
        found = {
            path: _title(path.name, compared) for path in inside if RunDirectory(path).holds_run()
        }
        diagnosed = [path for path in inside if (path / "diagnosis.json").exists()]
        if not found and not diagnosed:
            raise InvalidInputError(
                f"report: '{given}' holds no run, no comparison and no diagnosis; give a folder"
                " that fedclade wrote."
            )
        titles |= found
        diagnoses += diagnosed
        differences += compared.get("differences", {}).get("in_words", [])
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
        list(dict.fromkeys(differences)),
    )


def _children(folder: Path, compared: Row) -> list[Path]:
    """The folders inside, in the order of the comparison where there is one."""
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
    """As the comparison has it; of a folder that is in none, its name without the seed."""
    return next(
        (title for title, names in compared.get("folders", {}).items() if name in names),
        _SEED.sub("", name),
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """A short name for each, and no name twice."""
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
            f"{folder / plot_data.FILE}: damaged (it has clients that the run has not)."
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
    """The rounds written so far; a last line without its end is still being written."""
    if not path.exists():
        return []
    return [*schemas.read(path, lambda text: schemas.rounds(text.rpartition("\n")[0]))]
