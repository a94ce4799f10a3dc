"""Every method of fedclade passes every check of `fedclade.conformance` on every engine."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

import pytest
from _pytest.mark import ParameterSet

from fedclade import (
    APFL,
    FLT,
    FLUX,
    IFCA,
    PCAHC,
    SCAFFOLD,
    Clade,
    CladeGroups,
    Ditto,
    FedALA,
    FedAvgFineTune,
    FedBABU,
    FedDBE,
    FedDrift,
    FedEM,
    FedGMCC,
    FedRep,
    FedSEM,
    KNNPer,
    LGFedAvg,
    Method,
    PerFedAvg,
    PFedGraph,
)
from fedclade.conformance import CHECKS, ENGINES, Check, MethodUnderTest, NotApplicableError
from fedclade.conformance.method_run import EngineName
from fedclade.methods import METHODS
from fedclade.methods.flis import FLISDC, FLISHC

MAX_STATEMENTS = 120  # of a method's module, however its lines are broken
CASES: dict[str, Callable[[], Method]] = {
    # FedBN needs a model with BatchNorm: see test_batch_norm.py.
    **{name: method for name, method in METHODS.items() if name != "fedbn"},
    "ifca, all options": lambda: IFCA(
        clusters=2, shared_layers="trunk", warm_up=1, num_restarts=2, trial_rounds=1
    ),
    "scaffold, option 1": lambda: SCAFFOLD(option=1, weights="clients", server_lr=0.5),
    "per_fedavg, hessian-free": lambda: PerFedAvg(variant="hessian-free"),
    "flis_dc, soft": lambda: FLISDC(labels="soft", beta=0.8),
    "flis_hc, soft, single": lambda: FLISHC(labels="soft", linkage="single"),
    "fedsem, last layer": lambda: FedSEM(clusters=2, layers="last"),
    "pca_hc, shared": lambda: PCAHC(clusters=2, basis="shared"),
    "fedgmcc, straight": lambda: FedGMCC(curve_steps=0, step=0),
    "flt, private": lambda: FLT(k=1, signature_epsilon=1.0, secret=1),
    "clade_groups, private": lambda: CladeGroups(signature_epsilon=1.0, secret=1),
    "fedem, FedRC": lambda: FedEM(components=2, fedrc=True),
    "knn_per, none held out": lambda: KNNPer(k=2, hold_out=False),
    "lg_fedavg, head local": lambda: LGFedAvg(local_layers=("fc2",)),
    "fedavg_finetune, given": lambda: FedAvgFineTune(fine_tune_epochs=1, alpha=0.5),
    "fedbabu, head": lambda: FedBABU(fine_tune="head", fine_tune_epochs=1),
    "fedrep, no tuning": lambda: FedRep(head_epochs=1, final_head_epochs=0, weights="examples"),
    "ditto, given": lambda: Ditto(lam=0.5, weights="clients"),
    "apfl, outputs": lambda: APFL(mix="outputs"),
    "feddbe, regularized": lambda: FedDBE(offset="outputs", kappa=0.5),
    "pfedgraph, mixture": lambda: PFedGraph(use="mixture"),
    "flux, at once": lambda: FLUX(first_round=1, last_round=1),
    "feddrift, every round": lambda: FedDrift(interval=1, delta=0.2),
    "clade_groups, unlabeled": lambda: CladeGroups(late="features"),
    "clade, unlabeled": lambda: Clade(late="features"),
    "fedala, two layers": lambda: FedALA(top_layers=("fc1", "fc2"), first_passes=2),
}


@cache
def under_test(name: str) -> MethodUnderTest:
    """One object per case, so that its plain run is made once."""
    return MethodUnderTest(CASES[name]())


def combinations() -> Iterator[ParameterSet]:
    """Every method, engine and check. The sharded engine runs the simulator's code, so that its
    results are the same bytes is enough for every day.
    """
    for check, engine, name in product(CHECKS, ENGINES, CASES):
        is_slow = engine == "sharded" and check.name != "shards_give_the_same_bytes"
        marks = [pytest.mark.slow] if is_slow else []
        yield pytest.param(name, engine, check, marks=marks, id=f"{check.name}-{engine}-{name}")


@pytest.mark.parametrize(("name", "engine", "check"), list(combinations()))
@pytest.mark.filterwarnings("ignore:manifold")  # these federations are too small for UMAP
def test_method_passes(name: str, engine: EngineName, check: Check) -> None:
    try:
        check.run(under_test(name).on(engine))
    except NotApplicableError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_one_small_file(name: str) -> None:
    assert METHODS[name].name == name
    module = inspect.getmodule(METHODS[name])
    assert module is not None
    tree = ast.parse(inspect.getsource(module))
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) <= MAX_STATEMENTS
