"""Three clients worked by hand.

The model is one number w, the loss (w x - y)^2, so a full-batch step is w <- w - 2 lr x (w x - y).
With lr = 0.1 from w = 0:
client 0, one sample (1, 2):    gradient -4,  w = 0.4
client 1, two samples (1, 4):   gradient -8,  w = 0.8
client 2, three samples (2, 3): gradient -12, w = 1.2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedclade import Method, Simulator
from fedclade.core import LocalTraining, State
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import UNKNOWN
from fedclade.core.pytree import Tree
from fedclade.data import Clients, from_arrays


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs[:, 0] - y) ** 2


class Case:
    """A method on the three clients. With `layers=2` the model is f(x) = b a x, from a = b = 1."""

    def __init__(
        self,
        method: Method,
        absent: Sequence[int] = (),
        layers: int = 1,
        clients: Clients | None = None,
        **local: Any,
    ) -> None:
        model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(layers)))
        for layer in model:
            nn.init.constant_(layer.weight, float(layers - 1))
        objective = Objective(model, squared)
        self.method = method.with_local_config(
            LocalTraining(objective, **{"lr": 0.1, "batch_size": 10, **local})
        )
        self.fed = Simulator(clients or three_clients(), faults=self._answer)
        self.absent = set(absent)
        params = objective.params()
        self.fed.init_client_state(self.method.initial_client_state(params))
        self.state = self.method.init(self.fed, params, key=0)

    def _answer(self, key: int, client: int, reply: Tree) -> Tree | None:
        return None if client in self.absent else reply

    def round(self, *cohort: int) -> State:
        self.state = self.method.round(self.fed, self.state, torch.tensor(cohort), key=len(cohort))
        self.fed.client_state.commit(1)
        return self.state

    def served(self) -> list[float]:
        """The model of each client, a number. Clients without a cluster get one, as in a run."""
        ids = torch.arange(len(self.fed.sizes))
        unknown = ids[self.state.cluster_ids == UNKNOWN]
        state = (
            self.method.add_clients(self.fed, self.state, unknown, key=0)
            if len(unknown)
            else self.state
        )
        rows = self.method.assign_models(state, ids)
        weights: Tensor = rows.gather(self.fed.client_state.read(ids))["0.weight"]
        return weights.flatten().tolist()

    def stored(self) -> list[float]:
        """The number in each client's state."""
        weights: Tensor = self.fed.client_state.read(torch.arange(len(self.fed.sizes)))["0.weight"]
        return weights.flatten().tolist()


def three_clients() -> Clients:
    samples = [(1, 1.0, 2.0), (2, 1.0, 4.0), (3, 2.0, 3.0)]
    return from_arrays([(torch.full((n, 1), x), torch.full((n,), y)) for n, x, y in samples])


@pytest.fixture
def case() -> type[Case]:
    return Case
