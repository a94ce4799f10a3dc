"""Local: every client for itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from fedclade.core.federation import Federation, Rows
from fedclade.core.program import Finish, LocalTraining, Program, Start, sgd
from fedclade.core.pytree import Tree, stack
from fedclade.core.recipes import travels
from fedclade.methods.base import Method, Needs, State


@travels
def sgd_in_memory(local: LocalTraining) -> Program:
    """`sgd` that goes on from the client's own model and keeps the result: nothing is sent."""
    train = sgd(local)
    start, finish = _in_memory(train.start, train.finish)
    return replace(train, start=start, finish=finish, name="sgd_in_memory", draws_as="sgd")


@lru_cache(maxsize=32)
def _in_memory(train_start: Start, train_finish: Finish) -> tuple[Start, Finish]:
    def start(shared: Tree, mine: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return train_start(shared, memory, {})

    def finish(shared: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        weights, _ = train_finish(shared, const, carry)
        return {}, weights

    return start, finish


@dataclass(frozen=True)
class Local(Method):
    """No exchange (SOLO): each client trains its own model on its own data, in the rounds in which it is sampled.

    All start from the same initial weights. It is what a client reaches alone, the bar that any federation has to pass.
    """

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "Local training: every client for itself"
    paper: ClassVar[str] = "the baseline called Local in FLT and SOLO in FLIS"
    leaves: ClassVar[str] = "nothing"
    needs: ClassVar[Needs] = "nothing"
    up: ClassVar[str] = "0"
    down: ClassVar[str] = "0"

    def memory0(self, params: Tree) -> Tree:
        return params

    def init(self, fed: Federation, params: Tree, key: int) -> State:
        return State(models=stack([params]), cluster=torch.arange(len(fed.sizes)))

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        fed.map(sgd_in_memory(self.local), cohort, key=key)
        return state

    def admit(self, fed: Federation, state: State, ids: Tensor, key: int) -> State:
        state = state.grown_to(len(fed.sizes))
        return replace(state, cluster=state.cluster.index_copy(0, ids, ids))

    def serve(self, state: State, ids: Tensor) -> Rows:
        return Rows(state.models, torch.zeros_like(ids), own=tuple(state.models))
