"""A researcher with a new method: subclass, register, check, describe, compare."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Call = Callable[..., str]
METHOD = '''
from dataclasses import dataclass, replace
from typing import ClassVar

import fedclade as fc
from fedclade.aggregation import weighted_mean
from fedclade.core import ModelAssignment, SegmentSum, sgd


@fc.register("method", "slow_mean")
@dataclass(frozen=True)
class SlowMean(fc.FedAvg):
    """w_{t+1} = (1 - β) w_t + β mean_k w_k: the server moves a share β of the way.

    Args:
        beta: β.
    """

    title: ClassVar[str] = "FedAvg that moves a share of the way"
    paper: ClassVar[str] = "a draft"

    beta: float = 0.5

    def round(self, fed, state, cohort, key):
        clusters = state.cluster_ids[cohort]
        weights = fed.sizes[cohort].float()
        by_group = SegmentSum(segment_ids=clusters, weights=weights, num_segments=len(state))
        assignment = ModelAssignment(state.models, clusters)
        results = fed.map(
            sgd(self.local), cohort, per_client=assignment, key=key, reduce=by_group
        )
        mean = weighted_mean(results.sums, results.total_weight, fallback=state.models)
        moved = {
            name: old + self.beta * (mean[name] - old) for name, old in state.models.items()
        }
        return replace(state, models=moved)
'''


def test_a_new_method(person: Call, tmp_path: Path) -> None:
    (tmp_path / "slow_mean.py").write_text(METHOD)
    out = person("fedclade", "describe", "slow_mean", "--import", "slow_mean.py")
    assert "beta = 0.5" in out
    out = person("fedclade", "check-method", "slow_mean.py")
    assert "All checks passed." in out
    out = person(
        *("fedclade", "compare", "quickstart", "--methods", "fedavg,slow_mean"),
        *("--import", "slow_mean.py", "--set", "slow_mean.beta=1.0,0.5", "--rounds", "5"),
        *("--out", "runs/beta", "--json", "--no-report"),
    )
    accuracy = {row["method"]: row["accuracy"] for row in json.loads(out)["rows"]}
    # With β = 1 it is FedAvg.
    assert accuracy["slow_mean beta=1.0"] == accuracy["fedavg"]
    assert accuracy["slow_mean beta=0.5"] != accuracy["fedavg"]
