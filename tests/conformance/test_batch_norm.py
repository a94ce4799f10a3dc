"""Every method passes the checks with a model that has BatchNorm, averaged or kept by clients."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from fedclade import CFL, IFCA, SCAFFOLD, Clade, CladeGroups, LGFedAvg, PerFedAvg
from fedclade.conformance import CHECKS, ENGINES, Check, MethodUnderTest, NotApplicableError
from fedclade.conformance.method_run import EngineName
from fedclade.methods import METHODS
from fedclade.training.config import BatchNorm

CASES: dict[str, Any] = {
    **METHODS,
    "ifca, all options": lambda: IFCA(
        clusters=2, shared_layers="trunk", warm_up=1, num_restarts=2, trial_rounds=1
    ),
    "scaffold, option 1": lambda: SCAFFOLD(option=1, weights="clients", server_lr=0.5),
    "per_fedavg, hessian-free": lambda: PerFedAvg(variant="hessian-free"),
    "cfl, splits": lambda: CFL(eps1=10.0, eps2=0.0, gamma_max=0.0, check_after=1),
    "clade_groups, private": lambda: CladeGroups(signature_epsilon=1.0, secret=1),
    "clade, reclustering": lambda: Clade(recluster_every=2),
    "lg_fedavg, head local": lambda: LGFedAvg(local_layers=("4",)),
    "lg_fedavg, BatchNorm and head local": lambda: LGFedAvg(local_layers=("2", "4")),
}
REFUSED = {
    *("flis_dc", "flis_hc", "fedgmcc"),  # their server runs the clients' models
    *("ditto", "apfl", "fedala", "pfedgraph"),  # clients have a whole model of their own
    "fedem",  # one layer for K models
}
SETTINGS: dict[BatchNorm, set[str]] = {  # with the checks that depend on it
    "average": {
        "run_can_be_resumed",
        "traffic_is_as_declared",
        "nodes_give_the_same_models",
    },
    "own": {
        "every_client_has_a_finite_model",
        "cohort_order_changes_nothing",
        "invalid_replies_do_no_harm",
        "silent_round_changes_nothing",
        "late_client_joins_alone",
        "new_clients_are_added",
        "run_can_be_resumed",
        "round_can_be_repeated",
        "traffic_is_as_declared",
        "nodes_give_the_same_models",
    },
}


@cache
def under_test(name: str, batch_norm: BatchNorm) -> MethodUnderTest:
    return MethodUnderTest(CASES[name](), batch_norm=batch_norm)


def _marks(engine: EngineName, batch_norm: BatchNorm, check: Check) -> list[pytest.MarkDecorator]:
    """Averaged statistics are parameters like others, and test_methods.py resumes those on every
    engine; this is the longest check.
    """
    is_repeated = batch_norm == "average" and engine != "simulator"
    return [pytest.mark.slow] if is_repeated and check.name == "run_can_be_resumed" else []


@pytest.mark.parametrize(
    ("engine", "batch_norm", "check"),
    [
        pytest.param(
            engine,
            batch_norm,
            check,
            id=f"{engine}-{batch_norm}-{check.name}",
            marks=_marks(engine, batch_norm, check),
        )
        for engine in ENGINES
        for batch_norm, names in SETTINGS.items()
        for check in CHECKS
        if check.name in names
    ],
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:manifold")  # these federations are too small for UMAP
def test_method_passes(name: str, engine: EngineName, check: Check, batch_norm: BatchNorm) -> None:
    if batch_norm == "own" and name in REFUSED:
        pytest.skip("refused")
    try:
        check.run(under_test(name, batch_norm).on(engine))
    except NotApplicableError as reason:
        pytest.skip(str(reason))
