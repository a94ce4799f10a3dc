"""Programs: what a client computes, as a fold over its batches in pure functions. The engine owns
the loop.
"""

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

_takes_stacks: WeakSet[Callable[..., Any]] = WeakSet()


def natively_batched(function: F) -> F:
    """Declare that a function of a program is right for a stack of clients as it stands, so that no
    vmap is needed.

    Besides what the objective does (a step gets a `Stack`) it is elementwise. What a client has
    comes with a leading axis, a number of its own is (K,), and what all share has no such axis. A
    step that takes stacks owns the tensors of `carry` and may write into them.
    """
    _takes_stacks.add(function)
    return function


def is_natively_batched(function: Callable[..., Any]) -> bool:
    return function in _takes_stacks


def batch_step(step: Step) -> StackStep:
    """The step of one client as the step of a stack of them: by vmap, unless it takes stacks
    itself.
    """
    if is_natively_batched(step):
        return step
    each = vmap(step, in_dims=(None, 0, 0, 0))
    return lambda broadcast, const, carry, stack: each(broadcast, const, carry, Batch(*stack))


@dataclass(frozen=True)
class Program:
    """What one client computes on its training data.

    start:  (shared, mine, memory) -> (const, carry); `const` is kept and not copied every step
    step:   (shared, const, carry, batch) -> carry
    finish: (shared, const, carry) -> (reply, memory, or None where it is unchanged)

    All three are pure functions for one client and branch on no tensor. `settings` are numbers that
    may change between rounds (the learning rate); they come to the functions in `shared`, so that
    the functions stay the same. `draws_as` says whose randomness it has, its own name's if it is
    empty: all local training draws as "sgd", so that methods are compared on the same batches.
    """

    start: Start
    step: Step
    finish: Finish
    batches: Batches
    name: str
    hyperparams: Mapping[str, float] = field(default_factory=dict)
    # False: run client by client on batches without padding, with numpy or scikit-learn
    vectorised: bool = True
    rng_stream: str = ""
    spec: ProgramSpec | None = field(
        default=None, repr=False, compare=False
    )  # how it is made elsewhere

    def __post_init__(self) -> None:
        if not self.vectorised and self.batches.group > 1:
            raise ValueError(
                f"program '{self.name}': batches without padding come one a step; use group=1 with"
                " vectorised=False"
            )

    @property
    def rng_streams(self) -> tuple[str, ...]:
        """The names from which its randomness is made, beside the call's key."""
        return (self.rng_stream or self.name,)

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        return (self.start, self.step, self.finish)


@dataclass(frozen=True)
class ChainedProgram:
    """Two programs on the same client in one message; see `then`."""

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
    """Run `first`, then `second`, without asking the server in between.

    `link(shared, mine, reply)` gets what `first` replied and gives `mine` for `second`, and what of
    it the server is told. Of what is sent to all `second` has only what the link gives it: its
    steps are the same however many models there were to choose from. Each draws the batches that it
    would draw alone.
    """
    twice = set(first.rng_streams) & set(second.rng_streams)
    if twice:
        raise ValueError(
            f"programs '{first.name}' and '{second.name}' would draw the same batches, as"
            f" {sorted(twice)}: set draws_as"
        )
    return ChainedProgram(first, second, connect)
