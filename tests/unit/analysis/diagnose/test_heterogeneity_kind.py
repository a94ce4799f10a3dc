"""The kind of heterogeneity from the differences: every branch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedclade.analysis.diagnose.heterogeneity_kind import Evidence
from fedclade.analysis.diagnose.hypothesis_tests import NONE, Difference
from fedclade.analysis.diagnose.pilot_runs import Probe, candidates
from fedclade.analysis.diagnose.recommendation import label, recommend

MUCH = Difference(0.2, 10.0, 1e-9, 1.0)
TINY = Difference(1e-4, 2.0, 1e-9, 1.0)  # significant, but too small to matter
UNSURE = Difference(0.2, 1.1, 0.2, 0.1)


@pytest.mark.parametrize(
    ("labels", "inputs", "given", "renamed", "sizes", "kinds"),
    [
        (NONE, NONE, NONE, None, 0.1, ("iid",)),
        (TINY, TINY, TINY, None, 0.1, ("iid",)),
        (UNSURE, UNSURE, UNSURE, None, 0.1, ("iid",)),
        (NONE, NONE, NONE, None, 0.9, ("quantity skew",)),
        (MUCH, MUCH, NONE, None, 0.9, ("label skew",)),
        (NONE, MUCH, MUCH, 0.3, 0.1, ("feature shift",)),
        (NONE, NONE, MUCH, 0.99, 0.1, ("concept shift",)),
        (MUCH, NONE, MUCH, 0.99, 0.1, ("concept shift",)),
        (MUCH, MUCH, MUCH, 0.3, 0.1, ("feature shift", "label skew")),
        (MUCH, MUCH, MUCH, None, 0.1, ("feature shift", "label skew")),
        (MUCH, MUCH, MUCH, 0.95, 0.1, ("concept shift", "label skew")),
    ],
)
def test_kinds(
    labels: Difference,
    inputs: Difference,
    given: Difference,
    renamed: float | None,
    sizes: float,
    kinds: tuple[str],
) -> None:
    assert Evidence(labels, inputs, given, renamed, sizes, classes=10).kinds() == kinds


def test_kinds_without_class_labels() -> None:
    assert Evidence(NONE, MUCH, MUCH, None, 0.9, classes=1).kinds() == ("feature shift",)
    assert Evidence(NONE, NONE, NONE, None, 0.9, classes=1).kinds() == ("quantity skew",)


def probe(method: str, gain: float, behind: float, stderr: float = 1.0, seeds: int = 1) -> Probe:
    clusters = 1 if method in ("fedavg", "local") else 4
    return Probe(
        method, {}, clusters, 50.0 + gain, gain, stderr, behind, stderr, rounds=30, seeds=seeds
    )


def test_the_simplest_of_the_best_methods_is_recommended() -> None:
    probes = [
        probe("fedavg", 0, 5),
        probe("local", 2, 3),
        probe("clade", 4.5, 0.5),
        probe("ifca", 5, 0),
    ]
    # Clade is half a point behind, with a standard error of one.
    assert recommend(True, 4, False, probes).method == "clade"
    assert recommend(True, 4, False, probes).clustering_helps
    far = [probe("fedavg", 0, 5), probe("local", 5, 0), probe("clade", 3, 2)]
    assert recommend(True, None, False, far).method == "local"
    assert not recommend(True, None, False, far).clustering_helps


def test_a_method_that_was_run_once_is_not_recommended_before_one_that_was_run_twice() -> None:
    probes = [
        probe("fedavg", 0, 5, seeds=2),
        probe("local", 5, 0.1, seeds=1),
        probe("ifca", 5.1, 0, seeds=2),
    ]
    assert recommend(True, 4, False, probes).method == "ifca"


def test_the_personal_layer_is_part_of_the_advice() -> None:
    layered = replace(probe("fedavg", 4, 0), layer="auto")
    far = recommend(True, None, False, [probe("fedavg", 0, 4), layered, probe("clade", 3.5, 1.5)])
    assert (far.method, far.layer) == ("fedavg", "auto")
    assert far.rivals == ("clade",)  # 1.5 standard errors behind
    level = replace(probe("fedavg", 0.4, 0), layer="auto")
    near = recommend(True, None, False, [probe("fedavg", 0, 0.4), level])
    assert (near.method, near.layer) == ("fedavg", None)


def test_the_probability_that_the_runner_up_is_not_better() -> None:
    alone = recommend(True, None, False, [probe("fedavg", 0, 0)])
    assert alone.sure is None
    close = recommend(True, None, False, [probe("fedavg", 0, 0), probe("local", -1, 1)])
    assert close.sure == pytest.approx(0.8413, abs=1e-4)  # one standard error
    same = [probe("fedavg", 0, 0, stderr=0), probe("scaffold", 0, 0, stderr=0)]
    assert recommend(True, None, False, same).sure == 0.5


def test_a_gain_within_two_standard_errors_shows_no_help() -> None:
    helps = [probe("fedavg", 0, 2.1), probe("clade", 2.1, 0)]
    assert recommend(True, 4, False, helps).clustering_helps
    unclear = [probe("fedavg", 0, 1.9), probe("clade", 1.9, 0)]
    assert not recommend(True, 4, False, unclear).clustering_helps


def test_without_differences_another_method_must_be_two_errors_better_than_fedavg() -> None:
    assert (
        recommend(False, None, False, [probe("fedavg", 0, 1.5), probe("local", 1.5, 0)]).method
        == "fedavg"
    )
    assert (
        recommend(False, None, False, [probe("fedavg", 0, 2.5), probe("local", 2.5, 0)]).method
        == "local"
    )


def test_without_pilot_runs_no_gain_is_estimated() -> None:
    assert recommend(True, 4, False, []).method == "clade"
    assert recommend(True, None, True, []).settings == {"recluster_every": 5}
    assert recommend(True, None, False, []).layer == "auto"
    assert recommend(False, None, False, []).gain is None
    assert recommend(False, None, False, []).method == "fedavg"


def test_candidates() -> None:
    def names(differ: bool, groups: int | None, faint: bool) -> list[str]:
        found = candidates(differ, groups, faint)
        return [label(choice.method.name, choice.layer) for choice in found]

    one_model = ["fedavg", "fedavg, personal.layer = auto", "scaffold"]
    assert names(False, None, False) == [*one_model, "local", "clade"]
    assert names(True, 3, True) == [*one_model, "local", "clade_groups", "clade", "ifca", "cfl"]
    methods = {choice.method.name: choice.method for choice in candidates(True, 3, True)}
    assert methods["clade_groups"].recluster_every == 5  # type: ignore[attr-defined]
    assert methods["ifca"].clusters == 3  # type: ignore[attr-defined]


def test_power_includes_only_differences_that_were_not_found() -> None:
    # The power for labels times the power for inputs given labels.
    unsure = Evidence(UNSURE, UNSURE, UNSURE, None, 0.1, classes=10)
    assert unsure.power() == pytest.approx(0.01)
    assert Evidence(MUCH, MUCH, UNSURE, None, 0.1, classes=10).power() == 0.1
    assert Evidence(MUCH, MUCH, MUCH, 0.3, 0.1, classes=10).power() == 1


def test_without_pilot_runs_undetected_groups_are_no_found_groups() -> None:
    found, faint = recommend(True, 3, False, []), recommend(True, None, True, [])
    assert found.method == faint.method == "clade"
    assert (found.settings, faint.settings) == ({}, {"recluster_every": 5})
    assert found.why != faint.why
