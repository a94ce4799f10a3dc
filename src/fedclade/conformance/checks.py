"""The checks that every method passes on every engine."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from fedclade.conformance.example_clients import first_clients, ragged_clients, small_digits
from fedclade.conformance.method_run import MethodUnderTest, cohorts_of
from fedclade.core.cost_formula import evaluate_cost
from fedclade.core.inputs import map_inputs
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.pytree import Tree, tree_map
from fedclade.core.rng import fold_in
from fedclade.errors import FedcladeError
from fedclade.io.checkpoint import flatten, restore
from fedclade.methods import METHODS
from fedclade.methods.base import Method, Needs, hyperparameters

CHUNKS = (1, 2, 5)
RTOL, ATOL = 1e-5, 1e-6  # of models on two engines


class ConformanceError(FedcladeError, AssertionError):
    """A method does not pass a check. `field` is the name of the check."""


class NotApplicableError(Exception):
    """A check does not apply to this method or engine."""


@dataclass(frozen=True)
class Check:
    """One check of a method.

    Args:
        name: the name that reports show.
        description: what a method that passes does, in one line.
        run: raises `ConformanceError` if the method fails, and `NotApplicableError` if the check
            does not apply. Any other exception is a failure too.
    """

    name: str
    description: str
    run: Callable[[MethodUnderTest], None]


CHECKS: list[Check] = []


def _check(description: str) -> Callable[[Callable[[MethodUnderTest], None]], Check]:
    """Add a function to CHECKS under its own name."""

    def add(run: Callable[[MethodUnderTest], None]) -> Check:
        check = Check(run.__name__, description, run)
        CHECKS.append(check)
        return check

    return add


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ConformanceError(problem)


def _only_on(method: MethodUnderTest, engine: str, reason: str) -> None:
    if method.engine != engine:
        raise NotApplicableError(reason)


def is_same(first: Tree, second: Tree) -> bool:
    """Whether two trees have the same names and the same bits."""
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def _is_finite(tree: Tree) -> bool:
    return all(
        bool(torch.isfinite(value).all()) for value in tree.values() if value.is_floating_point()
    )


def _different(first: Tree, second: Tree) -> str:
    """The names of the entries that differ, for messages."""
    names = [
        name
        for name in {**first, **second}
        if name not in first or name not in second or not torch.equal(first[name], second[name])
    ]
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


@_check("The class declares its name, title, paper, what clients disclose and a docstring.")
def is_declared(method: MethodUnderTest) -> None:
    kind = type(method.method)
    missing = [
        name
        for name in ("name", "title", "paper", "client_disclosure", "server_visibility")
        if not getattr(kind, name, "")
    ]
    _require(
        not missing,
        f"missing: {', '.join(missing)}. Define them as class variables; @fc.register sets name.",
    )
    _require(
        METHODS.get(kind.name) is kind,
        f"no method '{kind.name}' is registered: use @fc.register('method', '{kind.name}').",
    )
    _require(
        kind.server_visibility in get_args(Needs),
        f"server_visibility = '{kind.server_visibility}': must be one of"
        f" {', '.join(get_args(Needs))}.",
    )
    # A dataclass without a docstring gets its signature as one.
    text = inspect.getdoc(kind) or ""
    _require(
        bool(text) and not text.startswith(f"{kind.__name__}("),
        "the class has no docstring: describe the method and map the paper's symbols.",
    )


@_check("After training every client has a model with finite weights.")
def every_client_has_a_finite_model(method: MethodUnderTest) -> None:
    served, run = method.plain_run().served, method.start()
    names = run.served_objective().names
    _require(
        served.keys() == set(names),
        f"assign_models gives the parameters {sorted(served)}, but the model has {sorted(names)}.",
    )
    clients = len(run.clients)
    rows = {len(value) for value in served.values()}
    _require(rows == {clients}, f"assign_models gives {rows} rows for {clients} clients.")
    _require(_is_finite(served), "some weights are NaN or infinite.")
    initial = tree_map(lambda value: value.expand(clients, *value.shape), run.params)
    if served.keys() != initial.keys():
        initial = run.served(run.init())
    _require(not is_same(served, initial), "no client's model changed in three rounds.")


@_check("init, round and add_clients return a new state and leave the old one unchanged.")
def state_is_not_changed_in_place(method: MethodUnderTest) -> None:
    run = method.start()
    state = run.init()
    for number, cohort in enumerate(cohorts_of(len(run.clients)), start=1):
        before = tree_map(torch.clone, flatten(state))
        after = run.round(state, number, cohort)
        _require(
            is_same(flatten(state), before),
            f"round changed {_different(flatten(state), before)} of the state that it received:"
            " copy tensors first, or use functions that return a new tensor, such as index_copy.",
        )
        state = after


@_check("Random numbers depend on `key` only, not on the generators of torch, numpy or random.")
def randomness_comes_from_the_key(method: MethodUnderTest) -> None:
    served = []
    for seed in (1, 2):
        with _global_seed(seed):
            served.append(method.run(method.start).served)
    _require(
        is_same(*served),
        "two runs with the same key differ: derive random numbers from `key`, with"
        " fedclade.core.fold_in, client_keys and uniform.",
    )


@contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Seed the global generators, and restore them afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@_check("The number of clients in one step (engine.chunk) changes no bit.")
def chunk_size_changes_nothing(method: MethodUnderTest) -> None:
    _only_on(method, "simulator", "only the simulator has chunks")
    expected = method.plain_run()  # all clients in one chunk
    for chunk in CHUNKS:
        outcome = method.run(lambda chunk=chunk: method.start(chunk=chunk))  # type: ignore[misc]
        _require(
            is_same(flatten(outcome.state), flatten(expected.state))
            and is_same(outcome.served, expected.served),
            f"engine.chunk = {chunk} changes the result: a program must not depend on which"
            " clients run together.",
        )


@_check("The order of the clients in a cohort changes no bit.")
def cohort_order_changes_nothing(method: MethodUnderTest) -> None:
    run = method.start()
    flipped = [cohort.flip(0) for cohort in cohorts_of(len(run.clients))]
    served = run.served(run.rounds(run.init(), *flipped))
    _require(
        is_same(method.plain_run().served, served),
        "a cohort in another order gives another result: sort the cohort first, or use sums"
        " (`reduce=`).",
    )


@_check("The learning rate of each round is used, also after it changed.")
def learning_rate_may_change(method: MethodUnderTest) -> None:
    _only_on(method, "simulator", "the nodes keep their own objective")

    def served(new_objective: bool) -> Tree:
        run = method.start()
        everyone = torch.arange(len(run.clients))
        state = run.round(run.init(), 1, everyone)
        run.with_lr(0.01, new_objective)
        return run.served(run.round(state, 2, everyone))

    _require(
        is_same(served(new_objective=False), served(new_objective=True)),
        "a program uses the learning rate of an earlier round: its functions must read"
        " broadcast['lr'], not local.lr, since they are cached.",
    )


@_check("Clients that do not reply do no harm to the models.")
def absent_clients_do_no_harm(method: MethodUnderTest) -> None:
    def absent(key: int, client: int, reply: Tree) -> Tree | None:
        return None if (key + client) % 3 == 0 else reply

    run = method.start(faults=absent)
    state = run.rounds(run.init(), *cohorts_of(len(run.clients)))
    _require(_is_finite(run.served(state)), "weights are NaN or infinite if clients are absent.")


@_check("A reply with NaN is rejected and reaches no model.")
def invalid_replies_do_no_harm(method: MethodUnderTest) -> None:
    def invalid(key: int, client: int, reply: Tree) -> Tree | None:
        if client != 2:
            return reply
        return tree_map(
            lambda value: torch.full_like(value, torch.nan) if value.is_floating_point() else value,
            reply,
        )

    run = method.start(faults=invalid)
    state = run.rounds(run.init(), torch.arange(len(run.clients)))
    _require(_is_finite(flatten(state)), "one client's NaN is in the state.")
    rejected = any(failure.client == 2 and failure.rejected for failure in run.fed.pop_failures())
    _require(rejected or not run.fed.traffic.up, "the reply with NaN was not rejected.")


@_check("A round in which no client replies changes no client's model.")
def silent_round_changes_nothing(method: MethodUnderTest) -> None:
    silent = False

    def answer(key: int, client: int, reply: Tree) -> Tree | None:
        return None if silent else reply

    run = method.start(faults=answer)
    everyone = torch.arange(len(run.clients))
    state = run.rounds(run.init(), everyone)
    before = run.served(state)
    silent = True
    after = run.round(state, 2, everyone)
    silent = False
    _require(
        is_same(run.served(after), before),
        "models change although no client replied: return the old state if results.ids is empty.",
    )


@_check("A client that missed all earlier phases can take part alone.")
def late_client_joins_alone(method: MethodUnderTest) -> None:
    available = False

    def answer(key: int, client: int, reply: Tree) -> Tree | None:
        return reply if available or client != 2 else None

    run = method.start(faults=answer)
    state = run.rounds(run.init(), torch.arange(len(run.clients)))
    available = True
    state = run.round(state, 2, torch.tensor([2]))
    _require(int(state.cluster_ids[2]) != UNKNOWN, "add_clients gave the client no cluster.")
    _require(_is_finite(run.served(state)), "some weights are NaN or infinite.")


@_check("Clients that join later get a cluster, and the others keep theirs.")
def new_clients_are_added(method: MethodUnderTest) -> None:
    everyone = ragged_clients()
    first = method.start(first_clients(everyone, 3))
    state = first.rounds(first.init(), torch.arange(3))
    later = method.start(everyone)
    later.continue_from(first, 1)
    known, unknown = (
        torch.nonzero(which).flatten()
        for which in (state.cluster_ids != UNKNOWN, state.cluster_ids == UNKNOWN)
    )
    before = state.cluster_ids[known]
    joining = torch.cat([unknown, torch.arange(3, len(everyone))])
    state = later.method.add_clients(later.view, state, joining, key=fold_in(0, "admit"))
    _require(
        len(state.cluster_ids) == len(everyone),
        "add_clients must return a state with all clients: use"
        " state.with_num_clients(len(fed.sizes)).",
    )
    _require(bool((state.cluster_ids >= 0).all()), "add_clients left a client without a cluster.")
    _require(
        torch.equal(state.cluster_ids[known], before),
        "add_clients moved clients that had a cluster.",
    )
    state = later.rounds(state, torch.arange(len(everyone)), first=2)
    _require(_is_finite(later.served(state)), "some weights are NaN or infinite.")


@_check("A run that continues from a checkpoint gives the same bits as one without a stop.")
def run_can_be_resumed(method: MethodUnderTest) -> None:
    stopped, resumed = method.start(), method.start()
    *before, last = cohorts_of(len(stopped.clients))
    half = stopped.rounds(stopped.init(), *before)
    state: State = restore(resumed.method.state, flatten(half))
    resumed.continue_from(stopped, len(before))
    state = resumed.rounds(state, last, first=len(before) + 1)
    expected = method.plain_run()
    advice = (
        "keep everything that a round needs in tensors of the state (class variable `state`) or in"
        " the clients' state (`initial_client_state`), never in the method or its module."
    )
    _require(
        is_same(flatten(state), flatten(expected.state)),
        f"a resumed run differs in {_different(flatten(state), flatten(expected.state))}: {advice}",
    )
    _require(is_same(resumed.served(state), expected.served), f"a resumed run differs: {advice}")


@_check("A round that is rolled back and repeated gives the same bits.")
def round_can_be_repeated(method: MethodUnderTest) -> None:
    run, once = method.start(), method.start()
    everyone = torch.arange(len(run.clients))
    state = run.init()
    run.method.round(run.view, state, everyone, fold_in(0, "round", 1))
    run.fed.client_state.rollback()
    repeated = run.round(state, 1, everyone)
    _require(
        is_same(run.served(repeated), once.served(once.round(once.init(), 1, everyone))),
        "the second attempt at a round differs: a round may change nothing but the state that it"
        " returns and the clients' state.",
    )


@_check("The clients' test data have no influence on the models.")
def uses_no_test_data(method: MethodUnderTest) -> None:
    clients = small_digits()
    generator = torch.Generator().manual_seed(0)
    noise = replace(
        clients,
        x_test=map_inputs(lambda x: torch.randn(x.shape, generator=generator), clients.x_test),
        y_test=torch.zeros_like(clients.y_test),
    )
    served = []
    for data in (clients, noise):
        run = method.start(data)
        served.append(run.served(run.rounds(run.init(), *cohorts_of(len(data)))))
    _require(is_same(*served), "other test data give other models: train on training data only.")


@_check("A federation of one client can be trained.")
def one_client_is_enough(method: MethodUnderTest) -> None:
    run = method.start(first_clients(ragged_clients(), 1))
    alone = torch.tensor([0])
    _require(
        _is_finite(run.served(run.rounds(run.init(), alone, alone))),
        "some weights are NaN or infinite.",
    )


@_check("A round sends as many bytes as upload_cost and download_cost declare.")
def traffic_is_as_declared(method: MethodUnderTest) -> None:
    _only_on(method, "simulator", "a message has each model once, also for several clients")
    if not _has_default_options(method.method):
        raise NotApplicableError("costs are declared for the default options")
    run = method.start()
    state = run.rounds(run.init(), torch.arange(len(run.clients)))
    state, cohort = run.method.prepare_cohort(
        run.view, state, torch.arange(0, len(run.clients), 2), fold_in(0, "admit", 2)
    )
    symbols, before = run.method.cost_symbols(state), replace(run.fed.traffic)
    run.method.round(run.view, state, cohort, fold_in(0, "round", 2))
    for name, counted in (
        ("upload_cost", run.fed.traffic.up - before.up),
        ("download_cost", run.fed.traffic.down - before.down),
    ):
        declared = evaluate_cost(getattr(run.method, name), symbols)
        _require(
            counted == len(cohort) * declared,
            f"{name} = '{getattr(run.method, name)}' is {declared:,} bytes for each client, but a"
            f" round sent {counted / len(cohort):,.0f}.",
        )


def _has_default_options(method: Method) -> bool:
    return all(getattr(method, field.name) == field.default for field in hyperparameters(method))


@_check("Nodes that are reached by messages, as on Flower, give the models of the simulator.")
def nodes_give_the_same_models(method: MethodUnderTest) -> None:
    _only_on(method, "remote", "it compares the other engine with the simulator")
    expected, remote = method.on("simulator").plain_run(), method.plain_run()
    _require(
        torch.equal(expected.state.cluster_ids, remote.state.cluster_ids),
        "clients have other clusters than in the simulator.",
    )
    for name, value in expected.served.items():
        _require(
            _is_close(remote.served[name], value),
            f"the parameter '{name}' differs from that of the simulator.",
        )


@_check("Workers that share the clients, as with --engine ray, give the simulator's bytes.")
def shards_give_the_same_bytes(method: MethodUnderTest) -> None:
    _only_on(method, "sharded", "it compares the other engine with the simulator")
    expected, sharded = method.on("simulator").plain_run(), method.plain_run()
    for first, second in (
        (flatten(expected.state), flatten(sharded.state)),
        (expected.served, sharded.served),
    ):
        _require(
            is_same(first, second),
            f"{_different(first, second)} differ from the simulator's: a program must not depend on"
            " which clients run together.",
        )


def _is_close(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.allclose(first, second, rtol=RTOL, atol=ATOL)
