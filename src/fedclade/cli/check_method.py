"""`fedclade check-method`: run the conformance checks on a user's method."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedclade.cli.console import print_out
from fedclade.errors import InvalidInputError, nearest

if TYPE_CHECKING:
    from fedclade.methods.base import Method


def check_method(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:CLASS]", help="Python file with a method; CLASS if it has several."
        ),
    ],
) -> None:
    """Check that a method of yours keeps the rules of fedclade.

    Runs the method on small federations, in the simulator and on two nodes in this process, and
    prints one line for each check: pass, FAIL with the reason, or n/a. Exits with 1 if a check
    fails.
    """
    from fedclade.conformance.runner import run_checks

    failed = total = 0
    for result in run_checks(load_method(file)):
        print_out(str(result))
        failed, total = failed + (result.status == "FAIL"), total + 1
    print_out(f"{failed} of {total} checks failed." if failed else "All checks passed.")
    raise typer.Exit(1 if failed else 0)


def load_method(file: str) -> type[Method]:
    """The class that FILE or FILE:CLASS names."""
    from fedclade.methods.base import Method
    from fedclade.registry import import_file

    stem, colon, name = file.partition(".py:")
    path = f"{stem}.py" if colon else file
    if not Path(path).is_file():
        raise InvalidInputError(f"{path}: no such file. Give a Python file with a method.", path)
    try:
        module = import_file(path)
    except InvalidInputError as error:
        raise InvalidInputError(str(error).removeprefix("--import "), path) from error
    methods = {
        kind.__name__: kind
        for kind in vars(module).values()
        if inspect.isclass(kind)
        and issubclass(kind, Method)
        and kind.__module__ == module.__name__
        and (not inspect.isabstract(kind) or kind.__name__ == name)
    }
    if name and name not in methods:
        raise InvalidInputError(
            f"{path}: no method '{name}' in this file.{nearest(name, methods)}", path
        )
    if not methods:
        raise InvalidInputError(
            f"{path}: no method in this file. Define a subclass of fc.Method with init, round and"
            " add_clients; see docs/extend.md.",
            path,
        )
    if not name and len(methods) > 1:
        raise InvalidInputError(
            f"{path}: several methods, {', '.join(methods)}. Name one of them:"
            f" {path}:{next(iter(methods))}.",
            path,
        )
    return methods[name] if name else next(iter(methods.values()))
