"""What every method promises on every engine. A method joins by being listed in METHODS, an engine
by an entry in ENGINES.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.unit.engines.remote.in_process_transport import Remote
from torch import Tensor

from fedclade import (
    FLT,
    IFCA,
    PCAHC,
    SCAFFOLD,
    Clade,
    FedGMCC,
    FedSEM,
    LGFedAvg,
    Method,
    PerFedAvg,
    Simulator,
)
from fedclade.core import LocalTraining, State
from fedclade.core.cost_formula import evaluate_cost
from fedclade.core.functional_encoder import Encoder
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import UNKNOWN
from fedclade.core.program_serialization import NodeContext
from fedclade.core.pytree import Tree
from fedclade.core.rng import fold_in
from fedclade.data import Clients, RaggedIndex
from fedclade.engines.simulator import Faults
from fedclade.io.checkpoint import flatten, restore
from fedclade.methods import METHODS
from fedclade.methods.flis import FLISDC, FLISHC
from fedclade.methods.required_context import NeedsEncoder, NeedsSecret
from fedclade.models import MLP
from fedclade.training.setup import inject_context

ENGINES: dict[str, Callable[..., Any]] = {
    "simulator": lambda clients, context, **options: Simulator(clients, **options),
    "remote": Remote,  # two nodes, reached by messages
}
CHUNKS = (1, 2, 5)
MOST_STATEMENTS = 120  # of a method's module, however its lines are broken
CASES: dict[str, Callable[[], Method]] = {
    **METHODS,
    "ifca, all options": lambda: IFCA(
        clusters=2, shared_layers="trunk", warm_up=1, num_restarts=2, trial_rounds=1
    ),
    "scaffold, option 1": lambda: SCAFFOLD(option=1, weights="clients", server_lr=0.5),
    "per_fedavg, hessian-free": lambda: PerFedAvg(variant="hessian-free"),
    "flis_dc, soft": lambda: FLISDC(labels="soft", beta=0.8),
    "flis_hc, soft, single": lambda: FLISHC(labels="soft", linkage="single"),
    "fedsem, last layer": lambda: FedSEM(clusters=2, layers="last"),
    "pca_hc, shared": lambda: PCAHC(clusters=2, basis="shared"),
    "fedgmcc, straight": lambda: FedGMCC(curve_steps=0, step=0),
    "flt, private": lambda: FLT(k=1, signature_epsilon=1.0, secret=1),
    "clade, private": lambda: Clade(signature_epsilon=1.0, secret=1),
    "lg_fedavg, head local": lambda: LGFedAvg(local_layers=("fc2",)),
}

pytestmark = [
    pytest.mark.parametrize("name", CASES),
    pytest.mark.parametrize("engine", ENGINES),
    pytest.mark.filterwarnings(
        "ignore:manifold"
    ),  # FLT says that these federations are too small for UMAP
]


class Federation:
    """A method on an engine, driven as the runner drives it."""

    def __init__(
        self, name: str, engine: str, clients: Clients, faults: Faults | None = None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.objective = Objective(MLP(8).build(clients.shape, 10))
        groups = (
            torch.arange(len(clients)) % 2 if clients.groups is None else clients.groups
        )  # some truth, for those who are told it
        method = inject_context(CASES[name](), replace(clients, groups=groups).metadata, seed=0)
        self.method: Method = method.with_local_config(
            LocalTraining(self.objective, lr=0.05, batch_size=4, epochs=2)
        )
        module = self.method.encoder_module if isinstance(self.method, NeedsEncoder) else None
        context = NodeContext(
            self.objective,
            None if module is None else Encoder(module),
            self.method.secret if isinstance(self.method, NeedsSecret) else None,
        )
        self.fed = ENGINES[engine](clients, context, faults=faults, **options)
        self.params = self.objective.params()
        self.fed.init_client_state(self.method.initial_client_state(self.params))

    def init(self) -> State:
        state = self.method.init(self.fed, self.params, key=fold_in(0, "init"))
        self.fed.client_state.commit(0)
        return state

    def round(self, state: State, number: int, cohort: Tensor) -> State:
        state, cohort = self.method.prepare_cohort(
            self.fed, state, cohort, fold_in(0, "admit", number)
        )
        state = self.method.round(self.fed, state, cohort, fold_in(0, "round", number))
        self.fed.client_state.commit(number)
        return state

    def admitted(self, state: State, ids: Tensor, number: int) -> State:
        unknown = ids[state.cluster_ids[ids] == UNKNOWN]
        return (
            self.method.add_clients(self.fed, state, unknown, fold_in(0, "admit", number))
            if len(unknown)
            else state
        )

    def rounds(self, state: State, *cohorts: Tensor, first: int = 1) -> State:
        for number, cohort in enumerate(cohorts, start=first):
            state = self.round(state, number, cohort)
        return state

    def served(self, state: State) -> Tree:
        """The weights that each client would use."""
        ids = torch.arange(len(self.fed.sizes))
        state = self.admitted(state, ids, 10**6)
        known = ids[state.cluster_ids != UNKNOWN]
        memory = (
            self.fed.read(known)
            if isinstance(self.fed, Remote)
            else self.fed.client_state.read(known)
        )
        return self.method.assign_models(state, known).gather(memory)

    def goes_on_from(self, other: Federation, number: int) -> None:
        """Clients remember what they did in the other one, as after a checkpoint."""
        if isinstance(self.fed, Remote):
            for name, node in self.fed.in_process.connected.items():
                node.state_store = other.fed.in_process.connected[name].state_store
        self.fed.client_state.restore(other.fed.client_state.tensors(), number)


def cohorts(clients: int) -> list[Tensor]:
    return [torch.arange(clients), torch.arange(0, clients, 2), torch.arange(1, clients)]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a run of the usual rounds leaves behind."""

    state: State
    served: Tree


OUTCOMES: dict[tuple[str, str], Outcome] = {}


def usual_run(name: str, engine: str, ragged: Clients) -> Outcome:
    """The plain run that several tests compare with; `ragged` is always the same."""
    if (name, engine) not in OUTCOMES:
        case = Federation(name, engine, ragged)
        state = case.rounds(case.init(), *cohorts(len(ragged)))
        OUTCOMES[name, engine] = Outcome(state, case.served(state))
    return OUTCOMES[name, engine]


def same(one: Tree, other: Tree) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def all_finite(tree: Tree) -> bool:
    return all(
        bool(torch.isfinite(value).all()) for value in tree.values() if value.is_floating_point()
    )


def test_is_declared(name: str, engine: str) -> None:
    method = type(CASES[name]())
    assert method.name == name.split(",")[0]
    assert METHODS[method.name] is method
    assert method.server_visibility in ("nothing", "sum", "updates", "signatures", "probe")
    for text in (method.title, method.paper, method.client_disclosure, inspect.getdoc(method)):
        assert text
    module = inspect.getmodule(method)
    assert module is not None
    tree = ast.parse(inspect.getsource(module))
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) <= MOST_STATEMENTS


def test_gives_every_client_a_finite_model(name: str, engine: str, ragged: Clients) -> None:
    served, params = usual_run(name, engine, ragged).served, Federation(name, engine, ragged).params
    assert served.keys() == params.keys()
    assert all(len(value) == len(ragged) for value in served.values())
    assert all_finite(served)
    assert not same(
        served, {key: value.expand(len(ragged), *value.shape) for key, value in params.items()}
    )


def test_chunk_size_changes_no_bit(name: str, engine: str, ragged: Clients) -> None:
    if engine == "remote":
        pytest.skip("chunks are the simulator's")
    expected = usual_run(name, engine, ragged)  # all clients at once
    for chunk in CHUNKS:
        case = Federation(name, engine, ragged, chunk=chunk)
        state = case.rounds(case.init(), *cohorts(len(ragged)))
        assert same(flatten(state), flatten(expected.state))
        assert same(case.served(state), expected.served)


def test_order_of_the_cohort_changes_no_bit(name: str, engine: str, ragged: Clients) -> None:
    shuffled = Federation(name, engine, ragged)
    state = shuffled.rounds(shuffled.init(), *(cohort.flip(0) for cohort in cohorts(len(ragged))))
    assert same(usual_run(name, engine, ragged).served, shuffled.served(state))


def test_absent_clients_cost_only_themselves(name: str, engine: str, ragged: Clients) -> None:
    def absent(key: int, client: int, reply: Tree) -> Tree | None:
        return None if (key + client) % 3 == 0 else reply

    case = Federation(name, engine, ragged, faults=absent)
    state = case.rounds(case.init(), *cohorts(len(ragged)))
    assert all_finite(case.served(state))


def test_poison_is_refused(name: str, engine: str, ragged: Clients) -> None:
    def poison(key: int, client: int, reply: Tree) -> Tree | None:
        if client != 2:
            return reply
        return {
            key: torch.full_like(value, torch.nan) if value.is_floating_point() else value
            for key, value in reply.items()
        }

    case = Federation(name, engine, ragged, faults=poison)
    sent = []
    original = case.fed.map

    def spy(*args: Any, **kwargs: Any) -> Any:
        replies = original(*args, **kwargs)
        sent.append(replies)
        return replies

    case.fed.map = spy  # type: ignore[method-assign]
    state = case.rounds(case.init(), torch.arange(len(ragged)))
    assert all_finite(flatten(state))
    if case.fed.traffic.up:
        assert any(
            failure.client == 2 and "finite" in failure.reason
            for replies in sent
            for failure in replies.failures
        )


def test_nobody_answers_and_nothing_is_lost(name: str, engine: str, ragged: Clients) -> None:
    silent = False

    def answer(key: int, client: int, reply: Tree) -> Tree | None:
        return None if silent else reply

    case = Federation(name, engine, ragged, faults=answer)
    state = case.rounds(case.init(), torch.arange(len(ragged)))
    before = case.served(state)
    silent = True
    after = case.round(state, 2, torch.arange(len(ragged)))
    silent = False
    assert same(case.served(after), before)


def test_a_client_that_comes_late_and_alone_is_admitted(
    name: str, engine: str, ragged: Clients
) -> None:
    here = False

    def answer(key: int, client: int, reply: Tree) -> Tree | None:
        return reply if here or client != 2 else None

    case = Federation(name, engine, ragged, faults=answer)
    state = case.rounds(case.init(), torch.arange(len(ragged)))
    here = True
    state = case.round(state, 2, torch.tensor([2]))
    assert int(state.cluster_ids[2]) != UNKNOWN
    assert all_finite(case.served(state))


def test_late_clients_are_admitted(name: str, engine: str, ragged: Clients) -> None:
    early = replace(
        ragged,
        train=RaggedIndex(
            ragged.train.index[: int(ragged.train.offsets[3])], ragged.train.offsets[:4]
        ),
        test_part_id=ragged.test_part_id[:3],
    )
    first = Federation(name, engine, early)
    state = first.rounds(first.init(), torch.arange(3))
    later = Federation(name, engine, ragged)
    later.goes_on_from(first, 1)
    known, unknown = (
        torch.nonzero(which).flatten()
        for which in (state.cluster_ids != UNKNOWN, state.cluster_ids == UNKNOWN)
    )
    before = state.cluster_ids[known]
    state = later.method.add_clients(
        later.fed,
        state,
        torch.cat([unknown, torch.arange(3, len(ragged))]),
        key=fold_in(0, "admit"),
    )
    assert len(state.cluster_ids) == len(ragged)
    assert bool((state.cluster_ids >= 0).all())
    assert torch.equal(state.cluster_ids[known], before)
    state = later.rounds(state, torch.arange(len(ragged)), first=2)
    assert all_finite(later.served(state))


def test_state_and_memory_survive_a_checkpoint(name: str, engine: str, ragged: Clients) -> None:
    stopped, resumed = (Federation(name, engine, ragged) for _ in range(2))
    *begin, end = cohorts(len(ragged))
    half = stopped.rounds(stopped.init(), *begin)
    state = restore(resumed.method.state, flatten(half))
    resumed.goes_on_from(stopped, len(begin))
    state = resumed.rounds(state, end, first=len(begin) + 1)
    expected = usual_run(name, engine, ragged)
    assert same(flatten(state), flatten(expected.state))
    assert same(resumed.served(state), expected.served)


def test_a_round_done_again_is_the_same_round(name: str, engine: str, ragged: Clients) -> None:
    case, once = (Federation(name, engine, ragged) for _ in range(2))
    everyone = torch.arange(len(ragged))
    state = case.init()
    case.method.round(case.fed, state, everyone, fold_in(0, "round", 1))
    case.fed.client_state.rollback()
    again = case.round(state, 1, everyone)
    assert same(case.served(again), once.served(once.round(once.init(), 1, everyone)))


def test_test_data_decide_nothing(name: str, engine: str, small_digits: Clients) -> None:
    noise = replace(
        small_digits,
        x_test=torch.randn_like(small_digits.x_test),
        y_test=torch.zeros_like(small_digits.y_test),
    )
    results = []
    for clients in (small_digits, noise):
        case = Federation(name, engine, clients)
        results.append(case.served(case.rounds(case.init(), *cohorts(len(clients)))))
    assert same(*results)


def test_a_federation_of_one(name: str, engine: str, ragged: Clients) -> None:
    alone = replace(
        ragged,
        train=RaggedIndex(ragged.train.index[:5], torch.tensor([0, 5])),
        test_part_id=ragged.test_part_id[:1],
    )
    case = Federation(name, engine, alone)
    assert all_finite(case.served(case.rounds(case.init(), torch.tensor([0]), torch.tensor([0]))))


def test_a_round_costs_the_bytes_that_are_declared(name: str, engine: str, ragged: Clients) -> None:
    if "," in name:
        pytest.skip("what options cost more is declared in words")
    if engine == "remote":
        pytest.skip("a message has each model once, even if several clients of a node get it")
    case = Federation(name, engine, ragged)
    state = case.rounds(case.init(), torch.arange(len(ragged)))
    state, cohort = case.method.prepare_cohort(
        case.fed, state, torch.arange(0, len(ragged), 2), fold_in(0, "admit", 2)
    )
    symbols = case.method.cost_symbols(state)
    before = replace(case.fed.traffic)
    case.method.round(case.fed, state, cohort, fold_in(0, "round", 2))
    for declared, counted in (
        (case.method.upload_cost, case.fed.traffic.up - before.up),
        (case.method.download_cost, case.fed.traffic.down - before.down),
    ):
        assert counted == len(cohort) * evaluate_cost(declared, symbols)


def test_gives_the_same_models_as_the_simulator(name: str, engine: str, ragged: Clients) -> None:
    if engine == "simulator":
        pytest.skip("it is the simulator")
    expected, remote = (usual_run(name, which, ragged) for which in ("simulator", engine))
    assert torch.equal(expected.state.cluster_ids, remote.state.cluster_ids)
    for key, value in expected.served.items():
        torch.testing.assert_close(remote.served[key], value, rtol=1e-5, atol=1e-6)
