"""Programs: what a client computes, as pure functions of its batches. The engine runs the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakSet

from torch.func import vmap

from fedclade.core.batching import Batches
from fedclade.core.functional_model import Batch, ClientStackedBatch
from fedclade.core.pytree import Tree

if TYPE_CHECKING:
    from fedclade.core.program_serialization import ProgramSpec

F = TypeVar("F", bound=Callable[..., Any])
Start: TypeAlias = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
Step: TypeAlias = Callable[[Tree, Tree, Tree, Batch], Tree]
Finish: TypeAlias = Callable[[Tree, Tree, Tree], tuple[Tree, Tree | None]]
StackStep: TypeAlias = Callable[[Tree, Tree, Tree, ClientStackedBatch], Tree]

TEMPORARY = "temporary"
"""Client state under this prefix lasts until the next commit or rollback, and is no part of
checkpoints. A client that has written none does not have it, or has zeros.
"""

_natively_batched: WeakSet[Callable[..., Any]] = WeakSet()


def natively_batched(function: F) -> F:
    """Declare that a function of a program works on many clients at once, without vmap. It is
    faster than a function of one client, and optional.

    Its tensors have a leading axis of clients (a scalar of a client is (K,)); those of `broadcast`
    do not. A step gets a `ClientStackedBatch`. Apart from calls of the objective the function is
    elementwise. Such a step owns the tensors of `carry` and may write into them.

    Args:
        function: `start`, `step` or `finish` of a program.
    """
    _natively_batched.add(function)
    return function


def is_natively_batched(function: Callable[..., Any]) -> bool:
    return function in _natively_batched


def batch_step(step: Step) -> StackStep:
    """The step of one client as a step of many clients: by vmap, unless it is natively batched."""
    if is_natively_batched(step):
        return step
    batched = vmap(step, in_dims=(None, 0, 0, 0))
    return lambda broadcast, const, carry, batch: batched(broadcast, const, carry, Batch(*batch))


@dataclass(frozen=True)
class Program:
    """What one client computes on its training data.

    `start`, `step` and `finish` are pure functions of one client and do not branch on tensors.

    Args:
        start: (broadcast, params, memory) -> (const, carry). `const` does not change between steps.
        step: (broadcast, const, carry, batch) -> carry.
        finish: (broadcast, const, carry) -> (reply, memory); memory is None if it does not change,
            and may be its `TEMPORARY` part alone.
        batches: the batches of the steps.
        name: the name of the program.
        hyperparams: numbers that may change between rounds, such as the learning rate. The
            functions read them from `broadcast`, so that the functions do not change.
        vectorized: False to run client by client on batches without padding, with numpy or
            scikit-learn.
        rng_stream: the name of the random stream; "" for the program's name. All local training
            uses "sgd", so that methods are compared on the same batches.
        spec: how another machine makes the program.
    """

    start: Start
    step: Step
    finish: Finish
    batches: Batches
    name: str
    hyperparams: Mapping[str, float] = field(default_factory=dict)
    vectorized: bool = True
    rng_stream: str = ""
    spec: ProgramSpec | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.vectorized and self.batches.group > 1:
            raise ValueError(
                f"program '{self.name}': with vectorized=False a step has one batch. Use group=1."
            )

    @property
    def rng_streams(self) -> tuple[str, ...]:
        """The names of the random streams that the program uses."""
        return (self.rng_stream or self.name,)

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        return (self.start, self.step, self.finish)


def without_steps(reply: Callable[[Tree, Tree], Tree], name: str) -> Program:
    """A program that reads no sample.

    Args:
        reply: (params, memory) -> the reply, natively batched.
        name: the name of the program.
    """

    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return {}, reply(params, memory)

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        return carry

    @natively_batched
    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return carry, None

    return Program(start, step, finish, Batches.none(), name)


@dataclass(frozen=True)
class ChainedProgram:
    """Two programs on the same client in one message; see `chain`."""

    first: AnyProgram
    second: AnyProgram
    connect: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    spec: ProgramSpec | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        return f"{self.first.name}>{self.second.name}"

    @property
    def rng_streams(self) -> tuple[str, ...]:
        return (*self.first.rng_streams, *self.second.rng_streams)

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        return (*self.first.functions, *self.second.functions, self.connect)


AnyProgram: TypeAlias = Program | ChainedProgram


def chain(
    first: AnyProgram, second: AnyProgram, connect: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
) -> ChainedProgram:
    """Run `first`, then `second`, in one message.

    `second` does not get `broadcast`, only the parameters that `connect` returns, so that its steps
    do not depend on the number of models in `broadcast`. Each program draws the same batches as it
    would alone.

    Args:
        first: the first program.
        second: the second program.
        connect: (broadcast, params, reply of `first`) -> (params of `second`, the part of the reply
            that the server gets).
    """
    common = set(first.rng_streams) & set(second.rng_streams)
    if common:
        raise ValueError(
            f"programs '{first.name}' and '{second.name}' use the same random streams"
            f" {sorted(common)}. Set rng_stream."
        )
    return ChainedProgram(first, second, connect)
