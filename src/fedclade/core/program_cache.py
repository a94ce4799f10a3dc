"""A cache of programs: equal arguments give the same functions.

Engines compile a step once and find it again by the identity of its function (CUDA graphs, traces).
So a factory that makes new closures in every round would never be compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from functools import wraps
from threading import Lock
from typing import Any, ParamSpec, TypeVar

from fedclade.core.functional_encoder import Encoder
from fedclade.core.functional_model import Objective
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.program import AnyProgram, ChainedProgram, Program

P = ParamSpec("P")
MadeProgram = TypeVar("MadeProgram", bound=AnyProgram)
Entry = tuple[Any, Any]
"""What may change between rounds, and the program that was made with it."""

MAX_PROGRAMS = 64  # of one objective or encoder
_lock = Lock()
_without_owner: dict[Hashable, Entry] = {}
_changing_arguments: dict[Callable[..., Any], frozenset[str]] = {}


def cached_program(factory: Callable[P, MadeProgram]) -> Callable[P, MadeProgram]:
    """Make the functions of a program once for equal arguments.

    Equal arguments give the same program. Arguments that differ only in the learning rate of
    `LocalTraining`, in the `hyperparams` of a program, or in numbers that `changing_arguments`
    names, give a new program with the same functions. So these functions must read such numbers
    from `broadcast`; every other argument may be read from the closure. Programs with an argument
    that cannot be hashed are not cached.
    """
    signature = inspect.signature(factory)

    @wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> MadeProgram:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return make_cached(factory, bound)

    return make


def changing_arguments(
    *names: str,
) -> Callable[[Callable[P, MadeProgram]], Callable[P, MadeProgram]]:
    """Declare arguments of a factory that change between rounds: numbers that it passes on as
    `hyperparams` of its program, and that its functions read from `broadcast`.
    """

    def declare(factory: Callable[P, MadeProgram]) -> Callable[P, MadeProgram]:
        _changing_arguments[factory] = frozenset(names)
        return factory

    return declare


def make_cached(factory: Callable[..., MadeProgram], bound: inspect.BoundArguments) -> MadeProgram:
    """The program of one call of `factory`; see `cached_program`.

    Args:
        factory: the function that makes the program.
        bound: the arguments of the call, with defaults.
    """
    values = tuple(bound.arguments.values())
    free = _changing_arguments.get(factory, frozenset())
    key = (
        factory,
        *(None if name in free else _fixed(value) for name, value in bound.arguments.items()),
    )
    try:
        hash(key)
    except TypeError:
        return factory(*bound.args, **bound.kwargs)
    changing = tuple(
        value if name in free else _changing(value) for name, value in bound.arguments.items()
    )
    owner = _owner(values)
    entries = _without_owner if owner is None else owner.programs
    entry = _read(entries, key)
    if entry is not None and entry[0] == changing:
        cached: MadeProgram = entry[1]
        return cached
    program = factory(*bound.args, **bound.kwargs)
    if entry is not None:
        program = _with_functions(program, entry[1].functions)
    _write(entries, key, (changing, program))
    return program


def _fixed(value: Any) -> Hashable:
    """The part of an argument that the functions may depend on."""
    match value:
        case LocalTraining():
            return tuple(item for item in vars(value).items() if item[0] != "lr")
        case Program():
            settings = (value.batches, value.name, value.vectorized, value.rng_stream)
            return (*value.functions, *settings)
        case ChainedProgram():
            return (_fixed(value.first), _fixed(value.second), value.connect)
        case tuple():
            return tuple(map(_fixed, value))
    return (type(value), value)  # 1 and 1.0 are equal and have different texts


def _changing(value: Any) -> Any:
    """The part of an argument that may change between rounds."""
    match value:
        case LocalTraining():
            return value.lr
        case Program():
            return dict(value.hyperparams)
        case ChainedProgram():
            return (_changing(value.first), _changing(value.second))
        case tuple():
            return tuple(map(_changing, value))
    return None


def _owner(values: Iterable[Any]) -> Objective | Encoder | None:
    """The object that holds the cached program. The functions refer to it, so a cache of the module
    would keep it alive.
    """
    for value in values:
        match value:
            case Objective() | Encoder():
                return value
            case LocalTraining():
                return value.objective
            case Program() | ChainedProgram() if value.spec is not None:
                owner = _owner(value.spec.arguments.values())
                if owner is not None:
                    return owner
    return None


def _with_functions(program: Any, functions: tuple[Callable[..., Any], ...]) -> Any:
    """The program with other functions, which are in the order of `program.functions`."""
    if isinstance(program, Program):
        start, step, finish = functions
        return replace(program, start=start, step=step, finish=finish)
    split = len(program.first.functions)
    return replace(
        program,
        first=_with_functions(program.first, functions[:split]),
        second=_with_functions(program.second, functions[split:-1]),
        connect=functions[-1],
    )


def _read(entries: dict[Hashable, Entry], key: Hashable) -> Entry | None:
    with _lock:
        entry = entries.pop(key, None)
        if entry is not None:
            entries[key] = entry  # the last one was used last
        return entry


def _write(entries: dict[Hashable, Entry], key: Hashable, entry: Entry) -> None:
    with _lock:
        entries[key] = entry
        while len(entries) > MAX_PROGRAMS:
            del entries[next(iter(entries))]
