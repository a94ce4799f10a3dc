"""Serialization of programs: a program is sent as the name and the arguments of the function that
makes it, never as code.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, ParamSpec, TypeAlias

import numpy as np

from fedclade.core.functional_encoder import Encoder
from fedclade.core.functional_model import Objective
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.program import AnyProgram, ChainedProgram, Program
from fedclade.core.program_cache import MadeProgram, make_cached
from fedclade.errors import InvalidInputError, nearest

P = ParamSpec("P")

Description: TypeAlias = dict[str, Any]
"""A program as JSON: {"make": the name of its factory, "with": the arguments}."""

PROGRAM_FACTORIES: dict[str, Callable[..., Any]] = {}
"""The functions that make programs, by name."""

SECRET = "secret"  # an argument of this name is never sent
_TRAINING = tuple(field.name for field in fields(LocalTraining) if field.name != "objective")


@dataclass(frozen=True)
class ProgramSpec:
    """How a program was made.

    Args:
        factory: the name of the function in PROGRAM_FACTORIES.
        arguments: the arguments of that call.
        functions: the functions of the program, to detect later changes.
    """

    factory: str
    arguments: Mapping[str, Any]
    functions: tuple[Callable[..., Any], ...]


def serializable_program(factory: Callable[P, MadeProgram]) -> Callable[P, MadeProgram]:
    """Declare that another machine can make the same program by calling this function with the same
    arguments. The decorator also caches the program, see `cached_program`: the function is written
    with closures, and its steps are compiled once.

        @serializable_program
        def proximal(local: LocalTraining, mu: float) -> Program:
            def step(broadcast, const, carry, batch): ...  # reads broadcast["lr"], and mu
            return Program(start, step, finish, local.batches, "proximal", {"lr": local.lr})

    The functions must read the learning rate from `broadcast`, since it may change between rounds.

    Arguments may be numbers, strings, tuples of these, the objective, `LocalTraining`, an `Encoder`
    and serializable programs. An argument named `secret` is never sent: each node has its own.

    Args:
        factory: the function that makes the program.
    """
    name = f"{factory.__module__.removeprefix('fedclade.')}.{factory.__name__}"
    signature = inspect.signature(factory)

    @wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> MadeProgram:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        program = make_cached(factory, bound)
        return replace(program, spec=ProgramSpec(name, bound.arguments, program.functions))

    PROGRAM_FACTORIES[name] = make
    return make


@dataclass(frozen=True)
class NodeContext:
    """What a node has itself and is never sent.

    Args:
        objective: the model and its loss.
        encoder: the encoder.
        secret: the clients' secret.
        served: the module that clients predict with, if it is not the model.
        factories: the names of the functions whose programs the node runs; None for all.
    """

    objective: Objective
    encoder: Encoder | None = None
    secret: int | None = None
    served: Objective | None = None
    factories: frozenset[str] | None = None


# Every run may use them: fine-tuning before an evaluation, own BatchNorm layers, and clipping for
# differential privacy.
_OF_EVERY_METHOD = frozenset(
    {
        "core.local_sgd.sgd",
        "core.local_sgd.chain_training",
        "aggregation.own_batch_norm.keep_batch_norm",
        "programs.clipped_update.clipped_update",
    }
)


def factories_of(method: type) -> frozenset[str]:
    """The names of the functions that make a method's programs: those that the modules of the
    method's class and of its base classes define or import, and the private modules that they
    import from (`methods/_class_prior.py`).
    """
    modules = {cls.__module__ for cls in method.__mro__}
    imported = {
        str(getattr(value, "__module__", ""))
        for name in modules
        for value in vars(sys.modules[name]).values()
    }
    modules |= {
        name for name in imported if name.startswith("fedclade.methods._") and name in sys.modules
    }
    used = {id(value) for name in modules for value in vars(sys.modules[name]).values()}
    own = {name for name, factory in PROGRAM_FACTORIES.items() if id(factory) in used}
    return _OF_EVERY_METHOD | own


def to_spec(program: AnyProgram) -> Description:
    """The JSON form of a program."""
    spec = program.spec
    if spec is None:
        raise InvalidInputError(
            f"program '{program.name}': it cannot be sent to another machine. Declare the function"
            " that makes it with @serializable_program.",
            program.name,
        )
    if spec.functions != program.functions:
        raise InvalidInputError(
            f"program '{program.name}': its functions differ from those that '{spec.factory}' made,"
            " so another machine would make a different program. Declare the function that changes"
            " it with @serializable_program.",
            program.name,
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
        return {"tuple": [_sent("", entry, program) for entry in value]}
    if isinstance(value, Objective | Encoder):
        return {"here": "objective" if isinstance(value, Objective) else "encoder"}
    if isinstance(value, LocalTraining):
        return {"training": {field: getattr(value, field) for field in _TRAINING}}
    if isinstance(value, Program | ChainedProgram):
        return {"program": to_spec(value)}
    raise InvalidInputError(
        f"program '{program.name}': its argument '{name}' is a {type(value).__name__}, which cannot"
        " be sent. Use numbers, strings, tuples, the objective, LocalTraining or programs.",
        program.name,
    )


def from_spec(description: Mapping[str, Any], context: NodeContext) -> AnyProgram:
    """The program of a description, made on this node. Only functions declared with
    `serializable_program` are called.
    """
    try:
        name, arguments = description["make"], dict(description["with"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInputError(
            "program: the message does not describe a program.", "program"
        ) from error
    if not isinstance(name, str) or name not in PROGRAM_FACTORIES:
        raise InvalidInputError(
            f"program '{name}': unknown on this node. Server and node run different versions, or"
            f" the node did not import the method's file.{nearest(str(name), PROGRAM_FACTORIES)}",
            str(name),
        )
    if context.factories is not None and name not in context.factories:
        raise InvalidInputError(
            f"program '{name}': not a program of the run's method, so this node does not run it.",
            str(name),
        )
    if arguments.get(SECRET, {"here": SECRET}) != {"here": SECRET}:
        raise InvalidInputError(
            f"program '{name}': the server sent a secret; every node uses its own.", SECRET
        )
    factory: Callable[..., AnyProgram] = PROGRAM_FACTORIES[name]
    try:
        return factory(
            **{str(key): _received(str(key), value, context) for key, value in arguments.items()}
        )
    except InvalidInputError:
        raise  # it names its own field
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"program '{name}': invalid arguments ({error}). Server and node run different"
            " versions.",
            str(name),
        ) from error


def _received(argument: str, value: Any, context: NodeContext) -> Any:
    if not isinstance(value, Mapping):
        return value
    match dict(value):
        case {"tuple": list(values)}:
            return tuple(_received("", entry, context) for entry in values)
        # As a learning rate, the secret could be computed from the reply.
        case {"here": "secret"} if argument != SECRET:
            raise InvalidInputError(f"{argument} = secret: the secret is no such argument.", SECRET)
        case {"here": "objective" | "encoder" | "secret" as name}:
            if getattr(context, name) is None:
                raise InvalidInputError(
                    f"program: it needs the {name} of this node, and the node has none.", name
                )
            return getattr(context, name)
        case {"training": dict(settings)} if set(settings) == set(_TRAINING):
            return LocalTraining(context.objective, **settings)
        case {"program": dict(inner)}:
            return from_spec(inner, context)
    raise ValueError(f"unknown argument: {value}")
