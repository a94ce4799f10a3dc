"""FedDBE with three clients worked by hand.

The model is w x + b from w = 1, b = 0, and the loss (w (x + u) + b - y)². With the targets 2, 4 and
3 at x = 1, 1 and 2, and 1, 2 and 3 samples. dL/doutput is -2, -6 and -2. With lr = 0.1 a step from
u = 0 adds 0.1 · 2 x to w of client 0, 0.2 to b, and 0.2 w = 0.2 to u.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedclade import FedDBE, InvalidInputError, Simulator
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.core.pytree import Tree
from fedclade.data import from_arrays


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs[:, 0] - y) ** 2


def two_layers() -> nn.Sequential:
    """w v x + b, whose features are v x, from v = w = 1."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1))
    nn.init.ones_(model[0].weight)
    return model


class Case:
    def __init__(
        self,
        absent: Sequence[int] = (),
        model: nn.Sequential | None = None,
        local: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        model = model or nn.Sequential(nn.Linear(1, 1))
        self.head = f"{len(model) - 1}."
        nn.init.ones_(model[-1].weight)
        nn.init.zeros_(model[-1].bias)
        objective = Objective(model, squared)
        training = LocalTraining(objective, **{"lr": 0.1, "batch_size": 10, **(local or {})})
        self.method = FedDBE(**settings).with_local_config(training)
        self.absent = set(absent)
        samples = [(1, 1.0, 2.0), (2, 1.0, 4.0), (3, 2.0, 3.0)]
        clients = from_arrays([(torch.full((n, 1), x), torch.full((n,), y)) for n, x, y in samples])
        self.fed = Simulator(clients, faults=self._answer)
        params = objective.params()
        self.fed.init_client_state(self.method.initial_client_state(params))
        self.state: Any = self.method.init(self.fed, params, key=0)

    def _answer(self, key: int, client: int, reply: Tree) -> Tree | None:
        return None if client in self.absent else reply

    def round(self, *cohort: int) -> None:
        self.state = self.method.round(self.fed, self.state, torch.tensor(cohort), key=1)
        self.fed.client_state.commit(1)

    def model(self) -> list[float]:
        """w and b."""
        return [float(self.state.models[self.head + name]) for name in ("weight", "bias")]

    def offsets(self) -> list[float]:
        values: Tensor = self.fed.client_state.read(torch.arange(3))["offset"]
        return values.flatten().tolist()

    def used(self, name: str) -> list[float]:
        """A number of the model that each client uses."""
        ids = torch.arange(3)
        models = self.fed.models_of(
            self.method.assign_models(self.state, ids), ids, self.method.personalization_program()
        )
        values: Tensor = models[self.head + name]
        return values.flatten().tolist()


def near(*numbers: float) -> Any:
    return pytest.approx(numbers, abs=1e-6)


def test_each_client_trains_its_offset_and_the_shared_model() -> None:
    case = Case()
    case.round(0, 1, 2)
    # w: 1.2, 1.6, 1.4 and b: 0.2, 0.6, 0.2, of 1, 2 and 3 samples. (2 is at x = 2: 1 + 0.2 (2).)
    assert case.model() == near((1.2 + 2 * 1.6 + 3 * 1.4) / 6, (0.2 + 2 * 0.6 + 3 * 0.2) / 6)
    assert case.offsets() == near(0.2, 0.6, 0.2)
    assert (case.fed.traffic.up, case.fed.traffic.down) == (3 * 8, 3 * 8)  # u does not travel


def test_a_client_uses_the_bias_with_its_offset() -> None:
    case = Case()
    case.round(0)
    w, b = case.model()
    assert (w, b) == near(1.2, 0.2)
    assert case.used("weight") == near(w, w, w)
    # The others never trained: their offset is 0.
    assert case.used("bias") == near(b + w * 0.2, b, b)


def test_the_gradient_of_the_weight_is_at_the_moved_features() -> None:
    case = Case(local={"epochs": 2})
    case.round(0)
    # Second step, from w = 1.2, b = u = 0.2: the output is 1.2 · 1.2 + 0.2 = 1.64, dL -0.72. w gets
    # 0.072 (x + u) and u 0.072 w.
    assert case.model() == near(1.2 + 0.072 * 1.2, 0.2 + 0.072)
    assert case.offsets() == near(0.2 + 0.072 * 1.2, 0, 0)


def test_offsets_of_the_outputs() -> None:
    case = Case(offset="outputs", local={"epochs": 2})
    case.round(0)
    # The second output is 1.2 + 0.2 + 0.2 = 1.6, dL -0.8. o moves as b does.
    assert case.model() == near(1.28, 0.28)
    assert case.offsets() == near(0.28, 0, 0)
    assert case.used("bias") == near(0.56, 0.28, 0.28)


def test_an_absent_client_keeps_its_offset() -> None:
    case = Case()
    case.round(0, 1, 2)
    case.absent = {1}
    before = case.offsets()
    case.round(0, 1)
    assert case.offsets()[1:] == before[1:]
    assert case.offsets()[0] != before[0]


def test_the_mean_of_the_features_after_a_first_pass() -> None:
    case = Case(model=two_layers(), kappa=1.0)
    # From v = w = 1, b = 0 the first pass moves v by 0.2 x: 1.2, 1.6, 1.4. Features v x: 1.2, 1.6
    # and 2.8, of 1, 2 and 3 samples.
    assert case.state.mean.flatten().tolist() == near((1.2 + 2 * 1.6 + 3 * 2.8) / 6)
    assert case.model() == near(1, 0)  # the pass changes no model
    assert case.offsets() == near(0, 0, 0)


def test_the_regularizer_pulls_the_features_to_the_common_mean() -> None:
    mean, kappa, momentum = 2.0, 0.5, 0.25
    case = Case(model=two_layers(), kappa=kappa, momentum=momentum, local={"epochs": 2})
    case.state = replace(case.state, mean=torch.tensor([[mean]]))
    case.round(0)
    v, w, b, u, gap = 1.0, 1.0, 0.0, 0.0, 0.0
    for _ in range(2):
        error = 2 * (w * (v + u) + b - 2)
        gap = (1 - momentum) * gap + momentum * (v - mean)
        v, w, b, u = (
            v - 0.1 * (error * w + kappa * gap * momentum),
            w - 0.1 * error * (v + u),
            b - 0.1 * error,
            u - 0.1 * error * w,
        )
    assert float(case.state.models["0.weight"]) == pytest.approx(v, abs=1e-6)
    assert case.model() == near(w, b)
    assert case.offsets() == near(u, 0, 0)


def test_if_all_are_absent_the_mean_is_learned_later() -> None:
    case = Case(absent=[0, 1, 2], model=two_layers(), kappa=1.0)
    assert len(case.state.mean) == 0
    case.absent = set()
    case.round(2)
    assert case.state.mean.flatten().tolist() == near(2.8)


def test_the_regularizer_is_off_by_default_as_in_pfllib() -> None:
    assert (FedDBE().kappa, FedDBE().momentum) == (0, 0.1)


@pytest.mark.parametrize(
    "settings", [{"kappa": -1.0}, {"momentum": 0.0}, {"momentum": 1.5}, {"offset": "bias"}]
)
def test_bad_settings(settings: Any) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field.startswith("method.")):
        FedDBE(**settings)


def test_a_last_layer_without_a_bias_is_refused() -> None:
    objective = Objective(nn.Linear(1, 1, bias=False), squared)
    method = FedDBE().with_local_config(LocalTraining(objective))
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "model"):
        method.initial_client_state(objective.params())
