"""Names of methods, data sets, models and partitions: those of fedclade and those of the user.

A user's file registers its classes by a decorator, and `--import FILE` runs it. An experiment file
cannot cause an import.

    @fc.register("method", "mine")
    @dataclass(frozen=True)
    class Mine(fc.Method): ...
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
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
    """Register a class (or, for a data set, a function that returns one) under a name."""
    if kind not in REGISTRY:
        raise InvalidInputError(f"register: unknown kind '{kind}'.{nearest(kind, REGISTRY)}")

    def enter(entry: T) -> T:
        entries = REGISTRY[kind]
        if name in entries and entries[name].__module__.split(".")[0] == "fedclade":
            raise InvalidInputError(
                f"register: the {kind} '{name}' is fedclade's own; choose another name."
            )
        _check(kind, name, entry)
        if kind != "dataset":
            entry.name = name  # type: ignore[attr-defined]
        entries[name] = entry
        return entry

    return enter


def _check(kind: Kind, name: str, entry: Any) -> None:
    """Reject an entry that could not be used later, so that its author sees the error at once."""
    what = f"register: the {kind} '{name}'"
    if kind == "dataset":
        if not callable(entry):
            raise InvalidInputError(f"{what} must be a function that returns fc.data.dataset(…).")
    elif not isinstance(entry, type):
        raise InvalidInputError(f"{what} must be a class.")
    elif kind == "method":
        missing = [
            field
            for field in ("title", "paper", "client_disclosure", "server_visibility")
            if not hasattr(entry, field)
        ]
        if not issubclass(entry, Method) or missing:
            raise InvalidInputError(
                f"{what} must subclass fc.Method"
                + (f" and define: {', '.join(missing)}." if missing else ".")
            )
    elif not hasattr(entry, verb := "build" if kind == "model" else "split"):
        raise InvalidInputError(
            f"{what} must be a class with a method {verb}; see examples/own_things.py."
        )


def find(kind: Kind, name: str, where: str) -> Any:
    """The entry with this name; `where` names the setting for the error message."""
    if name not in REGISTRY[kind]:
        raise InvalidInputError(f"{where}: no such {kind}.{nearest(name, REGISTRY[kind])}")
    return REGISTRY[kind][name]


def import_file(path: str) -> ModuleType:
    """Run a user's Python file, which registers its own methods, models, partitions or data."""
    file = Path(path)
    if not file.is_file():
        raise InvalidInputError(f"--import {path}: there is no such file.")
    # A unique name, so that a user's json.py does not replace Python's.
    name = f"_fedclade_import_{len(_IMPORTED)}_{file.stem}"
    _IMPORTED.append(name)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InvalidInputError(f"--import {path}: not a Python file.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module here while their class is created.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except FedcladeError:
        raise
    except (Exception, SystemExit) as error:
        raise InvalidInputError(
            f"--import {path}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    return module
