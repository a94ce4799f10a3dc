"""CFL beyond cases by hand: real splits of clients whose labels are exchanged, secret
coordinates, and the maths of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedclade import FedAvg, InvalidInputError, Method, Simulator
from fedclade.clustering.cfl import (
    MARGIN,
    ParameterTree,
    bisect,
    most_similar,
    noise_level,
    project,
)
from fedclade.clustering.cosine import cosine
from fedclade.core import LocalTraining, State, pytree
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import UNKNOWN
from fedclade.core.pytree import Tree
from fedclade.core.rng import fold_in
from fedclade.data import Clients, LabelSwap, load, partition
from fedclade.io.checkpoint import flatten as flatten_state
from fedclade.io.checkpoint import restore
from fedclade.methods.cfl import AUTO_EPS1, AUTO_EPS2, CFL, CFLState
from fedclade.models import MLP
from fedclade.programs.secret_parameter_order import concealed, revealed

ROUNDS = 22  # enough for two groups to part, and to be looked at again


@pytest.fixture(scope="module")
def swapped() -> Clients:
    """Eight clients in two groups, each with two different labels exchanged."""
    return partition(load("digits"), LabelSwap(clusters=2, swaps=2, samples=120), clients=8, seed=0)


class Case:
    """A method on clients, driven as the runner drives it; everything that `map` gave back is
    kept.
    """

    def __init__(self, method: Method, clients: Clients, chunk: int | None = None) -> None:
        torch.manual_seed(0)
        objective = Objective(MLP(16).build(clients.shape, 10))
        self.params = objective.params()
        self.method = method.with_local_config(
            LocalTraining(objective, lr=0.1, batch_size=10, epochs=3)
        )
        self.fed = Simulator(clients, chunk=chunk)
        self.replies: list[Tree] = []
        original = self.fed.map

        def spy(*args: Any, **kwargs: Any) -> Any:
            got = original(*args, **kwargs)
            self.replies.append(got.outputs)
            return got

        self.fed.map = spy  # type: ignore[method-assign]

    def init(self) -> State:
        return self.method.init(self.fed, self.params, key=0)

    def rounds(self, state: State, cohorts: Sequence[Tensor], first: int = 1) -> CFLState:
        for number, cohort in enumerate(cohorts, start=first):
            unknown = cohort[state.cluster_ids[cohort] == UNKNOWN]
            if len(unknown):
                state = self.method.add_clients(
                    self.fed, state, unknown, fold_in(0, "admit", number)
                )
            state = self.method.round(self.fed, state, cohort, fold_in(0, "round", number))
        return state  # type: ignore[return-value]

    def served(self, state: State) -> Tree:
        return self.method.assign_models(state, torch.arange(len(self.fed.sizes))).gather({})


def everyone(clients: Clients, rounds: int = ROUNDS) -> list[Tensor]:
    return [torch.arange(len(clients))] * rounds


def same_partition(cluster: Tensor, groups: Tensor) -> bool:
    return torch.equal(cluster[:, None] == cluster, groups[:, None] == groups)


def same(one: Tree, other: Tree) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def close(one: Tree, other: Tree, tolerance: float = 1e-6) -> bool:
    return all(torch.allclose(one[key], other[key], rtol=0, atol=tolerance) for key in one)


# ---- what it finds


def test_finds_the_groups_without_hyper_parameters(swapped: Clients) -> None:
    case = Case(CFL(), swapped)
    state = case.rounds(case.init(), everyone(swapped))
    assert swapped.groups is not None
    assert same_partition(state.cluster_ids, swapped.groups)


def test_leaves_clients_of_one_kind_together() -> None:
    alike = partition(load("digits"), LabelSwap(clusters=1, samples=120), clients=8, seed=0)
    case = Case(CFL(), alike)
    assert len(case.rounds(case.init(), everyone(alike, 25))) == 1


def test_without_a_split_it_is_fedavg(ragged: Clients) -> None:
    cohorts = [torch.arange(6), torch.tensor([4, 0, 2]), torch.arange(1, 6)]
    never, average = Case(CFL(eps1=0.0), ragged), Case(FedAvg(), ragged)
    assert close(
        never.served(never.rounds(never.init(), cohorts)),
        average.served(average.rounds(average.init(), cohorts)),
    )


def test_finds_the_groups_when_half_of_the_clients_answer(swapped: Clients) -> None:
    generator = torch.Generator().manual_seed(1)
    cohorts = [torch.randperm(8, generator=generator)[:5] for _ in range(40)]
    case = Case(CFL(), swapped)
    state = case.rounds(case.init(), cohorts)
    known = state.cluster_ids != UNKNOWN
    assert swapped.groups is not None
    assert len(state.cluster_ids.unique()) >= 2
    assert same_partition(state.cluster_ids[known], swapped.groups[known])


# ---- what it promises, while it splits (the conformance suite's few rounds do not)


EAGER = CFL(eps1=1e9, eps2=0.0, gamma_max=0.0, check_after=1, sketch=16)


def some_cohorts(clients: Clients) -> list[Tensor]:
    count = len(clients)
    return [
        torch.arange(count),
        torch.arange(0, count, 2),
        torch.arange(1, count),
        torch.arange(count),
        torch.arange(count),
    ]


def test_splits_do_not_depend_on_chunks_or_on_the_order_of_the_cohort(swapped: Clients) -> None:
    results = []
    for chunk, turn in ((None, False), (1, False), (3, True)):
        case = Case(EAGER, swapped, chunk)
        state = case.rounds(
            case.init(), [cohort.flip(0) if turn else cohort for cohort in some_cohorts(swapped)]
        )
        results.append(flatten_state(state))
    assert len(results[0]["parent"]) > 5
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_a_tree_survives_a_checkpoint(swapped: Clients) -> None:
    *begin, end = some_cohorts(swapped)
    whole, first, second = (Case(EAGER, swapped) for _ in range(3))
    expected = whole.rounds(whole.init(), [*begin, end])
    half = restore(CFLState, flatten_state(first.rounds(first.init(), begin)))
    assert same(
        flatten_state(second.rounds(half, [end], first=len(begin) + 1)), flatten_state(expected)
    )


# ---- secret coordinates


def test_secret_coordinates_change_no_decision_and_no_model(swapped: Clients) -> None:
    clear, hidden = (
        Case(CFL(check_after=2, permute=permute, secret=5), swapped) for permute in (False, True)
    )
    cohorts = [*everyone(swapped), torch.arange(0, 8, 2)]
    one, other = clear.rounds(clear.init(), cohorts), hidden.rounds(hidden.init(), cohorts)
    assert len(one) >= 3
    assert torch.equal(one.cluster_ids, other.cluster_ids)
    assert torch.equal(one.parent, other.parent)
    assert bool(one.frozen[0])  # the second look was taken, too
    assert close(clear.served(one), hidden.served(other))
    assert isinstance(clear.method, CFL)
    assert isinstance(hidden.method, CFL)
    assert close(clear.method.model_at(one, 0), hidden.method.model_at(other, 0))
    lost = torch.tensor([0, 7])
    forgotten = [
        replace(state, cluster_ids=state.cluster_ids.index_fill(0, lost, UNKNOWN))
        for state in (one, other)
    ]
    found = [
        case.method.add_clients(case.fed, state, lost, key=3).cluster_ids
        for case, state in zip((clear, hidden), forgotten, strict=True)
    ]
    assert torch.equal(found[0], one.cluster_ids)
    assert torch.equal(found[1], one.cluster_ids)


def test_the_server_sees_no_clear_coordinates(swapped: Clients) -> None:
    clear, hidden = (Case(CFL(permute=permute, secret=5), swapped) for permute in (False, True))
    states = [case.rounds(case.init(), everyone(swapped, 1)) for case in (clear, hidden)]
    sent, seen = pytree.flatten(clear.replies[0]), pytree.flatten(hidden.replies[0])
    assert (sent == seen).float().mean() < 0.01
    assert torch.allclose(
        sent.sort().values, seen.sort().values, atol=1e-6
    )  # the same numbers, in another order
    assert torch.allclose(cosine(sent), cosine(seen), atol=1e-9)
    assert torch.ne(*(pytree.flatten(state.models) for state in states)).float().mean() > 0.99


def test_a_different_secret_gives_a_different_order() -> None:
    models = {"a": torch.arange(12.0).view(2, 2, 3), "b": torch.arange(100.0, 108.0).view(2, 4)}
    one, other = concealed(models, 1), concealed(models, 2)
    assert not same(one, other)
    assert {name: value.shape for name, value in one.items()} == {
        name: value.shape for name, value in models.items()
    }
    assert same(revealed(one, 1), models)


# ---- the test for a split


def test_auto_is_relative_to_the_longest_update_of_a_cluster() -> None:
    method = CFL()
    state = CFLState.initial({"w": torch.zeros(1, 4)}, clients=3, size=4)
    ids = torch.arange(3)
    for longest, before, expected in (
        (2.0, 0.0, 2.0),
        (5.0, 0.0, 5.0),
        (3.0, 0.0, 5.0),
        (9.0, AUTO_EPS1 * 5.0, 9.0),
    ):
        assert (
            method._eps(state, 0)[0] == before
        )  # nothing is below 0: no split in the first three rounds
        state = state.trained(
            ids, torch.tensor([1.0, longest, 1.0], dtype=torch.float64), torch.zeros(3, 4)
        )
        assert float(state.scale[0]) == expected
    assert method._eps(state, 0) == (AUTO_EPS1 * 9.0, AUTO_EPS2 * 9.0)
    # A child's first round is that of the split; the other leaf keeps its own scale.
    state = state.split(0, ids, torch.tensor([False, True, True]), torch.eye(3, 4))
    state = state.trained(ids, torch.tensor([4.0, 1.0, 2.0], dtype=torch.float64), torch.eye(3, 4))
    assert (state.age.tolist(), state.scale.tolist()) == ([4, 1, 1], [9.0, 4.0, 2.0])
    assert CFL(eps1=0.5, eps2=2.0)._eps(state, 1) == (
        0.5,
        2.0,
    )  # lengths as given hold from the first round on
    assert CFL(eps1=0.5)._eps(state, 1) == (0.0, 0.0)
    assert CFL(eps1=0.5)._eps(state, 0) == (0.5, AUTO_EPS2 * 9.0)


def test_bisect_needs_small_mean_long_updates_and_distance() -> None:
    updates = torch.tensor([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.1], [-1.0, -0.1]])
    even = torch.ones(4)
    assert bisect(updates, even, eps1=0.1, eps2=0.5) is not None
    assert (
        bisect(updates, torch.tensor([3, 1, 1, 1]), eps1=0.1, eps2=0.5) is None
    )  # by examples the mean is not 0
    assert bisect(updates, even, eps1=0.1, eps2=1.1) is None
    assert bisect(updates, even, eps1=0.1, eps2=0.5, gamma_max=1.0) is None
    side = bisect(updates, even, eps1=0.1, eps2=0.5, gamma_max=0.9)
    assert side is not None
    assert side.tolist() == [False, False, True, True]


def test_noise_is_not_split_and_directions_are() -> None:
    rng = np.random.default_rng(0)
    parted = {0.0: 0, 1.0: 0}
    for signal in parted:
        for _ in range(50):
            groups = np.repeat([-1.0, 1.0], 5)
            updates = (
                rng.normal(size=(10, 200)) / np.sqrt(200)
                + signal * groups[:, None] * np.eye(200)[0]
            )
            updates -= updates.mean(0)  # at rest
            side = bisect(torch.from_numpy(updates), torch.ones(10), eps1=1e-6, eps2=0.1)
            parted[signal] += side is not None and same_partition(side, torch.from_numpy(groups))
            assert signal > 0 or side is None
    assert parted[1.0] == 50


def test_noise_level_is_that_of_the_nearest_client() -> None:
    similarity = np.array(
        [
            [1.0, 0.5, 0.2, -1.0],
            [0.5, 1.0, 0.3, -1.0],
            [0.2, 0.3, 1.0, -1.0],
            [-1.0, -1.0, -1.0, 1.0],
        ]
    )
    side = np.array([False, False, False, True])
    nearest = (0.5 + 0.5 + 0.3) / 3
    assert noise_level(similarity, side) == pytest.approx(MARGIN * np.sqrt((1 - nearest) / 2))
    assert (
        noise_level(similarity[2:, 2:], side[2:]) == 0.0
    )  # one on each side: nothing is known of the noise


# ---- the tree


def grown() -> ParameterTree:
    """Six clients; the root split into 1 and 2, 1 into 3 and 4, 2 into 5 and 6. Client 5 is always
    absent.
    """
    tree = ParameterTree.initial({"w": torch.zeros(1, 3)}, clients=6, size=3)
    corners = torch.tensor([[1.0, 1, 0], [1, -1, 0], [-1, 0, 1], [-1, 0, -1], [1, 1, 0.5]])
    tree = tree.split(0, torch.arange(5), torch.tensor([False, False, True, True, False]), corners)
    tree = tree.trained(torch.arange(5), torch.ones(5, dtype=torch.float64), corners)
    tree = tree.split(
        1, torch.tensor([0, 1, 4]), torch.tensor([False, True, False]), corners[[0, 1, 4]]
    )
    return tree.split(2, torch.tensor([2, 3]), torch.tensor([False, True]), corners[[2, 3]])


def test_reverting_one_split_keeps_the_others() -> None:
    tree = grown()
    assert (tree.cluster_ids.tolist(), tree.parent.tolist()) == (
        [3, 4, 5, 6, 3, -1],
        [-1, 0, 0, 1, 1, 2, 2],
    )
    marked = replace(tree, models={"w": torch.arange(7.0)[:, None].expand(7, 3)})
    less = marked.revert(torch.tensor([1]))
    assert (less.cluster_ids.tolist(), less.parent.tolist()) == (
        [1, 1, 3, 4, 1, -1],
        [-1, 0, 0, 2, 2],
    )
    assert less.models["w"][:, 0].tolist() == [0, 1, 2, 5, 6]
    assert sorted(less.cached_at.tolist()) == [1, 1, 1, 2, 2, 3, 4]
    assert less.members(2).tolist() == [2, 3]
    assert less.is_leaf().tolist() == [False, True, False, True, True]
    nothing = marked.revert(torch.tensor([], dtype=torch.int64))
    assert torch.equal(nothing.cluster_ids, tree.cluster_ids)


def test_updates_of_trained_clients_are_stored() -> None:
    tree, one = (
        ParameterTree.initial({"w": torch.zeros(1, 2)}, clients=5, size=2),
        torch.ones(2, dtype=torch.float64),
    )
    assert tree.with_num_clients(5) is tree
    tree = tree.trained(
        torch.tensor([1, 3]), one, torch.tensor([[1.0, 0], [0, 1]])
    ).with_num_clients(7)
    admitted = replace(tree, cluster_ids=tree.cluster_ids.index_fill(0, torch.tensor([6]), 0))
    later = admitted.trained(torch.tensor([3, 6]), one, torch.tensor([[0.0, 3], [6, 0]]))
    assert (later.latest.tolist(), later.latest_row.tolist()) == (
        [[1, 0], [0, 3], [6, 0]],
        [-1, 0, -1, 1, -1, -1, 2],
    )
    assert tree.latest.tolist() == [[1, 0], [0, 1]]  # as it was
    # 0 and 3 decide; the absent 1 and 6 go where their own latest updates point; of 2, 4 and 5
    # nothing is known.
    split = later.split(
        0, torch.tensor([0, 3]), torch.tensor([False, True]), torch.tensor([[2.0, 0], [0, 2]])
    )
    assert split.cluster_ids.tolist() == [1, 1, -1, 2, -1, -1, 1]


def test_only_complete_and_old_splits_are_checked() -> None:
    tree = replace(grown(), age=torch.tensor([9, 9, 9, 3, 3, 3, 2]))
    assert tree.unfrozen(3).tolist() == [
        False,
        True,
        False,
        False,
        False,
        False,
        False,
    ]  # 0: its children have split, 2: too young
    assert tree.unfrozen(2).tolist() == [False, True, True, False, False, False, False]
    assert not replace(tree, frozen=torch.ones(7, dtype=torch.bool)).unfrozen(2).any()


def test_the_next_node_is_a_child_of_the_node() -> None:
    tree = grown()
    update = torch.tensor([[1.0, -1.0, 0.0]]).expand(3, 3)
    assert tree.next_node(torch.tensor([0, 1, 2]), update).tolist() == [
        1,
        4,
        5,
    ]  # at node 2 both are alike: the first


def test_most_similar_is_the_obvious_one() -> None:
    generator = torch.Generator().manual_seed(0)
    updates, cached = (
        torch.randn(40, 7, generator=generator),
        torch.randn(30, 7, generator=generator),
    )
    at, cached_at = torch.arange(40) % 3, torch.arange(30) % 3
    for row, place in enumerate(most_similar(updates, at, cached, cached_at).tolist()):
        allowed = [other for other in range(30) if cached_at[other] == at[row]]
        expected = max(
            allowed,
            key=lambda other: float(torch.cosine_similarity(updates[row], cached[other], dim=0)),
        )
        assert place == expected


def test_projections_keep_cosines() -> None:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(1, 5000, generator=generator)
    updates = (
        torch.randn(12, 5000, generator=generator) + common * torch.linspace(-2, 2, 12)[:, None]
    )
    bits = torch.randint(0, 1 << 32, (5000,), generator=generator)
    error = cosine(project(updates, bits, 256)) - cosine(updates)
    assert error.abs().mean() < 1 / 16
    assert error.abs().max() < 5 / 16
    assert torch.equal(project(updates, bits, 5000), updates)
    assert project(updates[:0], bits, 256).shape == (0, 256)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eps1", -1.0),
        ("eps2", "big"),
        ("gamma_max", -0.1),
        ("linkage", "ward"),
        ("min_size", 1),
        ("sketch", 0),
    ],
)
def test_invalid_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == f"method.{field}"):
        CFL(**{field: value})  # type: ignore[arg-type]
