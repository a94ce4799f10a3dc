"""The names that commands take, with a line about each: methods, data sets, settings, …

Importing every method takes seconds, so the names are read from index.json, which
tools/docs/cli_index.py writes.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

INDEX = Path(__file__).with_name("index.json")
Index = dict[str, dict[str, str]]
"""Kind ("methods", "settings", …) -> name -> one-line description."""


def read_index() -> Index:
    """The names of fedclade itself, without importing them."""
    index: Index = json.loads(INDEX.read_text(encoding="utf-8"))
    return index


def build_index() -> Index:
    """The names in the registry, the data catalog, the presets, the paper tables, and the settings
    of experiment files.
    """
    from fedclade.data.dataset_catalog import CATALOGUE
    from fedclade.registry import REGISTRY
    from fedclade.reproduce.spec import tables
    from fedclade.training import experiment_file

    index = {
        f"{kind}s": {name: _first_line(entry) for name, entry in entries.items()}
        for kind, entries in REGISTRY.items()
    }
    index["datasets"] |= {name: published.title for name, published in CATALOGUE.items()}
    index["presets"] = experiment_file.presets()
    index["tables"] = {name: table.title for name, table in tables().items()}
    index["settings"] = dict(_settings())
    return index


def _settings() -> Iterator[tuple[str, str]]:
    """`table.key` and what it is, in the order of an experiment file. Of a key of methods, models
    or partitions: which of them have it.
    """
    from fedclade.methods.base import Method, hyperparameters
    from fedclade.registry import REGISTRY
    from fedclade.training.experiment_file import TABLES, Experiment

    hints = get_type_hints(Experiment)
    for table in TABLES:
        if table in REGISTRY:
            yield f"{table}.name", f"The {table}"
        if table == "partition" or table not in REGISTRY:
            about = _arguments(hints[table])
            for setting in fields(hints[table]):
                text = about[setting.name]
                yield f"{table}.{setting.name}", text[0].upper() + text[1:]
        owners: dict[str, list[str]] = {}
        entries = next((named for kind, named in REGISTRY.items() if kind == table), {})
        for name, entry in entries.items():
            if not is_dataclass(entry):
                continue
            own: Sequence[Field[Any]] = fields(entry)
            if isinstance(entry, type) and issubclass(entry, Method):
                own = hyperparameters(entry)
            for setting in own:
                owners.setdefault(setting.name, []).append(name)
        for key, names in sorted(owners.items()):
            yield f"{table}.{key}", f"Of {', '.join(names)}"


def _arguments(cls: type) -> dict[str, str]:
    """The first sentence about each argument in the docstring of a class."""
    _, _, listed = (inspect.getdoc(cls) or "").partition("Args:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", listed, re.MULTILINE)
    return {name: re.split(r"[.;:]\s|\.$", " ".join(text.split()))[0] for name, text in entries}


def _first_line(entry: Any) -> str:
    """The title, or the first line of the docstring."""
    title: str | None = getattr(entry, "title", None)
    return title or next(iter((entry.__doc__ or "").strip().splitlines()), "").rstrip(".")
