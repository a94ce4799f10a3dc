"""Equal arguments give the same functions, and nothing is kept longer than its objective."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fedclade.core.batching import Batches
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.local_sgd import sgd
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.program import AnyProgram, ChainedProgram, Program, chain
from fedclade.core.program_cache import MAX_PROGRAMS, cached_program
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree
from fedclade.programs.clipped_update import clipped_update
from fedclade.programs.secret_parameter_order import in_secret_order


@pytest.fixture
def objective() -> Objective:
    return Objective(nn.Linear(3, 2))


def program_with(name: str, **hyperparams: float) -> Program:
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return {}, params

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        return carry

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return carry, None

    return Program(start, step, finish, Batches(1), name, hyperparams)


@cached_program
def training(local: LocalTraining, scale: float = 1.0) -> Program:
    return program_with("training", lr=local.lr)


@cached_program
def twice(first: AnyProgram, second: AnyProgram) -> ChainedProgram:
    def connect(broadcast: Tree, params: Tree, reply: Tree) -> tuple[Tree, Tree]:
        return reply, {}

    return chain(first, second, connect)


def test_equal_arguments_give_the_same_program(objective: Objective) -> None:
    local = LocalTraining(objective)
    assert training(local) is training(LocalTraining(objective), scale=1.0)


@pytest.mark.parametrize(
    "other",
    [{"momentum": 0.5}, {"weight_decay": 0.1}, {"batch_size": 3}, {"epochs": 2}],
    ids=lambda other: next(iter(other)),
)
def test_other_settings_give_other_functions(objective: Objective, other: dict[str, Any]) -> None:
    step = training(LocalTraining(objective)).step
    assert training(LocalTraining(objective, **other)).step is not step
    assert training(LocalTraining(objective), scale=2.0).step is not step
    assert training(LocalTraining(Objective(nn.Linear(3, 2)))).step is not step


def test_a_new_learning_rate_keeps_the_functions(objective: Objective) -> None:
    before = training(LocalTraining(objective, lr=0.1))
    after = training(LocalTraining(objective, lr=0.05))
    again = training(LocalTraining(objective, lr=0.1))
    assert before.functions == after.functions == again.functions
    assert [program.hyperparams for program in (before, after, again)] == [
        {"lr": 0.1},
        {"lr": 0.05},
        {"lr": 0.1},
    ]


def test_a_new_learning_rate_inside_a_chain_keeps_the_functions(objective: Objective) -> None:
    other = program_with("other")
    before, after = (
        twice(other, sgd(LocalTraining(objective, lr=lr, epochs=2))) for lr in (0.1, 0.05)
    )
    assert before.functions == after.functions
    assert isinstance(after.second, Program)
    assert after.second.hyperparams == {"lr": 0.05}
    assert after.second.batches.epochs == 2


def test_the_inner_functions_of_a_chain_are_the_same_too(objective: Objective) -> None:
    @cached_program
    def both(local: LocalTraining) -> ChainedProgram:
        return twice(program_with("first", lr=local.lr), program_with("second"))

    before, after = (both(LocalTraining(objective, lr=lr)) for lr in (0.1, 0.05))
    assert before.functions == after.functions
    assert isinstance(after.first, Program)
    assert after.first.hyperparams == {"lr": 0.05}


def test_equal_numbers_of_different_types_are_different_arguments(objective: Objective) -> None:
    local = LocalTraining(objective)
    assert training(local, 1).step is not training(local, 1.0).step


def test_another_secret_gives_other_functions(objective: Objective) -> None:
    train = sgd(LocalTraining(objective))
    one, same, other = (in_secret_order(train, secret) for secret in (1, 1, 2))
    assert one.functions == same.functions
    assert one.start is not other.start


def test_an_argument_without_a_hash_is_not_cached(objective: Objective) -> None:
    @serializable_program
    def of_list(objective: Objective, values: list[int]) -> Program:
        return program_with(str(values))

    values = [1]
    first = of_list(objective, values)
    values.append(2)
    second = of_list(objective, values)
    assert (first.name, second.name) == ("[1]", "[1, 2]")
    assert first.step is not second.step


def test_the_cache_does_not_keep_an_objective_alive() -> None:
    objective = Objective(nn.Linear(3, 2))
    in_secret_order(sgd(LocalTraining(objective)), 3)
    alive = weakref.ref(objective)
    del objective
    gc.collect()
    assert alive() is None


def test_the_cache_of_an_objective_is_bounded(objective: Objective) -> None:
    local = LocalTraining(objective)
    first, last = training(local, 0.0), training(local, 0.5)
    for number in range(MAX_PROGRAMS - 1):
        training(local, 0.5)  # used again and again: it stays
        training(local, number + 1.0)
    assert len(objective.programs) == MAX_PROGRAMS
    assert training(local, 0.5) is last
    assert training(local, 0.0) is not first


def test_the_steps_of_a_cached_program_still_run(objective: Objective) -> None:
    program = sgd(LocalTraining(objective, lr=0.5))
    batch = Batch(torch.ones(2, 3), torch.tensor([0, 1]), torch.ones(2), torch.tensor(0))
    _, carry = program.start({}, objective.params(), {})
    lr = {"lr": torch.tensor(program.hyperparams["lr"])}
    weights, _ = program.finish({}, {}, program.step(lr, {}, carry, batch))
    assert weights.keys() == objective.params().keys()


def test_a_new_clip_keeps_the_functions(objective: Objective) -> None:
    program = sgd(LocalTraining(objective, 0.1))
    first, second = (clipped_update(program, clip) for clip in (0.1, 0.2))
    assert first.functions == second.functions
    assert (first.hyperparams["clip"], second.hyperparams["clip"]) == (0.1, 0.2)
    assert clipped_update(program, 0.1, has_count=True).functions != first.functions
