"""Three clients worked by hand.

The model is one number w, the loss (w x - y)^2, so a full-batch step is w <- w - 2 lr x (w x - y). With lr = 0.1 from w = 0:
client 0, one sample (1, 2):    w = 0.4
client 1, two samples (1, 4):   w = 0.8
client 2, three samples (2, 3): w = 1.2
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fedclade import FedAvg, Local, LocalTraining, Method, Simulator, State
from fedclade.client.objective import Objective
from fedclade.client.tree import Tree
from fedclade.data import Clients, from_arrays


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs[:, 0] - y) ** 2


class Case:
    """A method on the three clients."""

    def __init__(self, method: Method, absent: Sequence[int] = (), **local: float) -> None:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        objective = Objective(model, squared)
        self.method = method.bind(LocalTraining(objective, lr=0.1, batch_size=10, **local))  # type: ignore[arg-type]
        self.fed = Simulator(three_clients(), faults=self._answer)
        self.absent = set(absent)
        params = objective.params()
        self.fed.remember(self.method.memory0(params))
        self.state = self.method.init(self.fed, params, key=0)

    def _answer(self, key: int, client: int, reply: Tree) -> Tree | None:
        return None if client in self.absent else reply

    def round(self, *cohort: int) -> State:
        self.state = self.method.round(self.fed, self.state, torch.tensor(cohort), key=len(cohort))
        self.fed.memory.commit(1)
        return self.state

    def served(self) -> list[float]:
        """The number each client would use now."""
        ids = torch.arange(3)
        rows = self.method.serve(self.state, ids)
        weights: Tensor = rows.gather(self.fed.memory.read(ids))["weight"]
        return weights.flatten().tolist()


def three_clients() -> Clients:
    samples = [(1, 1.0, 2.0), (2, 1.0, 4.0), (3, 2.0, 3.0)]
    return from_arrays([(torch.full((n, 1), x), torch.full((n,), y)) for n, x, y in samples])


def test_fedavg_weighs_clients_by_their_examples() -> None:
    case = Case(FedAvg())
    case.round(0, 1, 2)
    # (1 * 0.4 + 2 * 0.8 + 3 * 1.2) / 6
    assert case.served() == pytest.approx([5.6 / 6] * 3, abs=1e-7)


def test_fedavg_second_round_starts_from_the_mean() -> None:
    case = Case(FedAvg())
    case.round(0, 1, 2)
    w = 5.6 / 6
    case.round(0, 2)
    first, third = w - 0.2 * (w - 2), w - 0.4 * (2 * w - 3)
    assert case.served() == pytest.approx([(first + 3 * third) / 4] * 3, abs=1e-6)


def test_fedavg_leaves_out_who_did_not_answer() -> None:
    case = Case(FedAvg(), absent=[2])
    case.round(0, 1, 2)
    assert case.served() == pytest.approx([(0.4 + 2 * 0.8) / 3] * 3, abs=1e-7)


def test_fedavg_keeps_its_model_when_nobody_answered() -> None:
    case = Case(FedAvg())
    case.round(0, 1, 2)
    before = case.served()
    case.absent = {0, 1, 2}
    case.round(0, 1, 2)
    assert case.served() == before


def test_fedavg_with_momentum_and_two_epochs() -> None:
    case = Case(FedAvg(), epochs=2, momentum=0.5)
    case.round(0)
    # g1 = -4: v = -4, w = 0.4; g2 = 2 (0.4 - 2) = -3.2: v = -5.2, w = 0.92
    assert case.served() == pytest.approx([0.92] * 3, abs=1e-6)


def test_fedavg_with_weight_decay() -> None:
    case = Case(FedAvg(), epochs=2, weight_decay=0.5)
    case.round(0)
    # w = 0.4; then g = 2 (0.4 - 2) + 0.5 * 0.4 = -3.0, w = 0.7
    assert case.served() == pytest.approx([0.7] * 3, abs=1e-6)


def test_local_trains_each_client_for_itself() -> None:
    case = Case(Local())
    case.round(0, 1, 2)
    assert case.served() == pytest.approx([0.4, 0.8, 1.2], abs=1e-7)


def test_local_goes_on_from_the_clients_own_model() -> None:
    case = Case(Local())
    case.round(0, 1, 2)
    case.round(1)
    # 0.8 - 0.2 (0.8 - 4)
    assert case.served() == pytest.approx([0.4, 1.44, 1.2], abs=1e-6)


def test_local_sends_nothing() -> None:
    case = Case(Local())
    case.round(0, 1, 2)
    assert (case.fed.traffic.up, case.fed.traffic.down) == (0, 0)


def test_fedavg_sends_one_model_each_way() -> None:
    case = Case(FedAvg())
    case.round(0, 2)
    assert (case.fed.traffic.up, case.fed.traffic.down) == (2 * 4, 2 * 4)
