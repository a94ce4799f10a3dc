"""What one client can change in a private sum, by brute force, and what methods make of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedclade as fc
from fedclade.conformance.method_run import EngineName, MethodRun
from fedclade.core.federation import FIXED_POINT
from fedclade.core.pytree import Tree
from fedclade.data import Clients
from fedclade.errors import FedcladeError
from fedclade.methods import METHODS
from fedclade.methods.base import Method
from fedclade.privacy.budget import PrivacyBudget
from fedclade.privacy.private_federation import PrivateFederation
from fedclade.programs.clipped_update import CLIPPED, COUNT
from fedclade.training.config import BatchNorm

CLIP = 0.02  # so small that every client is clipped
PRIVATE: dict[str, Method] = {
    "fedavg": fc.FedAvg(),
    "fedprox": fc.FedProx(),
    "scaffold": fc.SCAFFOLD(weights="clients"),
    "scaffold, option 1": fc.SCAFFOLD(weights="clients", option=1),
    "lg_fedavg": fc.LGFedAvg(),
    "per_fedavg": fc.PerFedAvg(),
    "ifca": fc.IFCA(clusters=3),
    "ifca, trunk": fc.IFCA(clusters=2, shared_layers="trunk", warm_up=1),
    "fedavg_finetune": fc.FedAvgFineTune(),
    "fedper": fc.FedPer(),
    "fedrep": fc.FedRep(),
    "fedbabu": fc.FedBABU(),
    "ditto": fc.Ditto(),
    "apfl": fc.APFL(),
    "fedala": fc.FedALA(),
    "feddbe": METHODS["feddbe"](),
    "knn_per": fc.KNNPer(),
    "fedem": fc.FedEM(components=2),
    "clade_groups": fc.CladeGroups(signature_epsilon=1.0, secret=1),
    "oracle": fc.Oracle(),
}
# Methods on a model with BatchNorm, and whether clients keep these layers by a setting.
WITH_BATCH_NORM: dict[str, tuple[Method, BatchNorm]] = {
    "fedbn": (fc.FedBN(), "average"),
    "fedavg, own BatchNorm": (fc.FedAvg(), "own"),
    "fedavg, BatchNorm": (fc.FedAvg(), "average"),
    "scaffold, BatchNorm": (fc.SCAFFOLD(weights="clients"), "average"),
    "ifca, BatchNorm": (fc.IFCA(clusters=2), "average"),
}


class Recorder(PrivacyBudget):
    """A budget that notes the sums it gets, and adds no noise."""

    def __init__(self, clip: float | None = CLIP) -> None:
        super().__init__(1e9, 1e-5, 1.0, clip, 1, True)
        self.sums: list[Tensor] = []
        self.sensitivities: list[float] = []

    def noise(self, sums: Tensor, sensitivity: float, call: Tensor) -> Tensor:
        self.sums.append(sums.clone())
        self.sensitivities.append(sensitivity)
        return torch.zeros_like(sums)


class PrivateRun(MethodRun):
    """A method on private sums, in which one client can be made absent."""

    def __init__(
        self,
        method: Method,
        clients: Clients,
        engine: EngineName = "simulator",
        clip: float | None = CLIP,
        max_examples: int | None = None,
        batch_norm: BatchNorm | None = None,
    ) -> None:
        self.absent: int | None = None
        super().__init__(method, engine, clients, faults=self._fault, batch_norm=batch_norm)
        self.budget = Recorder(clip)
        private = PrivateFederation(self.fed, self.budget, method.without_noise, max_examples)
        self.view = self.own.federation(private)

    def _fault(self, key: int, client: int, reply: Tree) -> Tree | None:
        is_private = any(name.startswith(CLIPPED) for name in reply)
        return None if client == self.absent and is_private else reply

    def private_round(self, state: Any, number: int, cohort: Tensor, commit: bool = True) -> Any:
        """A round as the training loop makes it. Without `commit` clients forget it."""
        self.budget.draw(number, len(self.clients), len(self.clients))
        known = state.cluster_ids[state.cluster_ids >= 0]
        self.budget.group_sizes = torch.bincount(known, minlength=len(state))
        state, cohort = self.method.prepare_cohort(self.view, state, cohort, key=number)
        state = self.method.round(self.view, state, cohort, key=number)
        if not commit:
            self.fed.client_state.rollback()
            return state
        self.fed.client_state.commit(number)
        return state


def test_every_method_that_allows_it_is_here() -> None:
    allowed = {name for name, make in METHODS.items() if not make().why_no_client_privacy()}
    # These need a setting.
    assert allowed | {"scaffold", "clade_groups"} == {
        name.partition(",")[0] for name in PRIVATE | WITH_BATCH_NORM
    }


@pytest.mark.parametrize("engine", ["simulator", "remote"])
@pytest.mark.parametrize("name", PRIVATE)
def test_a_client_changes_a_sum_by_at_most_the_clip(
    name: str, engine: EngineName, ragged: Clients
) -> None:
    if engine == "remote" and name not in ("fedavg", "ifca", "scaffold", "fedem"):
        pytest.skip("the clipping is the same program")
    check_sensitivity(PrivateRun(PRIVATE[name], ragged, engine))


@pytest.mark.parametrize("name", WITH_BATCH_NORM)
def test_every_number_of_a_model_with_batch_norm_is_within_the_clip(
    name: str, ragged: Clients
) -> None:
    """It has a number without dimensions. A run refuses the statistics that clients do not keep."""
    method, batch_norm = WITH_BATCH_NORM[name]
    run = PrivateRun(method, ragged, batch_norm=batch_norm)
    check_sensitivity(run)
    kept = set(run.objective.batch_norm) if "fedbn" in name or batch_norm == "own" else set()
    assert len(run.objective.batch_norm) == 5
    summed = {name.removeprefix("y/") for name in run.budget.shapes if "change/" not in name}
    assert summed - {COUNT} == run.params.keys() - kept


def check_sensitivity(run: PrivateRun) -> None:
    """Make each client absent in turn, and compare the sums without noise."""
    ragged = run.clients
    everyone = torch.arange(len(ragged))
    state = run.init()
    for number in (1, 2):  # with and without client state and warm-up
        run.budget.sums.clear()
        changes = []
        for absent in (None, *range(len(ragged))):
            run.absent = absent
            run.private_round(state, number, everyone, commit=False)
            if absent is not None:
                changes.append(float((run.budget.sums[-1] - run.budget.sums[0]).norm()))
        assert len(run.budget.sums) == 1 + len(ragged), "one private sum a round"
        assert max(changes) <= run.budget.sensitivities[0]
        # A client is clipped, not only small.
        assert max(changes) > 0.9 * CLIP
        run.absent = None
        state = run.private_round(state, number, everyone)


@pytest.mark.parametrize("max_examples", [None, 10])
def test_counts_and_signs_are_within_the_clip_too(
    ragged: Clients, max_examples: int | None
) -> None:
    run = PrivateRun(fc.IFCA(clusters=2), ragged, clip=None, max_examples=max_examples)
    state, everyone = run.init(), torch.arange(len(ragged))
    clip = run.budget.clip
    for absent in (None, *range(len(ragged))):
        run.absent, run.budget.clip = absent, clip
        run.private_round(state, 1, everyone, commit=False)
    whole, *others = run.budget.sums
    assert max(float((whole - other).norm()) for other in others) <= run.budget.sensitivities[0]
    # Weights, changes, the count and the sign.
    assert whole.shape == (2, sum(value.numel() for value in run.params.values()) + 2)


def test_without_noise_and_clipping_it_is_fedavg_with_equal_weights(ragged: Clients) -> None:
    private = PrivateRun(fc.FedAvg(), ragged, clip=1e4)
    plain = MethodRun(fc.SCAFFOLD(weights="clients"), "simulator", ragged)
    everyone = torch.arange(len(ragged))
    models = private.private_round(private.init(), 1, everyone).models
    # SCAFFOLD's first round is FedAvg with equal weights.
    expected = plain.method.round(plain.view, plain.init(), everyone, key=1).models
    for name, value in models.items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(PRIVATE.keys() - {"ifca", "clade_groups"}))
def test_without_noise_and_clipping_a_method_is_what_it_was(
    name: str, small_digits: Clients
) -> None:
    """Of clients of one size. IFCA keeps models that few chose."""
    private = PrivateRun(PRIVATE[name], small_digits, clip=1e4)
    plain = MethodRun(PRIVATE[name], "simulator", small_digits)
    everyone = torch.arange(len(small_digits))
    ours, expected = private.init(), plain.init()
    for number in (1, 2):
        ours = private.private_round(ours, number, everyone)
        expected = plain.method.round(plain.view, expected, everyone, key=number)
        plain.fed.client_state.commit(number)
    for weights, value in expected.models.items():
        torch.testing.assert_close(ours.models[weights], value, atol=1e-6, rtol=1e-5)


def test_models_have_the_noise_that_is_charged(ragged: Clients) -> None:
    everyone, noise = torch.arange(len(ragged)), 3.0
    without, with_noise = (PrivateRun(fc.FedAvg(), ragged) for _ in range(2))
    budget = PrivacyBudget(1e9, 1e-5, noise, CLIP, 1, True)
    with_noise.view, with_noise.budget = PrivateFederation(with_noise.fed, budget), budget  # type: ignore[assignment]
    states = [run.private_round(run.init(), 1, everyone) for run in (without, with_noise)]
    difference = torch.cat(
        [(states[1].models[name] - value).flatten() for name, value in states[0].models.items()]
    )
    # The sum of the changes is divided by the expected number of clients.
    expected = noise * CLIP / len(ragged)
    assert float(difference.std()) == pytest.approx(expected, rel=0.2)
    assert float(difference.mean().abs()) < expected


def test_nobody_in_the_cohort_is_noise_and_nothing_else(ragged: Clients) -> None:
    for method in (fc.FedAvg(), fc.SCAFFOLD(weights="clients"), fc.IFCA(clusters=2)):
        run = PrivateRun(method, ragged)
        run.private_round(run.init(), 1, torch.arange(0))
        assert len(run.budget.sums) == 1
        assert not run.budget.sums[0].any()


@pytest.mark.parametrize("method", [fc.FedAvg(), fc.IFCA(clusters=2)], ids=lambda m: m.name)
def test_a_client_whose_training_diverges_contributes_zeros(
    method: Method, ragged: Clients
) -> None:
    """A rejection would show something about it without noise."""
    everyone = torch.arange(len(ragged))
    x = ragged.x.clone()
    x[ragged.train[2]] = torch.inf
    sums = []
    for clients, absent in ((replace(ragged, x=x), None), (ragged, 2)):
        run = PrivateRun(method, clients)
        run.absent = absent
        run.private_round(run.init(), 1, everyone)
        sums.append(run.budget.sums[0])
        failed = {failure.client for failure in run.fed.pop_failures()}
        assert failed == (set() if absent is None else {absent})
    if method.name == "fedavg":
        assert torch.equal(*sums)
    assert all(value.isfinite().all() for value in sums)


def test_a_repeated_round_does_not_show_that_an_absent_client_contributed_nothing(
    ragged: Clients,
) -> None:
    """After a crash a round is repeated without client 2. If the sum of the others had the same
    noise as the sum with a contribution of 0, both models would be equal only then.
    """
    x = ragged.x.clone()
    x[ragged.train[2]] = torch.inf  # it contributes zeros
    run = PrivateRun(fc.FedAvg(), replace(ragged, x=x))
    budget = PrivacyBudget(1e9, 1e-5, 1.0, CLIP, 1, True)
    run.view, run.budget = PrivateFederation(run.fed, budget), budget  # type: ignore[assignment]
    state, models, everyone = run.init(), [], torch.arange(len(ragged))
    for absent in (None, None, 2):
        run.absent = absent
        models.append(run.private_round(state, 1, everyone, commit=False).models["fc1.weight"])
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])
    assert budget.summary()["releases"] == 2


def test_sums_are_in_fixed_point(ragged: Clients) -> None:
    run = PrivateRun(fc.FedAvg(), ragged)
    run.private_round(run.init(), 1, torch.arange(len(ragged)))
    units = run.budget.sums[0] / FIXED_POINT
    assert torch.equal(units, units.round())
    length = run.budget.sums[0].shape[1]
    assert run.budget.sensitivities == [CLIP + math.sqrt(length) * FIXED_POINT / 2]


def test_other_replies_are_refused(ragged: Clients) -> None:
    for method in (fc.FedSEM(clusters=2), fc.CFL(), fc.PCAHC(clusters=2), fc.Local()):
        run = PrivateRun(method, ragged)
        with pytest.raises(FedcladeError, match=r"privacy\.epsilon"):
            run.private_round(run.init(), 1, torch.arange(len(ragged)))
        assert not run.budget.sums


def test_groups_of_ifca_whose_count_may_be_noise_keep_their_model(ragged: Clients) -> None:
    run = PrivateRun(fc.IFCA(clusters=2), ragged)
    run.budget.noise_multiplier = 10.0  # six clients cannot be seen in it
    state = run.init()
    after = run.private_round(state, 1, torch.arange(len(ragged)))
    for name, value in state.models.items():
        assert torch.equal(after.models[name], value)
