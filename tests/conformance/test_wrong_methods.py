"""A method that breaks a rule fails the check of that rule."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedclade as fc
from fedclade.conformance import CHECKS, CheckResult, ConformanceError, run_checks
from fedclade.core import (
    Batch,
    Federation,
    LocalTraining,
    Program,
    State,
    Tree,
    serializable_program,
    sgd,
    tree_map,
)
from fedclade.methods.fedavg import fedavg_round


@dataclass(frozen=True)
class FedAvgExample(fc.FedAvg):
    """FedAvg under another name: the wrong methods below change one thing."""

    title: ClassVar[str] = "an example"
    paper: ClassVar[str] = "none"


@pytest.fixture(autouse=True)
def _registered(_registry_as_it_was: None) -> None:
    """Registers the methods of this file; the registry is restored after each test."""
    for kind in (FedAvgExample, *WRONG):
        fc.register("method", f"example_{kind.__name__.lower()}")(kind)


@dataclass(frozen=True)
class ChangesItsState(FedAvgExample):
    """Writes into the tensors of the state that it received."""

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        after = super().round(fed, state, cohort, key)
        for name, value in state.models.items():
            value.copy_(after.models[name])
        return after


@dataclass(frozen=True)
class UsesTorchsGenerator(FedAvgExample):
    """Adds noise that does not come from `key`."""

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        after = super().round(fed, state, cohort, key)
        noisy = tree_map(lambda value: value + 0.01 * torch.rand_like(value), after.models)
        return replace(after, models=noisy)


@dataclass(frozen=True)
class UsesPythonsGenerator(FedAvgExample):
    """Drops a random client."""

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        return super().round(fed, state, cohort[random.randrange(len(cohort)) :], key)


@dataclass(frozen=True)
class CountsRoundsOutsideItsState(FedAvgExample):
    """Halves the cohort after two rounds, and counts them in the class."""

    rounds: ClassVar[dict[int, int]] = {}

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        number = self.rounds[id(fed)] = self.rounds.get(id(fed), 0) + 1
        return super().round(fed, state, cohort[: len(cohort) // 2] if number > 2 else cohort, key)


@dataclass(frozen=True)
class UsesTestData(FedAvgExample):
    """Reads the simulator's test data."""

    def init(self, fed: Any, params: Tree, key: int) -> State:
        state = super().init(fed, params, key)
        shift = float(fed._clients.x_test.mean()) if hasattr(fed, "_clients") else 0.0
        return replace(state, models=tree_map(lambda value: value + shift, state.models))


@dataclass(frozen=True)
class DependsOnTheOrder(FedAvgExample):
    """Trains the first client of the cohort only."""

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        return super().round(fed, state, cohort[:1], key)


@dataclass(frozen=True)
class LosesItsModels(FedAvgExample):
    """Divides by the number of replies, also if there are none."""

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        results = fed.map(
            sgd(self.local), cohort, per_client=self.assign_models(state, cohort), key=key
        )
        if not results.outputs:
            return replace(state, models=tree_map(torch.zeros_like, state.models))
        mean = tree_map(lambda value: value.mean(0, keepdim=True), results.outputs)
        return replace(state, models=mean)


@dataclass(frozen=True)
class DeclaresNoTraffic(FedAvgExample):
    """Sends models although it declares that nothing is sent."""

    upload_cost: ClassVar[str] = "0"


@serializable_program
def with_captured_lr(local: LocalTraining) -> Program:
    train = sgd(local)

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        return train.step({"lr": torch.tensor(local.lr)}, const, carry, batch)

    return replace(train, step=step, name="captured", rng_stream="sgd")


@dataclass(frozen=True)
class CapturesTheLearningRate(FedAvgExample):
    """Its cached step has the learning rate of the first round."""

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        return fedavg_round(fed, with_captured_lr(self.local), state, cohort, key)


@dataclass(frozen=True)
class CannotBeSent(FedAvgExample):
    """Its program is not declared with `serializable_program`."""

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        return fedavg_round(fed, replace(sgd(self.local), spec=None), state, cohort, key)


@dataclass(frozen=True)
class ForgetsNewClients(FedAvgExample):
    """Its state does not grow."""

    def add_clients(self, fed: Federation, state: State, ids: Tensor, key: int) -> State:
        return state


WRONG: dict[type[fc.Method], str] = {
    ChangesItsState: "state_is_not_changed_in_place",
    UsesTorchsGenerator: "randomness_comes_from_the_key",
    UsesPythonsGenerator: "randomness_comes_from_the_key",
    CountsRoundsOutsideItsState: "run_can_be_resumed",
    UsesTestData: "uses_no_test_data",
    DependsOnTheOrder: "cohort_order_changes_nothing",
    LosesItsModels: "silent_round_changes_nothing",
    DeclaresNoTraffic: "traffic_is_as_declared",
    CapturesTheLearningRate: "learning_rate_may_change",
    CannotBeSent: "nodes_give_the_same_models",
    ForgetsNewClients: "new_clients_are_added",
}


def result_of(method: fc.Method | type[fc.Method], name: str) -> CheckResult:
    return next(result for result in run_checks(method) if result.check.name == name)


@pytest.mark.parametrize(("method", "name"), WRONG.items(), ids=lambda value: str(value))
def test_a_wrong_method_fails_the_right_check(method: type[fc.Method], name: str) -> None:
    result = result_of(method, name)
    assert result.status == "FAIL"
    assert result.reason


def test_the_right_method_passes_every_check() -> None:
    results = fc.check_method(FedAvgExample())
    assert [result.check for result in results] == CHECKS
    assert {result.status for result in results} == {"pass"}


def test_check_method_raises_with_every_failure() -> None:
    with pytest.raises(ConformanceError) as caught:
        fc.check_method(CannotBeSent)
    assert caught.value.field == "every_client_has_a_finite_model"
    assert isinstance(caught.value, fc.FedcladeError)
    assert isinstance(caught.value, AssertionError)
    for part in ("CannotBeSent", "nodes_give_the_same_models", "@serializable_program"):
        assert part in str(caught.value)


@pytest.mark.parametrize("method", ["fedavg", FedAvgExample.title, int, fc.Method])
def test_what_is_not_a_method_is_refused(method: Any) -> None:
    with pytest.raises(fc.InvalidInputError, check=lambda error: error.field == "method"):
        fc.check_method(method)


def test_a_check_that_applies_to_no_engine_gives_the_reason() -> None:
    method = fc.IFCA(clusters=2)
    result = result_of(method, "traffic_is_as_declared")
    assert result.status == "n/a"
    assert "n/a  traffic_is_as_declared: " in str(result)
    assert result.reason in str(result)


def test_an_unregistered_or_undocumented_method_is_not_declared() -> None:
    @dataclass(frozen=True)
    class Unknown(FedAvgExample):
        """Not registered."""

    @dataclass(frozen=True)
    class Silent(FedAvgExample): ...

    fc.register("method", "silent")(Silent)
    for kind in (Unknown, Silent):
        assert result_of(kind, "is_declared").status == "FAIL"


def test_global_generators_are_restored() -> None:
    state = torch.get_rng_state(), random.getstate()
    fc.check_method(FedAvgExample)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
