"""`fedclade list`: the names that experiments and commands take. Only --import needs the registry
itself.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedclade.cli.completion import kinds
from fedclade.cli.console import print_name_table
from fedclade.cli.index import build_index, read_index
from fedclade.cli.options import ImportOption, import_all
from fedclade.errors import InvalidInputError, nearest


def list_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="methods|datasets|partitions|models|presets|tables|settings",
            help="What to list.",
            autocompletion=kinds,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    imports: ImportOption = None,
) -> None:
    """List methods, data sets, partitions, models, presets, tables or settings."""
    import_all(imports)
    index = build_index() if imports else read_index()
    if kind not in index:
        raise InvalidInputError(f"list {kind}: unknown.{nearest(kind, index)}", "list")
    if as_json:
        entries = [{"name": name, "about": text} for name, text in index[kind].items()]
        typer.echo(json.dumps(entries, indent=2))
    else:
        print_name_table(index[kind])
