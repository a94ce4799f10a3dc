"""A method without its special part is FedAvg: exactly if the arithmetic is the same, else within
1e-6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad

from fedclade import (
    IFCA,
    SCAFFOLD,
    FedAvg,
    FedEM,
    FedNova,
    FedProx,
    KNNPer,
    LGFedAvg,
    Method,
    PerFedAvg,
    Simulator,
)
from fedclade.core import LocalTraining, Program
from fedclade.core.federation import Federation
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import State
from fedclade.core.program import natively_batched
from fedclade.core.pytree import Tree, stack, tree_map
from fedclade.core.rng import fold_in
from fedclade.data import Clients, from_arrays
from fedclade.methods.fedavg import fedavg_round
from fedclade.methods.per_fedavg import meta_sgd

Cohorts = Sequence[Sequence[int]]


@lru_cache(maxsize=1)
def objective() -> Objective:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Objective(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


def clients_of(sizes: Sequence[int], seed: int) -> Clients:
    generator = torch.Generator().manual_seed(seed)
    return from_arrays(
        [
            (torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator))
            for n in sizes
        ]
    )


def trained(method: Method, clients: Clients, cohorts: Cohorts, **local: float) -> Tree:
    """The models that all clients use after these rounds."""
    bound = method.with_local_config(
        LocalTraining(objective(), **{"lr": 0.3, "batch_size": 4, **local})
    )  # type: ignore[arg-type]
    fed, params = Simulator(clients), objective().params()
    fed.init_client_state(bound.initial_client_state(params))
    state = bound.init(fed, params, key=fold_in(0, "init"))
    for number, cohort in enumerate(cohorts, start=1):
        state = bound.round(fed, state, torch.tensor(cohort), key=fold_in(0, "round", number))
        fed.client_state.commit(number)
    ids = torch.arange(len(clients))
    state, _ = Method.prepare_cohort(bound, fed, state, ids, key=1)
    return bound.assign_models(state, ids).gather(fed.client_state.read(ids))


def difference(one: Tree, other: Tree) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@st.composite
def federations(
    draw: st.DrawFn, equal_steps: bool = False
) -> tuple[Clients, Cohorts, dict[str, float]]:
    count = draw(st.integers(1, 4))
    size = (
        st.integers(5, 8) if equal_steps else st.integers(1, 13)
    )  # 5 to 8 samples are two batches of 4
    sizes = draw(st.lists(size, min_size=count, max_size=count))
    cohort = st.lists(st.sampled_from(range(count)), min_size=1, unique=True)
    cohorts = draw(st.lists(cohort, min_size=1, max_size=3))
    local = {
        "epochs": draw(st.integers(1, 2)),
        "momentum": draw(st.sampled_from([0.0, 0.6])),
        "weight_decay": draw(st.sampled_from([0, 0.01])),
    }
    return clients_of(sizes, draw(st.integers(0, 100))), cohorts, local


Case = tuple[Clients, Cohorts, dict[str, float]]
few = settings(max_examples=15, deadline=None)


@few
@given(federations())
def test_fedprox_without_its_term(case: Case) -> None:
    clients, cohorts, local = case
    assert (
        difference(
            trained(FedProx(mu=0.0), clients, cohorts, **local),
            trained(FedAvg(), clients, cohorts, **local),
        )
        == 0
    )


@few
@given(federations(equal_steps=True))
def test_fednova_with_equal_steps(case: Case) -> None:
    clients, cohorts, local = case
    assert (
        difference(
            trained(FedNova(), clients, cohorts, **local),
            trained(FedAvg(), clients, cohorts, **local),
        )
        < 1e-6
    )


@few
@given(federations())
def test_scaffold_in_its_first_round(case: Case) -> None:
    clients, cohorts, local = case
    assert (
        difference(
            trained(SCAFFOLD(), clients, cohorts[:1], **local),
            trained(FedAvg(), clients, cohorts[:1], **local),
        )
        < 1e-6
    )


@few
@given(federations())
def test_ifca_with_one_model(case: Case) -> None:
    clients, cohorts, local = case
    plain = trained(FedAvg(), clients, cohorts, **local)
    for method in (
        IFCA(clusters=1),
        IFCA(clusters=1, warm_up=1),
        IFCA(clusters=1, shared_layers="trunk"),
    ):
        assert difference(trained(method, clients, cohorts, **local), plain) == 0


@few
@given(federations())
def test_fedem_with_one_model(case: Case) -> None:
    clients, cohorts, local = case
    mixed = trained(FedEM(components=1), clients, cohorts, **local)
    start = "components.0."
    models = {n.removeprefix(start): v for n, v in mixed.items() if n.startswith(start)}
    assert difference(models, trained(FedAvg(), clients, cohorts, **local)) == 0


@few
@given(federations())
def test_knn_per_with_no_sample_held_out(case: Case) -> None:
    clients, cohorts, local = case
    mixed = trained(KNNPer(hold_out=False), clients, cohorts, **local)
    models = {n.removeprefix("model."): v for n, v in mixed.items() if n.startswith("model.")}
    assert difference(models, trained(FedAvg(), clients, cohorts, **local)) == 0


@few
@given(federations())
def test_lg_fedavg_with_no_local_layers(case: Case) -> None:
    clients, cohorts, local = case
    assert (
        difference(
            trained(LGFedAvg(local_layers=()), clients, cohorts, **local),
            trained(FedAvg(), clients, cohorts, **local),
        )
        == 0
    )


class OnSecondBatches(FedAvg):
    """FedAvg whose clients leave out the first batch of every pair."""

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        plain = sgd(self.local)

        @natively_batched  # as PerFedAvg's step does: the same arithmetic, to the bit
        def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
            return plain.step(broadcast, const, carry, batch.member(1))

        return fedavg_round(
            fed,
            replace(plain, step=step, batches=replace(plain.batches, group=2)),
            state,
            cohort,
            key,
        )


@few
@given(federations())
def test_per_fedavg_with_alpha_zero_is_fedavg_on_its_second_batches(case: Case) -> None:
    clients, cohorts, local = case
    assert (
        difference(
            trained(PerFedAvg(alpha=0.0), clients, cohorts, **local),
            trained(OnSecondBatches(), clients, cohorts, **local),
        )
        == 0
    )


@few
@given(federations(), st.sampled_from(["examples", "clients"]), st.sampled_from([1, 2]))
def test_scaffolds_c_is_the_mean_of_all_control_variates(
    case: Case, weights: str, option: int
) -> None:
    clients, cohorts, local = case
    bound = SCAFFOLD(weights=weights, option=option).with_local_config(
        LocalTraining(objective(), lr=0.1, batch_size=4, **local)
    )  # type: ignore[arg-type]
    fed, params = Simulator(clients), objective().params()
    fed.init_client_state(bound.initial_client_state(params))
    state = bound.init(fed, params, key=0)
    for number, cohort in enumerate(cohorts, start=1):
        state = bound.round(fed, state, torch.tensor(cohort), key=number)
        fed.client_state.commit(number)
    p = clients.sizes.double() if weights == "examples" else torch.ones(len(clients)).double()
    own = fed.client_state.read(torch.arange(len(clients)))
    means = tree_map(lambda value: torch.tensordot(p / p.sum(), value.double(), 1), own)
    assert difference(tree_map(Tensor.double, state.c), means) < 1e-5  # type: ignore[attr-defined]


def a_group(parts: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = (
        torch.randn(parts, 4, 4, generator=generator),
        torch.randint(0, 3, (parts, 4), generator=generator),
    )
    return Batch(x, y, torch.ones(parts, 4), torch.tensor(0))


def loss_at(w: Tree, batch: Batch, part: int) -> Tensor:
    outputs = torch.func.functional_call(objective().module, w, (batch.x[part],))
    return nn.functional.cross_entropy(outputs, batch.y[part])


def one_step(program: Program, batch: Batch) -> Tree:
    carry = program.start({}, objective().params(), {})[1]
    settings = {name: torch.tensor(value) for name, value in program.hyperparams.items()}
    return program.finish({}, {}, program.step(settings, {}, carry, batch))[0]


def test_per_fedavgs_two_gradients_are_those_of_autograd() -> None:
    batch, alpha, beta = a_group(2), 0.3, 0.1
    w = tree_map(lambda value: value.requires_grad_(), objective().params())
    first = torch.autograd.grad(loss_at(w, batch, 0), list(w.values()))
    ahead = {
        name: (value - alpha * g).detach().requires_grad_()
        for (name, value), g in zip(w.items(), first, strict=True)
    }
    second = torch.autograd.grad(loss_at(ahead, batch, 1), list(ahead.values()))
    expected = {
        name: value.detach() - beta * g for (name, value), g in zip(w.items(), second, strict=True)
    }
    got = one_step(meta_sgd(LocalTraining(objective(), lr=beta), alpha, "first-order"), batch)
    assert difference(got, expected) < 1e-6


def test_the_hessian_free_variant_is_the_full_meta_gradient_where_its_batches_are_one() -> None:
    single, alpha, beta = a_group(1), 0.3, 0.1
    batch = Batch(*(value.expand(3, *value.shape[1:]) for value in single[:3]), single.key)
    w = objective().params()

    def meta(w: Tree) -> Tensor:
        ahead = tree_map(lambda value, g: value - alpha * g, w, grad(loss_at)(w, batch, 0))
        return loss_at(ahead, batch, 1)

    expected = tree_map(lambda value, g: value - beta * g, w, grad(meta)(w))
    got = one_step(meta_sgd(LocalTraining(objective(), lr=beta), alpha, "hessian-free"), batch)
    assert difference(got, expected) < 1e-4
    plain = one_step(
        meta_sgd(LocalTraining(objective(), lr=beta), alpha, "first-order"),
        Batch(*(v[:2] for v in batch[:3]), batch.key),
    )
    assert difference(plain, expected) > 1e-4  # the effect of the second derivative


def test_ifcas_models_have_one_distribution_and_differ() -> None:
    clients = clients_of([3, 4], 0)
    bound = IFCA(clusters=3, num_restarts=2).with_local_config(LocalTraining(objective()))
    params = objective().params()
    models = bound.init(Simulator(clients), params, key=5).models
    for name, value in models.items():
        flat = value.flatten(1)
        assert torch.equal(
            flat.sort().values, stack([params])[name].flatten(1).sort().values.expand_as(flat)
        )
        assert torch.equal(value[0], params[name])
    assert len(torch.unique(models["0.weight"].flatten(1), dim=0)) == 6
