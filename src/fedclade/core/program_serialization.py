"""Programs on their way: what is sent for one, and the program that it means at the other end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np

from fedclade.core.functional_encoder import Encoder
from fedclade.core.functional_model import Objective
from fedclade.core.local_training import LocalTraining
from fedclade.core.program import AnyProgram, ChainedProgram, Program
from fedclade.errors import InvalidInputError, nearest

P = ParamSpec("P")
Made = TypeVar("Made")

Description: TypeAlias = dict[str, Any]
"""A program in words that JSON has: {"make": the name of its maker, "with": what that is given}."""

PROGRAM_FACTORIES: dict[str, Callable[..., Any]] = {}
"""Functions that make programs, by the name under which they are asked for."""

SECRET = "secret"  # an argument of this name is never sent
_TRAINING = tuple(each.name for each in fields(LocalTraining) if each.name != "objective")


@dataclass(frozen=True)
class ProgramSpec:
    """The function that made a program, by name, and what it was given; and the functions of what
    it made, to notice later changes.
    """

    factory: str
    arguments: Mapping[str, Any]
    functions: tuple[Callable[..., Any], ...]


def serializable_program(maker: Callable[P, Made]) -> Callable[P, Made]:
    """Declare that what this function makes, a program, can be made elsewhere by calling it there
    with the same arguments.

    Those may be numbers, text, tuples of these, the objective, `LocalTraining`, an `Encoder`, and
    programs that travel. An argument called `secret` stays here: the other side has its own.
    """
    name = f"{maker.__module__.removeprefix('fedclade.')}.{maker.__name__}"
    signature = inspect.signature(maker)

    @wraps(maker)
    def make(*args: P.args, **kwargs: P.kwargs) -> Made:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        program: Any = maker(
            *bound.args, **bound.kwargs
        )  # always in one form, so that a cache knows the call again
        made: Made = replace(program, spec=ProgramSpec(name, bound.arguments, program.functions))
        return made

    PROGRAM_FACTORIES[name] = make
    return make


@dataclass(frozen=True)
class NodeContext:
    """What a place has of its own, and is never sent: the model and its loss, the encoder, the
    clients' secret.
    """

    objective: Objective
    encoder: Encoder | None = None
    secret: int | None = None


def to_spec(program: AnyProgram) -> Description:
    """What is sent for a program."""
    spec = program.spec
    if spec is None:
        raise InvalidInputError(
            f"program '{program.name}': it cannot be sent to another machine; declare the function"
            " that makes it with @serializable_program."
        )
    if spec.functions != program.functions:
        raise InvalidInputError(
            f"program '{program.name}': it was changed after '{spec.factory}' had made it, so"
            " another machine would make another one; declare the function that changes it with"
            " @serializable_program."
        )
    return {
        "make": spec.factory,
        "with": {name: _sent(name, value, program) for name, value in spec.arguments.items()},
    }


def _sent(name: str, value: Any, program: AnyProgram) -> Any:
    if name == SECRET:
        return {"here": SECRET}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return {"tuple": [_sent("", each, program) for each in value]}
    if isinstance(value, Objective | Encoder):
        return {"here": "objective" if isinstance(value, Objective) else "encoder"}
    if isinstance(value, LocalTraining):
        return {"training": {field: getattr(value, field) for field in _TRAINING}}
    if isinstance(value, Program | ChainedProgram):
        return {"program": to_spec(value)}
    raise InvalidInputError(
        f"program '{program.name}': its argument '{name}' is a {type(value).__name__}, which cannot"
        " be sent."
    )


def from_spec(description: Mapping[str, Any], here: NodeContext) -> AnyProgram:
    """The program that a description means in this place. Only functions that were declared to
    travel are ever called.
    """
    try:
        name, given = description["make"], dict(description["with"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInputError("program: what was sent describes none.") from error
    if name not in PROGRAM_FACTORIES:
        raise InvalidInputError(
            f"program: there is no '{name}' here; the two sides run different"
            f" versions.{nearest(str(name), PROGRAM_FACTORIES)}"
        )
    maker: Callable[..., AnyProgram] = PROGRAM_FACTORIES[name]
    try:
        return maker(**{str(argument): _received(value, here) for argument, value in given.items()})
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"program '{name}': what was sent does not fit ({error}); the two sides run different"
            " versions."
        ) from error


def _received(value: Any, here: NodeContext) -> Any:
    if not isinstance(value, Mapping):
        return value
    match dict(value):
        case {"tuple": list(values)}:
            return tuple(_received(each, here) for each in values)
        case {"here": "objective" | "encoder" | "secret" as name}:
            if getattr(here, name) is None:
                raise InvalidInputError(
                    f"program: it needs the {name} of this place, and there is none."
                )
            return getattr(here, name)
        case {"training": dict(settings)} if set(settings) == set(_TRAINING):
            return LocalTraining(here.objective, **settings)
        case {"program": dict(inner)}:
            return from_spec(inner, here)
    raise ValueError(f"not understood: {value}")
