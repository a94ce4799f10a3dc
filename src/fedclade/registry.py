"""The registry: methods, data sets, models and partitions by name, of fedclade and of the user.

A user's file registers its classes with a decorator, and `--import FILE` runs it. An experiment
file cannot import code.

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
from typing import Any, Literal, TypeAlias, TypeVar, cast

from fedclade.data import DATASETS, PARTITIONS
from fedclade.errors import FedcladeError, InvalidInputError, nearest, require
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
    """A decorator that registers a class or, for a data set, a function that returns one.

    Args:
        kind: "method", "dataset", "model" or "partition".
        name: The name in experiment files and on the command line. Names of fedclade are reserved.

    Example:
        >>> import fedclade as fc
        >>> @fc.register("dataset", "half_digits")
        ... def half_digits():
        ...     digits = fc.data.load("digits")
        ...     few = digits.y_train < 5
        ...     return fc.data.dataset(digits.x_train[few], digits.y_train[few])
        >>> fc.data.load("half_digits").classes
        5
    """
    if kind not in REGISTRY:
        raise InvalidInputError(
            f"register: unknown kind '{kind}'.{nearest(kind, REGISTRY)}", "kind"
        )

    def add(entry: T) -> T:
        entries = REGISTRY[kind]
        if name in entries and entries[name].__module__.split(".")[0] == "fedclade":
            raise InvalidInputError(
                f"register: the {kind} '{name}' is part of fedclade. Choose another name.", "name"
            )
        _check(kind, name, entry)
        if kind != "dataset":
            entry.name = name  # type: ignore[attr-defined]
        entries[name] = entry
        return entry

    return add


def _check(kind: Kind, name: str, entry: Any) -> None:
    """Reject an invalid entry at once, not when it is used."""
    problem = ""
    if kind == "dataset":
        if not callable(entry):
            problem = "must be a function that returns fc.data.dataset(…)"
    elif not isinstance(entry, type):
        problem = "must be a class"
    elif kind == "method":
        missing = [
            field
            for field in ("title", "paper", "client_disclosure", "server_visibility")
            if not hasattr(entry, field)
        ]
        if not issubclass(entry, Method) or missing:
            define = f" and define: {', '.join(missing)}" if missing else ""
            problem = f"must subclass fc.Method{define}"
    elif not hasattr(entry, required := "build" if kind == "model" else "split"):
        problem = f"must be a class with a method {required}; see examples/own_things.py"
    if problem:
        raise InvalidInputError(f"register: the {kind} '{name}' {problem}.", name)


def find(kind: Kind, name: str, field: str) -> Any:
    """The entry with this name; `field` is the setting or argument that names it."""
    if name not in REGISTRY[kind]:
        raise InvalidInputError(
            f"{field} = '{name}': no such {kind}.{nearest(name, REGISTRY[kind])}", field
        )
    return REGISTRY[kind][name]


def as_method(entry: Method | str, field: str) -> Method:
    """The method, or the one with this name and its default settings; `field` is the argument."""
    made = find("method", entry, field)() if isinstance(entry, str) else entry
    require(
        isinstance(made, Method),
        field,
        entry,
        "must be methods such as fc.FedAvg(), or their names",
    )
    return cast(Method, made)


def import_file(path: str, option: str = "--import") -> ModuleType:
    """Run a user's Python file, which registers methods, models, partitions or data sets.

    Args:
        path: the file.
        option: the option that names the file; "" if it is an argument.
    """
    file, field, what = Path(path), option or path, f"{option} {path}".lstrip()
    if not file.is_file():
        raise InvalidInputError(f"{what}: there is no such file.", field)
    # A unique name, so that a user's json.py does not replace the standard module.
    name = f"_fedclade_import_{len(_IMPORTED)}_{file.stem}"
    _IMPORTED.append(name)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InvalidInputError(f"{what}: not a Python file.", field)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module here while their class is created.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except FedcladeError:
        raise
    except (Exception, SystemExit) as error:
        raise InvalidInputError(
            f"{what}: {type(error).__name__}: {' '.join(str(error).split())}", field
        ) from error
    return module
