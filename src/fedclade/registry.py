"""Names for the command line: methods, data sets, models and partitions, ours and a user's own.

A user's file registers by a decorator and is named with `--import FILE`; nothing is imported
because an experiment file says so.

    @fc.register("method", "mine")
    @dataclass(frozen=True)
    class Mine(fc.Method): ...
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from fedclade.data import DATASETS, PARTITIONS
from fedclade.errors import FedcladeError, InvalidInputError, nearest
from fedclade.methods import METHODS, Method
from fedclade.models import MODELS

Kind: TypeAlias = Literal["method", "dataset", "model", "partition"]
REGISTRY: dict[Kind, dict[str, Any]] = {
    "method": METHODS,
    "dataset": DATASETS,
    "model": MODELS,
    "partition": PARTITIONS,
}
T = TypeVar("T")
_IMPORTED: list[str] = []


def register(kind: Kind, name: str) -> Callable[[T], T]:
    """Make a class (or, for a data set, a function that returns one) known under a name."""
    if kind not in REGISTRY:
        raise InvalidInputError(f"register: unknown kind '{kind}'.{nearest(kind, REGISTRY)}")

    def enter(thing: T) -> T:
        known = REGISTRY[kind]
        if name in known and known[name].__module__.split(".")[0] == "fedclade":
            raise InvalidInputError(
                f"register: the {kind} '{name}' is fedclade's own; choose another name."
            )
        _check(kind, name, thing)
        if kind != "dataset":
            thing.name = name  # type: ignore[attr-defined]
        known[name] = thing
        return thing

    return enter


def _check(kind: Kind, name: str, thing: Any) -> None:
    """Refuse what could not be used later, while its author is looking."""
    what = f"register: the {kind} '{name}'"
    if kind == "dataset":
        if not callable(thing):
            raise InvalidInputError(f"{what} must be a function that returns fc.data.dataset(…).")
    elif not isinstance(thing, type):
        raise InvalidInputError(f"{what} must be a class.")
    elif kind == "method":
        missing = [
            field
            for field in ("title", "paper", "client_disclosure", "server_visibility")
            if not hasattr(thing, field)
        ]
        if not issubclass(thing, Method) or missing:
            raise InvalidInputError(
                f"{what} must be a dataclass that extends fc.Method"
                + (f" and says its {', '.join(missing)}." if missing else ".")
            )
    elif not hasattr(thing, verb := "build" if kind == "model" else "split"):
        raise InvalidInputError(
            f"{what} must be a class with a method {verb}; see examples/own_things.py."
        )


def find(kind: Kind, name: str, where: str) -> Any:
    """What is registered under the name; `where` is how the name was given."""
    if name not in REGISTRY[kind]:
        raise InvalidInputError(f"{where}: no such {kind}.{nearest(name, REGISTRY[kind])}")
    return REGISTRY[kind][name]


def import_file(path: str) -> None:
    """Run a user's Python file so that it can register its own things."""
    file = Path(path)
    if not file.is_file():
        raise InvalidInputError(f"--import {path}: there is no such file.")
    # A name of its own, so that a user's json.py is not taken for Python's.
    name = f"_fedclade_import_{len(_IMPORTED)}_{file.stem}"
    _IMPORTED.append(name)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InvalidInputError(f"--import {path}: not a Python file.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up here while their class is being made.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except FedcladeError:
        raise
    except (Exception, SystemExit) as error:
        raise InvalidInputError(
            f"--import {path}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
