"""Several simulators give the bytes of one, also if workers die and if their number changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedclade import CFL, IFCA, SCAFFOLD, Clade, CladeGroups, FedAvg, Local, Method
from fedclade.conformance.checks import is_same
from fedclade.conformance.example_clients import ragged_clients
from fedclade.conformance.in_process_shards import in_process_shards
from fedclade.conformance.in_process_workers import InProcessWorkers
from fedclade.conformance.method_run import MethodRun, cohorts_of
from fedclade.core.federation import ModelAssignment
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import State
from fedclade.core.program_serialization import NodeContext
from fedclade.core.pytree import Tree, tree_index
from fedclade.data import Clients
from fedclade.engines.sharded.calls import Call
from fedclade.engines.sharded.federation import ShardedSimulator
from fedclade.engines.simulator import Simulator
from fedclade.errors import FedcladeError, InvalidInputError
from fedclade.io.checkpoint import flatten
from fedclade.training.personal_layer import PersonalConfig, PersonalLayer

METHODS: dict[str, Callable[[], Method]] = {
    "fedavg": FedAvg,
    "scaffold": SCAFFOLD,
    "cfl": lambda: CFL(eps1=10.0, eps2=0.0),
    "clade_groups": CladeGroups,
    "clade": Clade,
}
WITH_STATE = {"scaffold": SCAFFOLD, "local": Local}


@cache
def clients() -> Clients:
    """Eight clients with 1 to 40 samples."""
    return ragged_clients().only([*range(6), 0, 2])


def three_rounds(run: MethodRun) -> tuple[State, Tree]:
    state = run.rounds(run.init(), *cohorts_of(len(run.clients)))
    return state, run.served(state)


@cache
def expected(name: str) -> tuple[State, Tree]:
    return three_rounds(MethodRun((METHODS | WITH_STATE)[name](), "simulator", clients()))


def is_expected(name: str, outcome: tuple[State, Tree]) -> bool:
    (state, served), (expected_state, expected_served) = outcome, expected(name)
    return is_same(flatten(state), flatten(expected_state)) and is_same(served, expected_served)


def workers_of(run: MethodRun) -> InProcessWorkers:
    assert isinstance(run.fed, ShardedSimulator)
    assert isinstance(run.fed.workers, InProcessWorkers)
    return run.fed.workers


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("name", METHODS)
def test_shards_give_the_bytes_of_one_simulator(name: str, shards: int) -> None:
    run = MethodRun(METHODS[name](), "sharded", clients(), shards=shards)
    assert is_expected(name, three_rounds(run))


def kill_at(number: int, times: int = 1) -> Callable[[int, Call], bool]:
    """Whether worker 1 dies: in the call with this number, and in the ones that follow."""
    calls = -1

    def dies(worker: int, call: Call) -> bool:
        nonlocal calls
        calls += worker == 1
        return worker == 1 and number <= calls < number + times

    return dies


def calls_of_a_run(method: Method) -> int:
    run = MethodRun(method, "sharded", clients(), shards=2)
    workers_of(run).dies_before = dies = kill_at(10**6)
    three_rounds(run)
    return dies.__closure__[0].cell_contents + 1  # type: ignore[index]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["scaffold", "cfl", "clade_groups"])
def test_a_worker_that_dies_in_any_call_changes_no_byte(
    name: str, when: str, tmp_path: Path
) -> None:
    count = calls_of_a_run(METHODS[name]())
    assert count >= 3
    for number in range(count):
        folder = tmp_path / str(number)
        run = MethodRun(METHODS[name](), "sharded", clients(), shards=2, folder=folder)
        setattr(workers_of(run), f"dies_{when}", kill_at(number))
        assert is_expected(name, three_rounds(run)), f"{name}: it died in call {number}"


def test_a_worker_that_dies_while_another_takes_its_place_changes_no_byte(tmp_path: Path) -> None:
    run = MethodRun(SCAFFOLD(), "sharded", clients(), shards=2, folder=tmp_path)
    workers_of(run).dies_after = kill_at(1, times=2)
    assert is_expected("scaffold", three_rounds(run))


def test_a_call_that_kills_every_worker_is_an_error(tmp_path: Path) -> None:
    run = MethodRun(SCAFFOLD(), "sharded", clients(), shards=2, folder=tmp_path)
    workers_of(run).dies_before = lambda worker, call: worker == 1 and call.name == "map"
    with pytest.raises(FedcladeError, match="worker 1 ended 3 times") as caught:
        three_rounds(run)
    assert caught.value.field == "engine.shards"


def test_client_state_in_the_memory_of_a_dead_worker_is_lost_and_the_error_says_what_to_do() -> (
    None
):
    run = MethodRun(SCAFFOLD(), "sharded", clients(), shards=2)
    workers_of(run).dies_before = kill_at(2)
    with pytest.raises(FedcladeError, match=r"--resume.*engine\.client_state = 'disk'"):
        three_rounds(run)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_calls_are_kept_only_if_they_can_be_repeated(is_on_disk: bool, tmp_path: Path) -> None:
    """They hold the models of the round."""
    folder = tmp_path if is_on_disk else None
    run = MethodRun(Local(), "sharded", clients(), shards=2, folder=folder)
    assert isinstance(run.fed, ShardedSimulator)
    run.init()
    models = {name: value[None] + 0 for name, value in run.params.items()}
    is_alive = weakref.ref(models["fc1.weight"])
    ids, assignment = torch.arange(len(clients())), ModelAssignment.all_same(models, len(clients()))
    run.fed.map(sgd(run.method.local), ids, per_client=assignment, key=1)
    del models, assignment
    assert (is_alive() is not None) == is_on_disk
    run.fed.client_state.commit(1)
    assert is_alive() is None


def test_a_worker_without_client_state_can_be_replaced_from_memory() -> None:
    run = MethodRun(FedAvg(), "sharded", clients(), shards=2)
    workers_of(run).dies_before = kill_at(2)
    assert is_expected("fedavg", three_rounds(run))


def test_a_worker_that_dies_has_the_temporary_state_of_its_clients_again() -> None:
    """It is that of the scores of a personal layer; FedAvg has no other client state."""
    run, ids = MethodRun(FedAvg(), "simulator", clients()), torch.arange(len(clients()))
    shards = in_process_shards(clients(), NodeContext(run.objective), shards=2)
    shards.init_client_state({})
    workers, one = shards.workers, run.fed
    assert isinstance(workers, InProcessWorkers)
    assert isinstance(one, Simulator)
    layer = PersonalLayer(PersonalConfig("interpolate", epochs=1), "interpolate", "classes")
    start = {name: value[None] for name, value in run.params.items()}
    shared = ModelAssignment.all_same(start, len(ids))

    def use(fed: Simulator | ShardedSimulator) -> Tree:
        assigned = layer.assignment(fed, run.method, shared, ids, 1)
        workers.dies_before = kill_at(0)
        return fed.models_of(assigned, ids, layer.program(run.method), key=1)

    models, scores = use(one), one.client_state.read(ids)
    assert len(scores) == 2
    assert is_same(use(shards), models)
    for worker in workers.workers.values():
        kept = worker.simulator.client_state.read(torch.arange(len(worker.ids)))
        assert is_same(kept, tree_index(scores, worker.ids))
    shards.client_state.rollback()
    for worker in workers.workers.values():
        assert not worker.simulator.client_state.temporary


@pytest.mark.parametrize("name", WITH_STATE)
def test_a_run_continues_with_another_number_of_shards(name: str, tmp_path: Path) -> None:
    *first_rounds, last = cohorts_of(len(clients()))
    run = MethodRun(WITH_STATE[name](), "sharded", clients(), shards=4, folder=tmp_path / "4")
    state = run.rounds(run.init(), *first_rounds)
    stored = run.fed.client_state.tensors()
    simulated = MethodRun(WITH_STATE[name](), "simulator", clients())
    simulated.rounds(simulated.init(), *first_rounds)
    assert is_same(stored, simulated.fed.client_state.tensors())
    for shards in (1, 3):
        resumed = MethodRun(
            WITH_STATE[name](), "sharded", clients(), shards=shards, folder=tmp_path / str(shards)
        )
        resumed.fed.client_state.restore(stored, len(first_rounds))
        workers = workers_of(resumed)
        workers.dies_after = lambda worker, call: worker == 0 and call.name == "commit"
        after = resumed.method.round(resumed.view, state, last, key=1)
        with pytest.raises(FedcladeError, match="3 times"):
            resumed.fed.client_state.commit(3)
        workers.dies_after = lambda worker, call: False
        resumed.fed.client_state.commit(3)
        same = MethodRun(WITH_STATE[name](), "simulator", clients())
        same.continue_from(simulated, len(first_rounds))
        expected_state = same.method.round(same.view, state, last, key=1)
        same.fed.client_state.commit(3)
        assert is_same(flatten(after), flatten(expected_state))
        assert is_same(resumed.fed.client_state.tensors(), same.fed.client_state.tensors())


def test_a_rolled_back_round_is_not_repeated_by_a_new_worker(tmp_path: Path) -> None:
    run = MethodRun(SCAFFOLD(), "sharded", clients(), shards=2, folder=tmp_path)
    state = run.init()
    run.method.round(run.view, state, torch.arange(8), key=5)
    run.fed.client_state.rollback()
    workers_of(run).dies_before = kill_at(0)
    assert is_expected("scaffold", _rest(run, state))


def _rest(run: MethodRun, state: State) -> tuple[State, Tree]:
    state = run.rounds(state, *cohorts_of(len(run.clients)))
    return state, run.served(state)


def test_the_choices_of_clients_are_summed_over_shards() -> None:
    method = IFCA(clusters=3)
    outcomes = [
        three_rounds(MethodRun(method, engine, clients()))  # type: ignore[arg-type]
        for engine in ("simulator", "sharded")
    ]
    assert is_same(*[flatten(state) for state, _ in outcomes])


def test_traffic_and_rejections_are_those_of_one_simulator() -> None:
    def invalid(key: int, client: int, reply: Tree) -> Tree | None:
        if client == 3:
            return {name: value * torch.nan for name, value in reply.items()}
        return None if client == 5 else reply

    runs = [
        MethodRun(FedAvg(), engine, clients(), invalid)  # type: ignore[arg-type]
        for engine in ("simulator", "sharded")
    ]
    for run in runs:
        run.round(run.init(), 1, torch.arange(8))
    simulated, sharded = (run.fed for run in runs)
    failures, others = (
        sorted(fed.pop_failures(), key=lambda failure: failure.client)
        for fed in (simulated, sharded)
    )
    assert [failure.client for failure in failures] == [3, 5]
    assert others == failures
    assert sharded.traffic == simulated.traffic


def test_an_error_in_a_worker_is_raised_in_the_leader() -> None:
    run = MethodRun(FedAvg(), "sharded", clients(), shards=2)
    with pytest.raises(InvalidInputError) as caught:
        run.fed.map(
            sgd(run.method.local),
            torch.arange(8),
            broadcast={"lr": torch.tensor(1.0)},  # the name of a hyperparameter
            key=1,
        )
    assert caught.value.field == "model"


@pytest.mark.parametrize("ids", [[0, 8], [1, 1]])
def test_clients_that_do_not_exist_are_refused_as_in_a_simulator(ids: list[int]) -> None:
    run = MethodRun(FedAvg(), "sharded", clients(), shards=2)
    with pytest.raises(InvalidInputError) as caught:
        run.fed.map(sgd(run.method.local), torch.tensor(ids), key=1)
    assert caught.value.field == "ids"


def test_more_shards_than_clients_are_refused() -> None:
    workers = InProcessWorkers(9, lambda shard: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidInputError, match="8") as caught:
        ShardedSimulator(workers, clients().metadata)
    assert caught.value.field == "engine.shards"


def test_the_time_of_the_slowest_worker_is_measured() -> None:
    run = MethodRun(FedAvg(), "sharded", clients(), shards=2)
    assert isinstance(run.fed, ShardedSimulator)
    three_rounds(run)
    assert all(seconds > 0 for seconds in run.fed.times.busy)
    assert 0 < run.fed.times.waited < max(run.fed.times.busy)
    assert run.fed.times.in_words.startswith("2 workers computed for ")


def test_no_client_is_a_call_too() -> None:
    run = MethodRun(Local(), "sharded", clients(), shards=2)
    nobody: Tensor = torch.arange(0)
    state = run.init()
    assignment = run.own.assignment(run.method.assign_models(state, nobody))
    assert {len(value) for value in run.fed.models_of(assignment, nobody).values()} == {0}
