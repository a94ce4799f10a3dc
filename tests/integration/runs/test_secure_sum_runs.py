"""Runs with `privacy.secure_sum` in the simulator: the same models, and no small sums."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import fedclade as fc
from fedclade.conformance.method_run import MethodRun
from fedclade.core.federation import ModelAssignment, SegmentSum
from fedclade.core.local_sgd import sgd
from fedclade.core.pytree import Tree, stack
from fedclade.data import Clients
from fedclade.engines.accumulator import Accumulator
from fedclade.engines.reply_validation import too_large_to_add
from fedclade.errors import FedcladeError, InvalidInputError
from fedclade.methods import METHODS as METHOD_CLASSES
from fedclade.methods._candidates import CladeState
from fedclade.methods.base import Method
from fedclade.privacy.secure_sum_federation import SecureSumFederation
from fedclade.training.config import PrivacyConfig

SECURE = PrivacyConfig(secure_sum=True)
METHODS: dict[str, Method] = {
    "fedavg": fc.FedAvg(),
    "fednova": fc.FedNova(),
    "scaffold": fc.SCAFFOLD(),
    "ifca": fc.IFCA(clusters=2),
    "fedem": fc.FedEM(components=2),
    "lg_fedavg": fc.LGFedAvg(),
    "ditto": fc.Ditto(),
    "clade_groups": fc.CladeGroups(),
    "clade": fc.Clade(),
    "pca_hc": fc.PCAHC(clusters=2),
    "pacfl": fc.PACFL(),
    "feddbe": METHOD_CLASSES["feddbe"](kappa=1.0),
    "flux": METHOD_CLASSES["flux"](),
    "oracle": fc.Oracle(),
}


def run(clients: Clients, method: Method, **changed: Any) -> fc.Result:
    settings: dict[str, Any] = {
        "model": fc.models.MLP(8),
        "rounds": 3,
        "clients_per_round": 1.0,
        "eval_every": 0,
        "privacy": SECURE,
        **changed,
    }
    return fc.run(method, clients, **settings)


def models(result: fc.Result, client: int = 0) -> list[torch.Tensor]:
    return list(result.model_of(client).state_dict().values())


@pytest.mark.parametrize("name", METHODS)
def test_models_are_those_of_plain_sums(name: str, small_digits: Clients) -> None:
    secure = run(small_digits, METHODS[name])
    plain = run(small_digits, METHODS[name], privacy=None)
    assert torch.equal(secure.clusters, plain.clusters)
    for ours, theirs in zip(models(secure), models(plain), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_the_arithmetic_does_not_depend_on_chunks(small_digits: Clients) -> None:
    first, second = (run(small_digits, fc.FedAvg(), chunk=chunk) for chunk in (1, 7))
    assert all(map(torch.equal, models(first), models(second)))


def test_small_groups_wait(small_digits: Clients, caplog: pytest.LogCaptureFixture) -> None:
    """The true groups have four clients; with min_group = 5 none is ever summed."""
    with caplog.at_level(logging.INFO, "fedclade"):
        result = run(small_digits, fc.Oracle(), privacy=PrivacyConfig(secure_sum=True, min_group=5))
    assert "20 clients wait: groups 0, 1, 2, 3, 4 have fewer than 5 clients" in caplog.text
    start = run(small_digits, fc.Oracle(), rounds=1, lr=1e-30)
    for ours, initial in zip(models(result), models(start), strict=True):
        torch.testing.assert_close(ours, initial, atol=1e-8, rtol=0)


def test_no_difference_of_the_sums_of_clades_candidates_is_a_small_group(
    small_digits: Clients,
) -> None:
    """In the first round all candidates start from one model. Two groups have two clients, and one
    for all would show their sum.
    """
    secure = MethodRun(fc.Clade(), "simulator", small_digits)
    asked: list[tuple[list[int], list[int]]] = []
    inner = secure.fed.map

    def note(program: Any, ids: torch.Tensor, **call: Any) -> Any:
        reduce = call.get("reduce")
        if reduce is not None and reduce.robust_ok:
            assert isinstance(reduce.segment_ids, torch.Tensor)
            asked.append((ids.tolist(), reduce.segment_ids.tolist()))
        return inner(program, ids, **call)

    secure.fed.map = note  # type: ignore[method-assign, assignment]
    secure.view = SecureSumFederation(secure.fed)
    state = secure.init()
    assert isinstance(state, CladeState)
    assert state.is_open
    cohort = torch.tensor([0, 5, 10, 15, 1, 6, 11, 2, 7, 3, 8])
    groups = state.group_ids[cohort]
    few = torch.bincount(groups)[groups] < 3
    assert few.any()
    assert not few.all()
    secure.round(state, 1, cohort)
    assert len(asked) == len(state.candidates)
    for ids, _ in asked:
        assert ids == cohort[~few].tolist()
    assert len({len(set(segments)) for _, segments in asked}) > 1


def test_a_model_of_ifca_that_few_chose_is_not_shown(small_digits: Clients) -> None:
    """Twenty clients choose among 15 models."""
    everyone = torch.arange(20)
    plain, secure = (MethodRun(fc.IFCA(clusters=15), "simulator", small_digits) for _ in range(2))
    secure.view = SecureSumFederation(secure.fed)
    before = plain.init()
    expected, after = plain.round(before, 1, everyone), secure.round(secure.init(), 1, everyone)
    counts = torch.bincount(expected.cluster_ids, minlength=15)
    many, few = counts >= 3, (counts > 0) & (counts < 3)
    assert many.any()
    assert few.any()
    for name, value in after.models.items():
        torch.testing.assert_close(value[many], expected.models[name][many], atol=1e-6, rtol=1e-5)
        assert torch.equal(value[~many], before.models[name][~many])
        assert not torch.equal(expected.models[name][few], before.models[name][few])


def test_the_choice_of_a_client_is_not_in_the_results(small_digits: Clients) -> None:
    run_of = MethodRun(fc.IFCA(clusters=2), "simulator", small_digits)
    run_of.view = SecureSumFederation(run_of.fed)
    state = run_of.round(run_of.init(), 1, torch.arange(20))
    assert set(state.cluster_ids.tolist()) == {-1}


def test_a_sum_of_few_terms_is_zero() -> None:
    reply: Tree = {"w": torch.randn(5, 3)}
    reduce = SegmentSum(
        torch.tensor([1.0, 1, 1, 1, 0]), 2, torch.tensor([0, 0, 0, 1, 1]), min_clients=3
    )
    total = Accumulator(reduce)
    total.add(torch.arange(5), reply)
    assert total.weight.tolist() == [3.0, 0.0]
    assert total.sums["w"][0].any()
    assert not total.sums["w"][1].any()  # a client with weight 0 is not in it


def test_numbers_that_could_wrap_around_are_rejected() -> None:
    reply = {"w": torch.tensor([[1.0], [2.0**30], [2.0**31]])}
    # The limit of a term is 2^33 / clients.
    assert too_large_to_add(reply, torch.ones(3), clients=4) == [2]
    assert too_large_to_add(reply, torch.full((3,), 2.0), clients=4) == [1, 2]
    assert too_large_to_add(reply, torch.ones(3), clients=3) == []


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (fc.CFL(), "method cfl compares the models of single clients; use clade_groups"),
        (fc.FedSEM(clusters=2), "method fedsem compares the models of single clients"),
        (fc.FLISDC(), "method flis_dc runs the models of single clients on probe data"),
        (fc.FLISHC(), "method flis_hc runs the models of single clients on probe data"),
        (fc.FedGMCC(), "method fedgmcc compares the models of single clients"),
        (fc.FLT(), "method flt forms sums that overlap"),
        (fc.Local(), "method local sends nothing"),
        (fc.IFCA(num_restarts=2), "method.num_restarts = 1"),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else "",
)
def test_methods_that_look_at_clients_are_refused(
    method: Method, text: str, small_digits: Clients
) -> None:
    with pytest.raises(InvalidInputError) as error:
        run(small_digits, method)
    assert text in str(error.value)


def test_overlapping_sums_are_refused(small_digits: Clients) -> None:
    from fedclade.conformance.method_run import MethodRun

    run_of = MethodRun(fc.FedAvg(), "simulator", small_digits)
    ids = torch.arange(6)
    with pytest.raises(FedcladeError, match="sums that overlap"):
        SecureSumFederation(run_of.fed).map(
            sgd(run_of.method.local),
            ids,
            per_client=ModelAssignment.all_same(stack([run_of.params]), 6),
            key=1,
            reduce=SegmentSum(torch.ones(6, 2), 2),
        )


def test_robust_means_are_refused(small_digits: Clients) -> None:
    with pytest.raises(InvalidInputError, match=r"server\.aggregator"):
        run(small_digits, fc.FedAvg(), aggregator="median")


def test_noise_and_secure_sums_together(small_digits: Clients) -> None:
    pytest.importorskip("dp_accounting")
    settings = {"epsilon": 8.0, "clip": 0.5}
    both = run(small_digits, fc.FedAvg(), privacy=PrivacyConfig(**settings, secure_sum=True))
    noise = run(small_digits, fc.FedAvg(), privacy=PrivacyConfig(**settings))
    # The sums are the same integers, so the noise is the same.
    assert all(map(torch.equal, models(both), models(noise)))


@pytest.mark.parametrize(
    ("method", "cohort", "text"),
    [
        (fc.FedAvg(), 0.5, "run.clients_per_round = 0.5"),
        # Of 21 clients that would be a sample.
        (fc.FedAvg(), 20, "run.clients_per_round = 20"),
        (fc.IFCA(clusters=2), 1.0, "it must be false for method ifca"),
    ],
)
def test_noise_is_not_accounted_for_sums_that_depend_on_their_size(
    method: Method, cohort: float, text: str, small_digits: Clients
) -> None:
    pytest.importorskip("dp_accounting")
    privacy = PrivacyConfig(epsilon=50.0, clip=0.5, secure_sum=True)
    with pytest.raises(InvalidInputError) as error:
        run(small_digits, method, clients_per_round=cohort, privacy=privacy)
    assert text in str(error.value)


def test_one_client_decides_whether_others_are_in_a_secure_sum(small_digits: Clients) -> None:
    """Why noise for one client's clip does not cover secure sums of a random cohort."""
    sums = []
    for cohort in (torch.arange(3), torch.arange(2)):
        run_of = MethodRun(fc.FedAvg(), "simulator", small_digits)
        results = SecureSumFederation(run_of.fed).map(
            sgd(run_of.method.local),
            cohort,
            per_client=ModelAssignment.all_same(stack([run_of.params]), len(cohort)),
            key=1,
            reduce=SegmentSum(torch.ones(len(cohort)), 1, torch.zeros_like(cohort), robust_ok=True),
        )
        sums.append(results.total_weight.tolist())
    assert sums == [[3.0], [0.0]]
