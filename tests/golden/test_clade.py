"""Clade's class priors on three clients of two classes, by hand, and its candidates and trunks.

Client 0 has 20 samples of class 0, client 1 has 20 of class 1, client 2 has 10 of each. Together
the classes have π = (1/2, 1/2). Two samples of different clients are of one class with the chance
Q = (30² + 30² - 1000) / (60² - 1200) = 1/3, two samples of one client with
S = (20 + 20 + 2 · 10 · 9 / 19) / 60. So (S - Q) / (1 - Q) = 14/19 and
κ = (1 - 14/19) / (14/19) = 5/14.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedclade as fc
from fedclade.clustering.class_shares import concentration
from fedclade.clustering.individuals import FEWEST
from fedclade.core import LocalTraining
from fedclade.core.federation import ClientResults
from fedclade.core.functional_model import Objective
from fedclade.data import Clients, from_arrays
from fedclade.methods._candidates import CladeState, compare_candidates, means_by_trunk
from fedclade.methods._clade_groups_state import CladeGroupsState
from fedclade.programs.class_prior import OFFSET

KAPPA = 5 / 14
OWN, OTHER = (
    math.log((n + KAPPA / 2) / ((20 + KAPPA) / 2)) for n in (20, 0)
)  # of a class of which a client has all samples, or none
OFFSETS = [[OWN, OTHER], [OTHER, OWN], [0.0, 0.0]]


def clients() -> Clients:
    generator = torch.Generator().manual_seed(0)
    labels = (torch.zeros(20), torch.ones(20), torch.arange(20) % 2)
    data = [
        (torch.randn(20, 3, generator=generator), label.long(), torch.zeros(1, 3), label[:1].long())
        for label in labels
    ]
    return from_arrays(data)


def started() -> tuple[fc.Clade, fc.Simulator, CladeState, Objective]:
    torch.manual_seed(0)
    objective = Objective(nn.Sequential(nn.Linear(3, 2)))
    # With this ratio there are no groups, whatever the signatures are.
    method = fc.Clade(noise_ratio=1e9, signature_dim=8).with_local_config(
        LocalTraining(objective, batch_size=20, lr=0.5)
    )
    fed = fc.Simulator(clients())
    fed.init_client_state(method.initial_client_state(objective.params()))
    return method, fed, method.init(fed, objective.params(), key=1), objective


def test_kappa_is_found_by_moments() -> None:
    sums = 20 + 20 + 2 * 10 * 9 / 19
    assert concentration(np.array([30.0, 30.0]), sums, 1000.0, 1200.0, 60 / 19) == pytest.approx(
        KAPPA
    )
    # All clients have 10 of each class: less alike within clients than chance has it.
    alike = concentration(np.array([30.0, 30.0]), 3 * 180 / 19, 600.0, 1200.0, 60 / 19)
    assert alike == math.inf


def test_each_client_keeps_its_offset() -> None:
    _, fed, state, _ = started()
    assert float(state.kappa) == pytest.approx(KAPPA, rel=1e-5)
    assert state.prior.tolist() == [0.5, 0.5]
    kept = fed.client_state.read(torch.arange(3))[OFFSET]
    torch.testing.assert_close(kept, torch.tensor(OFFSETS), atol=1e-4, rtol=0)


def test_a_round_trains_each_model_with_its_offset_and_sends_it_without() -> None:
    method, fed, state, objective = started()
    after = method.round(fed, state, torch.arange(3), key=2)
    weight, bias = (objective.params()[name] for name in ("0.weight", "0.bias"))
    data, sums = clients(), {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    for client in range(3):
        rows = data.train[client]
        w = weight.clone().requires_grad_()
        b = (bias + torch.tensor(OFFSETS[client])).requires_grad_()
        x = data.x[rows]
        nn.functional.cross_entropy(x @ w.T + b, data.y[rows]).backward()
        assert w.grad is not None
        assert b.grad is not None
        sums["weight"] += (w - 0.5 * w.grad).detach() / 3
        sums["bias"] += (b - 0.5 * b.grad).detach() / 3 - torch.tensor(OFFSETS[client]) / 3
    torch.testing.assert_close(after.models["0.weight"][0], sums["weight"], atol=1e-4, rtol=0)
    torch.testing.assert_close(after.models["0.bias"][0], sums["bias"], atol=1e-4, rtol=0)


def test_a_client_uses_the_model_with_its_offset() -> None:
    method, fed, state, _ = started()
    ids = torch.arange(3)
    used = fed.models_of(method.assign_models(state, ids), ids, method.personalization_program())
    shift = used["0.bias"] - state.models["0.bias"]
    torch.testing.assert_close(shift, torch.tensor(OFFSETS), atol=1e-4, rtol=0)
    assert torch.equal(used["0.weight"][0], state.models["0.weight"][0])


# --- candidates and trunks


def groups_of_three() -> CladeGroupsState:
    """Client i is in group i; the models are 10, 20 and 30."""
    models = {
        "trunk": torch.tensor([[10.0], [20.0], [30.0]]),
        "head": torch.tensor([[1.0], [2.0], [3.0]]),
    }
    one = torch.zeros(1)
    return CladeGroupsState(
        models,
        torch.arange(3),
        {"trunk": one},
        torch.tensor(0),
        torch.zeros(3, 1),
        one,
        torch.tensor(0),
    )


def opened() -> CladeState:
    """Groups 0 and 1 merged, each group alone, and all together. Clients 0 and 2 have one p(x)."""
    partitions = [torch.tensor(groups) for groups in ([0, 0, 1], [0, 1, 2], [0, 0, 0])]
    sizes, inputs = torch.tensor([1, 2, 4]), torch.tensor([0, 1, 0])
    return CladeState.opened(
        sizes, groups_of_three(), partitions, inputs, torch.ones(1), math.inf, False
    )


def test_a_candidate_continues_from_its_largest_group_and_ties_models_of_one_p_x() -> None:
    state = opened()
    assert state.candidates.tolist() == [[0, 0, 1], [2, 3, 4], [5, 5, 5]]
    # Of groups 0 and 1 together group 1 is larger; of all, group 2.
    assert state.models["head"].flatten().tolist() == [2.0, 3.0, 1.0, 2.0, 3.0, 3.0]
    assert state.cluster_ids.tolist() == [0, 0, 1]
    trunks = state.trunk_ids.tolist()
    assert trunks[2] == trunks[4]  # groups 0 and 2, in the second candidate only
    assert len(set(trunks)) == 5


def test_tied_models_share_the_mean_of_their_trunk_and_keep_their_heads() -> None:
    state = opened().with_candidates([1])  # each group alone: 0 and 2 share a trunk
    assert state.candidates.tolist() == [[0, 1, 2]]
    weights = torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64)
    sums = {
        "trunk": torch.tensor([[5.0], [0.0], [27.0]], dtype=torch.float64),
        "head": torch.tensor([[7.0], [0.0], [6.0]], dtype=torch.float64),
    }
    means = means_by_trunk(state, sums, weights, ["head"])
    assert means["trunk"].flatten().tolist() == [8.0, 20.0, 8.0]  # (5 + 27) / 4; nobody replied
    assert means["head"].flatten().tolist() == [7.0, 2.0, 2.0]


def test_a_late_client_gets_the_model_of_its_group_in_each_candidate() -> None:
    state = opened().with_num_clients(4)
    assert state.cluster_ids.tolist() == [0, 0, 1, -1]
    state = replace(state, group_ids=torch.tensor([0, 1, 2, 1])).served_by_first()
    assert state.cluster_ids.tolist() == [0, 0, 1, 0]
    assert state.with_candidates([2]).cluster_ids.tolist() == [0, 0, 0, 0]


class Scored:
    """A federation whose clients have 100 held-out samples; the scores are given."""

    def __init__(self, *right: int) -> None:
        self.right = list(right)

    def map(self, *_: object, **__: object) -> ClientResults:
        right = float(self.right.pop(0))
        sums = {"score": right, "square": right, "examples": 100.0}
        return ClientResults(
            torch.arange(3), {}, {name: torch.tensor([value]) for name, value in sums.items()}
        )


# With 100 samples the standard error of a difference is about 5 points. The candidates have 2, 3
# and 1 models.
@pytest.mark.parametrize(
    ("rounds", "grouped", "scores", "kept"),
    [
        (9, False, [], [2, 3, 1]),  # no comparison
        (10, False, [90, 80, 70], [1, 2, 3]),  # none is five standard errors behind
        (10, True, [90, 80, 70], [2, 3, 1]),
        (10, False, [90, 90, 20], [2, 3]),
        (20, False, [90, 90, 88], [1]),  # the fewest models
        (20, True, [89, 90, 88], [2]),  # the first: the merged groups
        (20, False, [80, 90, 70], [3]),  # the best, by more than a standard error
        (20, True, [80, 90, 70], [3]),
    ],
)
def test_which_candidates_remain(
    rounds: int, grouped: bool, scores: list[int], kept: list[int]
) -> None:
    assert remaining(FEWEST, rounds, grouped, scores) == kept


@pytest.mark.parametrize(
    ("rounds", "scores", "kept"),
    [(10, [70, 80, 90], [1, 3, 2]), (20, [89, 90, 88], [3]), (20, [90, 90, 88], [2])],
)
def test_of_few_clients_the_best_candidate_remains(
    rounds: int, scores: list[int], kept: list[int]
) -> None:
    for grouped in (False, True):
        assert remaining(FEWEST - 1, rounds, grouped, scores) == kept


def remaining(clients: int, rounds: int, grouped: bool, scores: list[int]) -> list[int]:
    """The numbers of models of the candidates that remain, in their order."""
    state = replace(
        opened(),
        group_ids=torch.arange(clients) % 3,
        rounds=torch.tensor(rounds),
        grouped=torch.tensor(grouped),
    )
    after = compare_candidates(Scored(*scores), state, ["trial"], 0)  # type: ignore[arg-type, list-item]
    return [len(set(candidate.tolist())) for candidate in after.candidates]


def test_a_candidate_counts_as_its_better_trial() -> None:
    state = replace(opened(), rounds=torch.tensor(20))
    # As they are, and after own epochs: one model for all gains most.
    scores = Scored(85, 85, 86, 86, 50, 99)
    after = compare_candidates(scores, state, ["as it is", "tuned"], 0)  # type: ignore[arg-type, list-item]
    assert after.candidates.tolist() == [[0, 0, 0]]


def test_without_held_out_samples_the_candidates_stay() -> None:
    class Silent(Scored):
        def map(self, *_: object, **__: object) -> ClientResults:
            return ClientResults(torch.arange(0), {})

    state = replace(opened(), rounds=torch.tensor(20))
    assert len(compare_candidates(Silent(), state, ["trial"], 0).candidates) == 3  # type: ignore[arg-type, list-item]
