"""FedDrift with three clients worked by hand.

The model predicts class 1 where w x > 0, so it is right if w has the sign of the client's concept.
Inputs are 1 and -1, and one of 2 to tell apart models that are merged. A step from w = 0 is along
the mean of ±x / 2: with lr = 1, client 0 (x = 1, -1) gets to 0.5. Client 1 has the same concept and
twice the samples, and client 2 the other concept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedclade import FedDrift, InvalidInputError, Simulator
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.core.pytree import Tree
from fedclade.data import from_arrays

PLUS, MINUS = (1, -1), (-1, 1)  # the signs of the inputs of class 1 and class 0
CONCEPTS = ((PLUS, 1), (PLUS, 2), (MINUS, 1))


class Sign(nn.Module):
    """Outputs 0 and w x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([0 * x, self.weight * x], 1)


class Case:
    def __init__(self, absent: Sequence[int] = (), **settings: Any) -> None:
        self.objective = Objective(Sign())
        local = LocalTraining(self.objective, lr=1.0, batch_size=20)
        self.method = FedDrift(**{"interval": 1, **settings}).with_local_config(local)
        self.absent = set(absent)
        self.meet(*CONCEPTS)
        self.state: Any = self.method.init(self.fed, self.objective.params(), key=0)

    def meet(self, *concepts: tuple[tuple[int, int], int]) -> None:
        """The clients have these concepts from now on: x of class 1 and of class 0, and how often.
        A concept (1, 1) has both classes at the same x, so no model is better than 50 %.
        """
        rows = [
            (torch.tensor(x * n)[:, None].float(), torch.tensor([1, 0] * n)) for x, n in concepts
        ]
        self.fed = Simulator(from_arrays(rows), faults=self._answer)

    def _answer(self, key: int, client: int, reply: Tree) -> Tree | None:
        return None if client in self.absent else reply

    def round(self, *cohort: int) -> list[int]:
        ids = torch.tensor(cohort, dtype=torch.int64)
        self.state = self.method.round(self.fed, self.state, ids, key=1)
        return self.groups()

    def groups(self) -> list[int]:
        return self.state.cluster_ids.tolist()

    def models(self) -> list[float]:
        return self.state.models["weight"].flatten().tolist()


def test_clients_start_alone_and_equally_good_models_are_merged() -> None:
    case = Case()
    assert case.round(0, 1, 2) == [0, 1, 2]
    assert case.models() == pytest.approx([0.5, 0.5, -0.5])
    # Nobody trains now: the look is all that happens. Errors: 0, 0, 1 of the models 0 and 1 on the
    # clients, 1, 1, 0 of model 2.
    case.absent = set()
    assert case.round() == [0, 0, 1]
    assert case.models() == pytest.approx([0.5, -0.5])
    assert case.state.error.tolist() == [0, 0, 0]


def test_a_merged_model_is_the_mean_by_samples() -> None:
    case = Case()
    case.round(0, 1, 2)
    case.state.models["weight"].copy_(torch.tensor([[1.0], [4.0], [-0.5]]))
    case.round()
    assert case.models() == pytest.approx([(2 * 1 + 4 * 4) / 6, -0.5])


def test_the_bytes_of_a_look() -> None:
    case = Case()
    case.round(0, 1, 2)
    before = case.fed.traffic.up, case.fed.traffic.down
    case.round()
    up, down = case.fed.traffic.up - before[0], case.fed.traffic.down - before[1]
    assert (up, down) == (3 * 3 * 4, 3 * 3 * 4)


def test_a_client_moves_to_a_better_model_without_a_drift() -> None:
    case = Case()
    case.round(0, 1, 2)
    case.round()
    case.meet((MINUS, 1), (PLUS, 2), (MINUS, 1))
    assert case.round() == [1, 0, 1]
    assert len(case.state) == 2


def test_a_client_for_which_all_models_became_worse_opens_one() -> None:
    case = Case(delta=0.4)
    case.round(0, 1, 2)
    case.round()
    case.meet(((1, 1), 1), (PLUS, 2), (MINUS, 1))
    # Its best error rises from 0 to 0.5. The new model is a copy of its own one.
    assert case.round() == [2, 0, 1]
    assert case.models() == pytest.approx([0.5, -0.5, 0.5])
    # At the next look its best error is 0.5 again, which is no rise. Model 0 has 0.5 there and 0 on
    # its own clients, so it is not merged with its copy. When client 0 has its old data
    # again, it is.
    assert case.round() == [2, 0, 1]
    case.meet(*CONCEPTS)
    assert case.round() == [0, 0, 1]
    assert len(case.state) == 2


def test_a_smaller_rise_is_no_drift() -> None:
    case = Case(delta=0.6)
    case.round(0, 1, 2)
    case.round()
    case.meet(((1, 1), 1), (PLUS, 2), (MINUS, 1))
    assert case.round() == [0, 0, 1]
    assert case.state.error.tolist() == [0.5, 0, 0]


def test_models_without_clients_make_place() -> None:
    case = Case(delta=0.4, max_models=3)
    case.round(0, 1, 2)
    case.round()
    case.meet((MINUS, 1), (MINUS, 2), (MINUS, 1))
    assert case.round() == [1, 1, 1]
    assert len(case.state) == 2  # model 0 stays for clients that come back
    case.meet(((1, 1), 1), ((1, 1), 2), (MINUS, 1))
    # Two want a model, and one place is free with model 0 dropped: both have it.
    assert case.round() == [1, 2, 0]
    assert len(case.state) == 3


def test_without_place_a_client_stays_with_its_best_model() -> None:
    case = Case(start="one", max_models=1, delta=0.4)
    case.meet((PLUS, 1), (PLUS, 2), (PLUS, 1))
    case.round(0, 1, 2)
    case.round()
    case.meet(((1, 1), 1), (PLUS, 2), (PLUS, 1))
    assert case.round() == [0, 0, 0]
    assert len(case.state) == 1


def test_looks_are_every_interval() -> None:
    case = Case(interval=3)
    assert [case.round(0, 1, 2) for _ in range(4)] == [[0, 1, 2]] * 3 + [[0, 0, 1]]


def test_absent_clients_keep_their_models() -> None:
    case = Case()
    case.round(0, 1, 2)
    case.absent = {2}
    assert case.round() == [0, 0, 1]
    assert case.models() == pytest.approx([0.5, -0.5])
    case.absent = {0, 1, 2}
    before = case.state
    assert case.round() == [0, 0, 1]
    assert torch.equal(case.state.models["weight"], before.models["weight"])


def test_a_late_client_takes_the_best_model() -> None:
    case = Case()
    case.round(0, 1, 2)
    case.meet(*CONCEPTS, (MINUS, 3))
    case.state = case.method.add_clients(case.fed, case.state, torch.tensor([3]), key=0)
    assert case.groups() == [0, 1, 2, 2]


@pytest.mark.parametrize(
    "settings", [{"delta": 0.0}, {"interval": 0}, {"start": "two"}, {"max_models": 0}]
)
def test_bad_settings(settings: Any) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field.startswith("method.")):
        FedDrift(**settings)


def test_more_clients_than_models_cannot_start_alone() -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "method.max_models"):
        Case(max_models=2)
