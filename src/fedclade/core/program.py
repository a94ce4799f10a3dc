"""Programs: what a client computes, as a fold over its batches in pure functions. The engine owns
the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.func import vmap

from fedclade.core.batching import Batches
from fedclade.core.functional_model import Batch, ClientStackedBatch, ExampleLoss, Objective
from fedclade.core.pytree import Tree, add_prefix, strip_prefix, tree_map
from fedclade.core.recipes import ProgramSpec, serializable_program

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


@serializable_program
def chain_training(first: AnyProgram, second: AnyProgram) -> ChainedProgram:
    """Two programs that each train a model: the second goes on with what the first has made of
    it.
    """
    return chain(first, second, _continue_from)


def _continue_from(broadcast: Tree, params: Tree, reply: Tree) -> tuple[Tree, Tree]:
    return reply, {}


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains: bound to a method by `run`."""

    objective: Objective
    lr: float = 0.1
    batch_size: int = 10
    epochs: int = 1
    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def batches(self) -> Batches:
        return Batches(self.batch_size, self.epochs)


@serializable_program
def sgd(local: LocalTraining) -> Program:
    """Local SGD from the model the client was given; it replies with the trained weights. Shared by
    most methods.
    """
    start, step, finish = _sgd(local.objective, local.momentum, local.weight_decay)
    return Program(start, step, finish, local.batches, "sgd", hyperparams={"lr": local.lr})


@lru_cache(maxsize=32)
def _sgd(objective: Objective, momentum: float, weight_decay: float) -> tuple[Start, Step, Finish]:
    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        carry = add_prefix("w", params)
        if momentum:
            carry |= add_prefix("v", tree_map(torch.zeros_like, params))
        return {}, carry

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        return sgd_step(objective, carry, batch, broadcast["lr"], momentum, weight_decay)

    @natively_batched
    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return strip_prefix("w", carry), None

    return start, step, finish


def sgd_step(
    objective: Objective,
    carry: Tree,
    batch: Batch,
    lr: Tensor,
    momentum: float,
    weight_decay: float,
    plus: Tree | None = None,
    at: Tree | None = None,
) -> Tree:
    """One step of SGD as torch.optim.SGD takes it: v <- momentum v + (g + weight_decay w), w <- w -
    lr v.

    g is the gradient of the batch at the weights, or at those of `at`; `plus` is added to it. The
    weights' memory may be used for the result: what else needs them comes first.
    """
    w = strip_prefix("w", carry)
    at = w if at is None else at
    if weight_decay:
        decay = tree_map(lambda w: weight_decay * w, w)
        plus = decay if plus is None else tree_map(torch.add, plus, decay)
    if not momentum:
        base = w if plus is None else tree_map(lambda w, more: w - lr * more, w, plus)
        return add_prefix("w", objective.add_scaled_gradient(base, -lr, at, batch, overwrite=True))
    base = tree_map(lambda v: momentum * v, strip_prefix("v", carry))
    base = base if plus is None else tree_map(torch.add, base, plus)
    v = objective.add_scaled_gradient(base, torch.ones_like(lr), at, batch, overwrite=True)
    return add_prefix("w", tree_map(lambda w, v: w - lr * v, w, v)) | add_prefix("v", v)


def effective_steps(steps: Tensor, momentum: float) -> Tensor:
    """How many plain steps so many steps with momentum amount to: the sum of what each step's
    gradient counts for in the end.

    The gradient of step s of τ enters all later steps too, (1 - ρ^(τ-s)) / (1 - ρ) times in all;
    without momentum this is τ.
    """
    if not momentum:
        return steps
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@lru_cache(maxsize=32)
def evaluate_metrics(objective: Objective, metrics: tuple[tuple[str, ExampleLoss], ...]) -> Program:
    """Sums of the loss and of each metric over all of a client's examples, and how many there
    were.
    """

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        zero = torch.zeros((), dtype=torch.float64, device=next(iter(params.values())).device)
        return params, {
            name: zero.clone() for name in ("loss", *(name for name, _ in metrics), "examples")
        }

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        outputs = objective.outputs(const, batch.x)
        values = {
            "loss": objective.example_loss(outputs, batch.y),
            **{name: metric(outputs, batch.y) for name, metric in metrics},
        }
        sums = {
            name: (value * batch.weight).sum(dtype=torch.float64) for name, value in values.items()
        }
        sums["examples"] = batch.weight.sum(dtype=torch.float64)
        return tree_map(torch.add, carry, sums)

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return carry, None

    return Program(start, step, finish, Batches.whole(), "score")


@serializable_program
@lru_cache(maxsize=32)
def evaluate_losses(objective: Objective) -> Program:
    """Sum of the losses of a client's examples under each of several models: a stack in `shared`,
    or one of its own in `each`.
    """

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        first = next(iter((params or broadcast).values()))
        return params, {"loss": torch.zeros(len(first), dtype=torch.float64, device=first.device)}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        def total(params: Tree) -> Tensor:
            return (
                objective.example_loss(objective.outputs(params, batch.x), batch.y) * batch.weight
            ).sum(dtype=torch.float64)

        return {"loss": carry["loss"] + vmap(total)(const or broadcast)}

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return carry, None

    return Program(start, step, finish, Batches.whole(), "losses")
