"""FLIS worked by hand.

A client with the targets (a, b), vectors with a number for each class, has the samples x = (1, 0),
y = a and x = (0, 1), y = b, each several times. The model is a matrix W, the loss ‖W x − y‖². So a
full-batch step with learning rate lr is W <- W − lr (W − [a b]). With lr = 1 every client gets to
W = [a b] from any model. On the probe data (1, 0), (0, 1), (−1, 0), (0, −1) such a model predicts
the classes of the largest a, the largest b, the least a and the least b.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fedclade import InvalidInputError, Simulator
from fedclade.core import LocalTraining, State
from fedclade.core.cost_formula import evaluate_cost
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import UNKNOWN
from fedclade.core.pytree import Tree
from fedclade.data import from_arrays
from fedclade.methods.flis import FLISDC, FLISHC, FLISHCState

Target = tuple[Sequence[float], Sequence[float]]

# client   a          b          predictions
# 0        (2, 0, 1)  (0, 2, 1)  0 1 1 0
# 1        (4, 0, 2)  (2, 0, 4)  0 2 1 1
# 2        (1, 3, 0)  (1, 0, 3)  1 2 2 1
THREE: list[Target] = [((2, 0, 1), (0, 2, 1)), ((4, 0, 2), (2, 0, 4)), ((1, 3, 0), (1, 0, 3))]
REPEATS = [1, 2, 3]  # how often each client has its two samples: n = 2, 4, 6
CORNERS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
# Clients 0 and 1 agree on the first and the third corner, 1 and 2 on the second and the fourth, 0
# and 2 on none. With each corner once, A_01 = A_12 = 0.5, A_02 = 0. With these ten inputs,
# A_01 = 0.6, A_12 = 0.4, A_02 = 0.
TEN = CORNERS.repeat_interleave(torch.tensor([4, 3, 2, 1]), 0)


def distance(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs - y) ** 2).sum(1)


class Case:
    """FLIS on clients with these targets."""

    def __init__(
        self,
        method: FLISDC | FLISHC,
        targets: Sequence[Target] = THREE,
        repeats: Sequence[int] = REPEATS,
        absent: Sequence[int] = (),
    ):
        model = nn.Linear(2, len(targets[0][0]), bias=False)
        nn.init.zeros_(model.weight)
        self.objective = Objective(model, distance)
        self.absent = set(absent)
        pairs = [
            (torch.eye(2).repeat(r, 1), torch.tensor(t, dtype=torch.float32).repeat(r, 1))
            for r, t in zip(repeats, targets, strict=True)
        ]
        self.fed = Simulator(from_arrays(pairs), faults=self._answer)
        self.method = method
        self.train(lr=1.0)
        self.state = self.method.init(self.fed, self.objective.params(), key=0)

    def _answer(self, key: int, client: int, reply: Tree) -> Tree | None:
        return None if client in self.absent else reply

    def train(self, lr: float) -> None:
        self.method = self.method.with_local_config(
            LocalTraining(self.objective, lr=lr, batch_size=10)
        )

    def round(self, *cohort: int) -> State:
        self.state = self.method.round(self.fed, self.state, torch.tensor(cohort), key=1)
        return self.state

    def add_clients(self, *ids: int) -> list[int]:
        self.state = self.method.add_clients(self.fed, self.state, torch.tensor(ids), key=2)
        return self.state.cluster_ids.tolist()

    def served(self, client: int) -> list[list[float]]:
        """[a, b] of the model that this client uses."""
        weight: Tensor = self.method.assign_models(self.state, torch.tensor([client])).gather({})[
            "weight"
        ][0]
        return weight.T.tolist()


def mean(*parts: tuple[int, int]) -> list[object]:
    """The mean of the targets of clients, (client, weight) each, within rounding."""
    total = sum(weight for _, weight in parts)
    sums = [
        [sum(weight * THREE[k][column][c] for k, weight in parts) / total for c in range(3)]
        for column in range(2)
    ]
    return [pytest.approx(column, abs=1e-6) for column in sums]


# ---- dynamic clusters


def test_joint_clusters_overlap_and_are_weighted_by_examples() -> None:
    case = Case(FLISDC(beta=0.5, probe=CORNERS))
    state = case.round(0, 1, 2)
    # Ã has the rows {0, 1}, {0, 1, 2} and {1, 2}: a similarity of exactly β counts. The sorted rows
    # are 0 1 1, 1 1 0, 1 1 1.
    assert state.cluster_ids.tolist() == [1, 2, 0]
    # (2 W0 + 4 W1) / 6, (2 W0 + 4 W1 + 6 W2) / 12, (4 W1 + 6 W2) / 10
    assert case.served(0) == [
        pytest.approx([20 / 6, 0, 10 / 6], abs=1e-6),
        pytest.approx([8 / 6, 4 / 6, 3], abs=1e-6),
    ]
    assert case.served(1) == [
        pytest.approx([26 / 12, 18 / 12, 10 / 12], abs=1e-6),
        pytest.approx([14 / 12, 4 / 12, 3], abs=1e-6),
    ]
    assert case.served(2) == [
        pytest.approx([2.2, 1.8, 0.8], abs=1e-6),
        pytest.approx([1.4, 0, 3.4], abs=1e-6),
    ]


@pytest.mark.parametrize(
    ("beta", "clusters"),
    [
        (0.0, 1),  # {0, 1, 2}
        (0.4, 3),  # {0, 1}, {0, 1, 2}, {1, 2}
        (0.41, 2),  # {0, 1}, {2}
        (0.6, 2),  # {0, 1}, {2}
        (0.61, 3),  # {0}, {1}, {2}
        (1.0, 3),  # {0}, {1}, {2}
    ],
)
def test_beta_is_the_least_similarity_of_related_clients(beta: float, clusters: int) -> None:
    case = Case(FLISDC(beta=beta, probe=TEN))
    assert len(case.round(0, 1, 2)) == clusters
    assert case.served(2) == (
        mean((0, 2), (1, 4), (2, 6))
        if beta == 0
        else mean((1, 4), (2, 6))
        if beta == 0.4
        else mean((2, 1))
    )


def test_clients_of_one_joint_cluster_share_one_model() -> None:
    case = Case(FLISDC(beta=0.5, probe=TEN))
    state = case.round(2, 1, 0)
    assert state.cluster_ids.tolist() == [1, 1, 0]
    assert case.served(0) == case.served(1) == mean((0, 2), (1, 4))
    assert case.served(2) == mean((2, 1))


def test_soft_labels_include_the_confidence_of_a_model() -> None:
    # On the input (1, 0) softmax gives B0 = (3/4, 1/4), B1 = (1/4, 3/4), B2 = (9/10, 1/10), with
    # squared lengths 5/8, 5/8 and 41/50. A01 = (3/16 + 3/16) / (5/8) = 0.6, A02 = (27/40 + 1/40)
    # / sqrt(5/8 · 41/50) = 0.978, A12 = (9/40 + 3/40) / sqrt(…) = 0.419
    log3, none = float(torch.tensor(3.0).log()), (0.0, 0.0)
    targets = [((log3, 0.0), none), ((0.0, log3), none), ((2 * log3, 0.0), none)]
    soft, hard = (
        Case(FLISDC(beta=0.55, labels=labels, probe=CORNERS[:1]), targets)
        for labels in ("soft", "onehot")
    )
    soft.round(0, 1, 2)
    # {0, 1, 2}, {0, 1}, {0, 2}: (2 · 1 + 6 · 2) / 12 = 7/6 of log 3 and 4/12; 2/6 and 4/6; (2 + 12)
    # / 8 and 0
    expected = [(7 / 6, 1 / 3), (1 / 3, 2 / 3), (7 / 4, 0.0)]
    for client, (first, second) in enumerate(expected):
        assert soft.served(client)[0] == pytest.approx([first * log3, second * log3], abs=1e-6)
    assert len(hard.round(0, 1, 2)) == 2  # 0 and 2 predict the same class, 1 another one
    assert hard.served(2)[0] == hard.served(0)[0] == pytest.approx([7 / 4 * log3, 0], abs=1e-6)


def test_equal_outputs_predict_the_first_class() -> None:
    case = Case(FLISDC(beta=1.0, probe=CORNERS))
    case.train(lr=0.0)
    assert len(case.round(0, 1, 2)) == 1  # all models are still 0 and predict class 0


def test_a_client_starts_from_the_model_with_the_least_training_loss() -> None:
    case = Case(FLISDC(beta=0.5, probe=CORNERS))
    case.round(0, 1, 2)
    before = [case.served(client) for client in range(3)]
    case.train(lr=0.5)  # a step is half of the way from the chosen model to the target
    case.round(0, 1)
    # Client 0, squared distances from [a b] to the models of
    # {0, 1}: (4/3)² + (2/3)² + (4/3)² + (4/3)² + 2² = 9.8; {0, 1, 2}: (1/6)² + (3/2)² + (1/6)² +
    # (7/6)² + (5/3)² + 2² = 10.4; {1, 2}: more. Client 1: (2/3)² + (1/3)² + (2/3)² + (2/3)² + 1² =
    # 2.4 to {0, 1}, more to the others. So both start from the model of {0, 1}.
    halves = [
        [
            [(w + t) / 2 for w, t in zip(*pair, strict=True)]
            for pair in zip(before[0], THREE[k], strict=True)
        ]
        for k in (0, 1)
    ]
    # 0: a (8/3, 0, 4/3), b (2/3, 4/3, 2) -> 0 1 1 0; 1: a (11/3, 0, 11/6), b (5/3, 1/3, 7/2) -> 0 2
    # 1 1. A01 = 0.5, so they share.
    shared = [
        [(2 * w0 + 4 * w1) / 6 for w0, w1 in zip(*pair, strict=True)]
        for pair in zip(*halves, strict=True)
    ]
    assert (
        case.served(0) == case.served(1) == [pytest.approx(column, abs=1e-6) for column in shared]
    )


def test_a_client_outside_the_cohort_chooses_among_the_new_models() -> None:
    case = Case(FLISDC(beta=0.5, probe=CORNERS))
    # A02 = 0: the rows are {0} and {2}. The initial model is no longer used.
    assert case.round(0, 2).cluster_ids.tolist() == [1, UNKNOWN, 0]
    # Client 1 to W0: 2² + 1² + 2² + 2² + 3² = 22; to W2: 3² + 3² + 2² + 1² + 1² = 24
    assert case.add_clients(1) == [1, 1, 0]


def test_an_absent_client_is_ignored() -> None:
    case = Case(FLISDC(beta=0.5, probe=CORNERS), absent=[1])
    assert case.round(0, 1, 2).cluster_ids.tolist() == [1, UNKNOWN, 0]
    case.absent = {0, 1, 2}
    before = case.state
    assert case.round(0, 1, 2) is before


# ---- hierarchical clustering


def clusters(method: FLISHC) -> list[int]:
    return Case(method).state.cluster_ids.tolist()


@pytest.mark.parametrize(
    ("linkage", "beta", "expected"),
    [
        # 1 − A: 0.4 between 0 and 1, 0.6 between 1 and 2, 1 between 0 and 2. The first merge is {0,
        # 1} at 0.4. The second is at (0.6 + 1) / 2 = 0.8 with average linkage, at 0.6 with single
        # linkage, at 1 with complete linkage. A merge at exactly 1 − β counts.
        ("average", 0.61, [0, 1, 2]),
        ("average", 0.6, [0, 0, 1]),
        ("average", 0.21, [0, 0, 1]),
        ("average", 0.2, [0, 0, 0]),
        ("single", 0.41, [0, 0, 1]),
        ("single", 0.4, [0, 0, 0]),
        ("complete", 0.01, [0, 0, 1]),
        ("complete", 0.0, [0, 0, 0]),
    ],
)
def test_the_tree_is_cut_at_one_minus_beta(linkage: str, beta: float, expected: list[int]) -> None:
    assert clusters(FLISHC(beta=beta, linkage=linkage, probe=TEN)) == expected  # type: ignore[arg-type]


def test_clusters_start_from_the_initial_model_and_average_inside() -> None:
    case = Case(FLISHC(beta=0.5, probe=TEN))
    assert (len(case.state), float(case.state.models["weight"].abs().max())) == (2, 0.0)
    case.round(1, 0)
    assert case.served(0) == case.served(1) == mean((0, 2), (1, 4))
    assert case.served(2) == [[0, 0, 0], [0, 0, 0]]  # its cluster had no client in the cohort
    case.train(lr=0.5)
    case.round(2)
    assert case.served(2) == [[0.5, 1.5, 0], [0.5, 0, 1.5]]
    assert case.served(0) == mean((0, 2), (1, 4))


def test_late_clients_join_the_cluster_with_the_highest_mean_similarity() -> None:
    # client   predictions   A with 0, 1 and their mean   with 2
    # 3        1 2 0 1       0, 0.4: 0.2                  0.8
    # 4        0 2 1 1       0.6, 1: 0.8                  0.4
    # 5        2 2 0 1       0, 0.4: 0.2                  0.4, as with client 1, but above the mean
    late: list[Target] = [((0, 3, 1), (1, 0, 3)), ((5, 0, 1), (1, 0, 3)), ((0, 1, 3), (1, 0, 3))]
    case = Case(FLISHC(beta=0.5, probe=TEN), [*THREE, *late], [*REPEATS, 1, 1, 1], absent=[3, 4, 5])
    assert case.state.cluster_ids.tolist() == [0, 0, 1, UNKNOWN, UNKNOWN, UNKNOWN]
    case.round(0, 1, 2)
    # From 0 a step gives 0.1 [a b], which has the predictions of [a b]. From a current model a step
    # would change little.
    case.train(lr=0.1)
    case.absent = {4}
    assert case.add_clients(5, 3, 4) == [0, 0, 1, 1, UNKNOWN, 1]
    case.absent = set()
    assert case.add_clients(4) == [0, 0, 1, 1, 0, 1]
    assert case.served(3) == mean((2, 1))


def test_the_first_clients_that_reply_form_the_clusters() -> None:
    case = Case(FLISHC(beta=0.5, probe=TEN), absent=[0, 1, 2])
    assert case.state.cluster_ids.tolist() == [UNKNOWN] * 3
    case.absent = {1}
    assert case.add_clients(2, 1, 0) == [0, UNKNOWN, 1]
    case.absent = set()
    assert case.add_clients(1) == [0, 0, 1]  # A01 = 0.6, A12 = 0.4
    assert len(case.state) == 2


def test_the_state_has_the_mean_prediction_of_each_cluster() -> None:
    case = Case(FLISHC(beta=0.5, probe=CORNERS[[0, 0, 1]]))
    # The predictions on (1, 0), (1, 0), (0, 1) are 0 0 1, 0 0 2 and 1 1 2. A01 = 2/3, A12 = 1/3:
    # {0, 1} and {2}. Each B has three ones, so its length is √3.
    assert isinstance(case.state, FLISHCState)
    expected = torch.tensor([[1, 0, 0, 1, 0, 0, 0, 0.5, 0.5], [0, 1, 0, 0, 1, 0, 0, 0, 1]]) / 3**0.5
    torch.testing.assert_close(case.state.profiles, expected)


# ---- traffic and invalid settings


def test_the_traffic_is_the_declared_one() -> None:
    for method in (FLISDC(beta=0.5, probe=CORNERS), FLISHC(beta=0.5, probe=TEN)):
        case = Case(method)
        traffic = case.fed.traffic
        # Six weights of four bytes from each client.
        once = 3 * 24 if isinstance(method, FLISHC) else 0
        assert (traffic.up, traffic.down) == (once, once)
        case.round(0, 1, 2)
        traffic.up = traffic.down = 0
        symbols = case.method.cost_symbols(case.state)
        case.round(0, 2)
        assert traffic.up == 2 * evaluate_cost(method.upload_cost, symbols)
        assert traffic.down == 2 * evaluate_cost(method.download_cost, symbols)


@pytest.mark.parametrize("method", [FLISDC, FLISHC])
def test_no_probe_is_refused_before_any_training(method: type[FLISDC | FLISHC]) -> None:
    with pytest.raises(
        InvalidInputError, check=lambda error: error.field == "method.probe"
    ) as caught:
        Case(method())
    assert "partition(…, probe=n)" in str(caught.value)
    assert f"{method.__name__}(probe=array)" in str(caught.value)


@pytest.mark.parametrize("method", [FLISDC, FLISHC])
def test_one_output_is_no_prediction_of_a_class(method: type[FLISDC | FLISHC]) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: "outputs" in error.field) as caught:
        Case(method(probe=CORNERS), [((1.0,), (2.0,))], [1])
    assert "(4, 1)" in str(caught.value)


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        (FLISDC, "beta", -0.1),
        (FLISHC, "beta", 1.1),
        (FLISDC, "beta", float("nan")),
        (FLISDC, "labels", "hard"),
        (FLISHC, "linkage", "ward"),
    ],
)
def test_invalid_settings_are_refused(
    method: type[FLISDC | FLISHC], field: str, value: object
) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == f"method.{field}"):
        method(**{field: value})  # type: ignore[arg-type]
