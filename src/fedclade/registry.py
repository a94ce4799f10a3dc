"""Names for the command line: methods, data sets, models and partitions, ours and a user's own.

A user's file registers by a decorator and is named with `--import FILE`; nothing is imported because an experiment file says so.

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
from fedclade.errors import FedcladeError, InvalidInput, nearest
from fedclade.methods import METHODS
from fedclade.models import MODELS

Kind: TypeAlias = Literal["method", "dataset", "model", "partition"]
REGISTRY: dict[Kind, dict[str, Any]] = {"method": METHODS, "dataset": DATASETS, "model": MODELS, "partition": PARTITIONS}
T = TypeVar("T")


def register(kind: Kind, name: str) -> Callable[[T], T]:
    """Make a class (or, for a data set, a function that returns one) known under a name."""
    if kind not in REGISTRY:
        raise InvalidInput(f"register: unknown kind '{kind}'.{nearest(kind, REGISTRY)}")

    def enter(thing: T) -> T:
        known = REGISTRY[kind]
        if name in known and known[name].__module__.split(".")[0] == "fedclade":
            raise InvalidInput(f"register: the {kind} '{name}' is fedclade's own; choose another name.")
        if kind != "dataset":
            thing.name = name  # type: ignore[attr-defined]
        known[name] = thing
        return thing

    return enter


def find(kind: Kind, name: str, field: str) -> Any:
    """What is registered under the name; `field` is where the name was given."""
    if name not in REGISTRY[kind]:
        raise InvalidInput(f"{field} = '{name}': no such {kind}.{nearest(name, REGISTRY[kind])}")
    return REGISTRY[kind][name]


def import_file(path: str) -> None:
    """Run a user's Python file so that it can register its own things."""
    file = Path(path)
    if not file.is_file():
        raise InvalidInput(f"--import {path}: there is no such file.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"--import {path}: not a Python file.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up here while their class is being made.
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except FedcladeError:
        raise
    except Exception as error:
        raise InvalidInput(f"--import {path}: {type(error).__name__}: {error}") from error
