"""`fedclade describe`: one method, partition, model or data set in detail."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedclade.cli.completion import described
from fedclade.cli.console import out_console, print_out
from fedclade.cli.options import ImportOption, import_all
from fedclade.errors import InvalidInputError, nearest

if TYPE_CHECKING:
    from fedclade.methods.base import Method


def describe(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A method, partition, model or data set (fedclade list …).",
            autocompletion=described,
        ),
    ],
    imports: ImportOption = None,
) -> None:
    """Describe a method, partition, model or data set.

    Shows its parameters; for a method also what a client discloses, and the paper.
    """
    import_all(imports)
    from fedclade.data.dataset_catalog import CATALOGUE
    from fedclade.registry import REGISTRY

    kind = next((kind for kind, entries in REGISTRY.items() if name in entries), None)
    if kind is None and name in CATALOGUE:
        print_out(CATALOGUE[name].description())
        return
    if kind is None:
        names = {name for entries in REGISTRY.values() for name in entries} | CATALOGUE.keys()
        raise InvalidInputError(
            f"NAME = '{name}': no method, partition, model or data set has this"
            f" name.{nearest(name, names)}",
            "NAME",
        )
    entry = REGISTRY[kind][name]
    # The example is Python; an experiment file has the parameters below.
    text = (inspect.getdoc(entry) or "").partition("\n\nExample:")[0]
    if kind == "method":
        text = f"{entry.title}\n\n{text}"
    if kind != "dataset":
        parameters = [
            f"  {field.name} = {_default(field)}" for field in _parameters(kind, entry)
        ] or ["  none"]
        text += (
            f"\n\nParameters ([{kind}] in an experiment file, {entry.__name__}(…) in Python):\n"
            + "\n".join(parameters)
        )
    print_out(text)
    if kind == "method":
        out_console.print(_declarations(entry), markup=False)


def _parameters(kind: str, entry: Any) -> Sequence[Field[Any]]:
    from fedclade.methods.base import hyperparameters

    if kind == "method":
        return hyperparameters(entry)
    return fields(entry) if is_dataclass(entry) else ()


def _default(field: Field[Any]) -> str:
    return "required" if field.default is MISSING else repr(field.default)


def _declarations(method: type[Method]) -> str:
    """What a method declares about disclosure, groups and traffic."""
    from fedclade.methods.base import COST_LEGEND, GROUPS, NEEDS

    extra = f"; {method.extra_traffic}" if method.extra_traffic else ""
    return (
        f"\nWhat leaves a client: {method.client_disclosure}.\nThe server needs:"
        f" {NEEDS[method.server_visibility]}.\nGroups: it {GROUPS[method.groups]}.\nBytes of a"
        f" client in a round: up {method.upload_cost}, down {method.download_cost}{extra}."
        f" {COST_LEGEND}\nPaper: {method.paper}."
    )
