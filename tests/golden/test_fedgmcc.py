"""FedGMCC worked by hand, with straight paths.

The model is one number w, the loss (w x - y)², so a full-batch step with lr = 0.1 is w <- w - 0.2 x
(w x - y). From w = 0:
client 0, one sample (1, 2):    w = 0.4
client 1, two samples (1, 3):   w = 0.6
client 2, three samples (2, 3): w = 1.2

On a straight path the outputs of w_k and w_l differ by (w_k - w_l) x, those of γ(u) and w_k by u
times that, and those of γ(u) and w_l by 1 - u times that. The loss at u is
½ (u² + (1 - u)²) (w_k - w_l)² E x². At u = 1/16, 3/16, …, 15/16 the mean of u², and of (1 - u)², is
85/256. So the scores are 85/256 E x² times (w_k - w_l)². In the first round (w_k - w_l)² is 0.04,
0.64, 0.36 for the pairs (0, 1), (0, 2), (1, 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedclade import InvalidInputError, Simulator
from fedclade.clustering.mode_connectivity import Paths
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import UNKNOWN
from fedclade.core.pytree import Tree
from fedclade.data import from_arrays
from fedclade.methods.fedgmcc import FedGMCC, FedGMCCState


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs[:, 0] - y) ** 2


class Case:
    """FedGMCC on the three clients."""

    def __init__(self, absent: Sequence[int] = (), **options: float) -> None:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        self.objective = Objective(model, squared)
        method = FedGMCC(curve_steps=0, input_shape=(1,), **options)  # type: ignore[arg-type]
        self.method = method.with_local_config(LocalTraining(self.objective, lr=0.1, batch_size=10))
        samples = [(1, 1.0, 2.0), (2, 1.0, 3.0), (3, 2.0, 3.0)]
        clients = from_arrays([(torch.full((n, 1), x), torch.full((n,), y)) for n, x, y in samples])
        self.fed = Simulator(clients, faults=self._answer)
        self.absent = set(absent)
        self.state: FedGMCCState = self.method.init(self.fed, self.objective.params(), key=0)  # type: ignore[assignment]

    def _answer(self, key: int, client: int, reply: Tree) -> Tree | None:
        return None if client in self.absent else reply

    def round(self, *cohort: int) -> None:
        self.state = self.method.round(self.fed, self.state, torch.tensor(cohort), key=len(cohort))  # type: ignore[assignment]

    def served(self) -> list[float]:
        """The model of each client, a number."""
        weights: Tensor = self.method.assign_models(self.state, torch.arange(3)).gather({})[
            "weight"
        ]
        return weights.flatten().tolist()


def test_scores() -> None:
    case = Case()
    x = case.method.inputs(case.state)
    assert x.shape == (128, 1)
    weights = {"weight": torch.tensor([0.4, 0.6, 1.2])[:, None, None]}
    scale = 85 / 256 * float((x**2).mean())
    assert Paths(case.objective.outputs, weights, x, steps=0).scores().tolist() == pytest.approx(
        [0.04 * scale, 0.64 * scale, 0.36 * scale], rel=1e-5
    )


def test_the_closest_pair_is_a_cluster_and_the_third_client_stays_alone() -> None:
    case = Case(percentile=25)
    case.round(0, 1, 2)
    # The 25th percentile of 0.04, 0.36, 0.64 is halfway between the first two, 0.20. Sizes have no
    # effect.
    assert case.state.cluster_ids.tolist() == [0, 0, 1]
    assert case.served() == pytest.approx([0.5, 0.5, 1.2], abs=1e-6)
    assert float(case.state.percentile) == 30
    case.round(0, 1, 2)
    # From 0.5: 0.5 - 0.2 (0.5 - 2) = 0.8, 0.5 - 0.2 (0.5 - 3) = 1.0; from 1.2: 1.2 - 0.4 (2.4 - 3)
    # = 1.44. Squares of differences: 0.04, 0.4096, 0.1936; the 30th percentile is 0.04 + 0.6
    # (0.1936 - 0.04). The partition is the same as before: the percentile stays.
    assert case.served() == pytest.approx([0.9, 0.9, 1.44], abs=1e-6)
    assert (bool(case.state.settled), float(case.state.percentile)) == (True, 30)
    case.round(0, 1, 2)
    # 0.9 - 0.2 (0.9 - 2) = 1.12, 0.9 - 0.2 (0.9 - 3) = 1.32, 1.44 - 0.4 (2.88 - 3) = 1.488; squares
    # 0.04, 0.1354, 0.0282. Now clients 1 and 2 are the closest pair, and the percentile still
    # stays.
    assert case.state.cluster_ids.tolist() == [0, 1, 1]
    assert case.served() == pytest.approx([1.12, 1.404, 1.404], abs=1e-6)
    assert float(case.state.percentile) == 30


def test_one_cluster_then_two() -> None:
    case = Case()
    case.round(0, 1, 2)
    # The median is 0.36: clients 0 and 2 are connected through client 1.
    w = (0.4 + 0.6 + 1.2) / 3
    assert case.state.cluster_ids.tolist() == [0, 0, 0]
    assert case.served() == pytest.approx([w] * 3, abs=1e-6)
    assert float(case.state.percentile) == 45
    case.round(0, 1, 2)
    first, second, third = w - 0.2 * (w - 2), w - 0.2 * (w - 3), w - 0.4 * (2 * w - 3)
    # 0.987, 1.187, 1.347; squares 0.04, 0.1296, 0.0256; the 45th percentile is 0.0256 + 0.9 (0.04 -
    # 0.0256), less than 0.04.
    assert case.state.cluster_ids.tolist() == [0, 1, 1]
    assert case.served() == pytest.approx(
        [first, (second + third) / 2, (second + third) / 2], abs=1e-6
    )
    assert (bool(case.state.settled), float(case.state.percentile)) == (False, 50)


@pytest.mark.parametrize(("percentile", "clusters"), [(2, [0, 0, 1]), (100, [0, 0, 0])])
def test_a_fixed_percentile_stays(percentile: float, clusters: list[int]) -> None:
    case = Case(percentile=percentile, step=0)
    case.round(0, 1, 2)
    assert case.state.cluster_ids.tolist() == clusters
    assert float(case.state.percentile) == percentile
    case.round(0, 1)  # one cluster
    assert float(case.state.percentile) == percentile


def test_the_percentile_ends_at_5_and_95() -> None:
    case = Case(percentile=7)
    case.round(0, 1)  # two clients are one pair, whose score is every percentile
    assert (case.state.cluster_ids[:2].tolist(), float(case.state.percentile)) == ([0, 0], 5)
    case = Case(percentile=20, step=90)
    case.round(0, 1, 2)
    assert float(case.state.percentile) == 95


def test_an_absent_client_keeps_its_model() -> None:
    case = Case(percentile=25)
    case.round(0, 1, 2)
    case.absent = {0}
    case.round(0, 1, 2)
    # One pair is left, and it is a cluster: 1.0 and 1.44 as above. The row of client 2 is removed.
    assert case.served() == pytest.approx([0.5, 1.22, 1.22], abs=1e-6)
    assert len(case.state) == 2


def test_a_single_client_keeps_its_weights_and_does_not_change_the_percentile() -> None:
    case = Case()
    case.round(1)
    assert case.served() == pytest.approx([0, 0.6, 0], abs=1e-6)
    assert float(case.state.percentile) == 50


def test_a_round_without_replies_changes_nothing() -> None:
    case = Case(percentile=25)
    case.round(0, 1, 2)
    before, case.absent = case.served(), {0, 1, 2}
    case.round(0, 1, 2)
    assert case.served() == before
    assert float(case.state.percentile) == 30


def test_a_late_client_gets_the_model_with_the_least_loss() -> None:
    case = Case(percentile=25)
    case.round(0, 1, 2)
    late = torch.tensor([0, 2])
    case.state = replace(
        case.state, cluster_ids=case.state.cluster_ids.index_fill(0, late, UNKNOWN)
    )
    state, cohort = case.method.prepare_cohort(case.fed, case.state, torch.arange(3), key=1)
    # Models 0.5 and 1.2. Client 0: (0.5 - 2)² = 2.25, (1.2 - 2)² = 0.64. Client 2: (1 - 3)² = 4,
    # (2.4 - 3)² = 0.36.
    assert state.cluster_ids.tolist() == [1, 0, 1]
    assert cohort.tolist() == [0, 1, 2]


def test_one_model_is_sent_each_way() -> None:
    case = Case()
    case.round(0, 2)
    assert (case.fed.traffic.up, case.fed.traffic.down) == (2 * 4, 2 * 4)


def test_inputs_that_are_whole_numbers_are_refused() -> None:
    case = Case()
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "input_shape"):
        replace(case.method, input_shape=None).init(case.fed, case.objective.params(), key=0)
