"""`fedclade list`: the names that experiments and commands take.

Importing every method takes seconds, so the names are read from index.json, which
tools/docs/cli_index.py writes. Only --import needs the registry itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedclade.cli.console import print_name_table
from fedclade.cli.options import ImportOption, import_all
from fedclade.errors import InvalidInputError, nearest

INDEX = Path(__file__).with_name("index.json")
Index = dict[str, dict[str, str]]
"""Kind ("methods", "datasets", …) -> name -> one-line description."""


def list_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="methods|datasets|partitions|models|presets|tables", help="What to list."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    imports: ImportOption = None,
) -> None:
    """List methods, data sets, partitions, models, presets or tables."""
    import_all(imports)
    index = build_index() if imports else read_index()
    if kind not in index:
        raise InvalidInputError(f"list {kind}: unknown.{nearest(kind, index)}", "list")
    if as_json:
        entries = [{"name": name, "about": text} for name, text in index[kind].items()]
        typer.echo(json.dumps(entries, indent=2))
    else:
        print_name_table(index[kind])


def read_index() -> Index:
    """The names of fedclade itself, without importing them."""
    index: Index = json.loads(INDEX.read_text(encoding="utf-8"))
    return index


def build_index() -> Index:
    """The names in the registry, the data catalog, the presets and the paper tables."""
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
    return index


def _first_line(entry: Any) -> str:
    """The title, or the first line of the docstring."""
    title: str | None = getattr(entry, "title", None)
    return title or next(iter((entry.__doc__ or "").strip().splitlines()), "").rstrip(".")
