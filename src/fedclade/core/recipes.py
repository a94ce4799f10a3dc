"""Recipes: how a program is made, so that another machine can make it again. No code travels, only
names and numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Made = TypeVar("Made")

PROGRAM_FACTORIES: dict[str, Callable[..., Any]] = {}
"""Functions that make programs, by the name under which they are asked for."""


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
