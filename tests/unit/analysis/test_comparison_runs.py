"""A comparison: the same clients for every method, settings of one method for that method alone,
and how seeds are put together.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import fedclade as fc
from fedclade.analysis.comparison_runs import execute, plan, runs
from fedclade.errors import InvalidInputError
from fedclade.registry import REGISTRY
from fedclade.training.experiment_file import Experiment, read

TABLES = {**read("quickstart"), "run": {"rounds": 1, "clients_per_round": 0.2}}


@pytest.fixture(autouse=True)
def _methods_of_my_own() -> Iterator[None]:
    """Two methods with a setting, known for the time of a test."""
    before = dict(REGISTRY["method"])

    @fc.register("method", "warm")
    @dataclass(frozen=True)
    class Warm(fc.FedAvg):
        title: ClassVar[str] = "FedAvg with a setting"
        degree: int = 1

    @fc.register("method", "warmer")
    @dataclass(frozen=True)
    class Warmer(Warm):
        degree: int = 2

    yield
    REGISTRY["method"].clear()
    REGISTRY["method"].update(before)


def test_an_experiment_for_each_method_in_the_order_asked() -> None:
    assert [each.method.name for each in plan(TABLES, ["local", "fedavg", "warm"], [])] == [
        "local",
        "fedavg",
        "warm",
    ]


def test_all_but_the_method_is_the_same_for_all() -> None:
    first, second = plan(TABLES, ["fedavg", "local"], ["run.rounds=5", "partition.clients=7"])
    assert (first.data, first.partition, first.scheme, first.model) == (
        second.data,
        second.partition,
        second.scheme,
        second.model,
    )
    assert (first.local, first.run, first.engine) == (second.local, second.run, second.engine)
    assert (first.run.rounds, first.partition.clients) == (5, 7)


def test_a_setting_of_one_method_concerns_that_method_alone() -> None:
    warm, fedavg, warmer = plan(TABLES, ["warm", "fedavg", "warmer"], ["warm.degree=7"])
    assert getattr(warm.method, "degree") == 7  # noqa: B009 (not a field of every method)
    assert getattr(warmer.method, "degree") == 2  # noqa: B009
    assert fedavg.method == fc.FedAvg()


def test_the_files_own_method_settings_are_kept_for_that_method_and_dropped_for_others() -> None:
    tables = {**TABLES, "method": {"name": "warm", "degree": 9}}
    warm, warmer = plan(tables, ["warm", "warmer"], [])
    assert (warm.method.degree, warmer.method.degree) == (
        9,
        2,
    )


@pytest.mark.parametrize("methods", [["fedavg"], ["fedavg", "local"]], ids=",".join)
def test_local_settings_can_be_set_for_all_methods(methods: list[str]) -> None:
    for each in plan(TABLES, methods, ["local.lr=0.5", "local.epochs=3"]):
        assert (each.local.lr, each.local.epochs) == (0.5, 3)


@pytest.mark.parametrize(
    ("methods", "sets", "says"),
    [
        ([], [], ["--methods", "at least one"]),
        (["fedavg", "fedvag"], [], ["--methods", "'fedvag'", "'fedavg'"]),
        (["fedavg", "local", "fedavg"], [], ["--methods fedavg,local,fedavg", "twice"]),
        (["warm"], ["warm.degre=3"], ["method.degre", "'degree'"]),
        (["warm"], ["warm.degree=hot"], ["method.degree", "whole number"]),
        (["warm"], ["wram.degree=3"], ["[wram]", "unknown table"]),
        (["fedavg"], ["run.round=3"], ["run.round", "'rounds'"]),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    methods: list[str], sets: list[str], says: list[str]
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        plan(TABLES, methods, sets)
    for part in says:
        assert part in str(refused.value)


def run_in(folder: Path) -> Any:
    def one(planned: Experiment) -> fc.Result:
        return planned.to_run(planned.clients(), "cpu").run(folder / planned.label)

    return one


def test_every_method_gets_the_same_clients_and_every_seed_others(tmp_path: Path) -> None:
    seen: dict[str, fc.data.Clients] = {}

    def one(planned: Experiment) -> fc.Result:
        run = planned.to_run(planned.clients(), "cpu")
        seen[planned.label] = run.clients
        return run.run(tmp_path / planned.label)

    execute(runs(plan(TABLES, ["fedavg", "local"], ["run.seed=3"]), 2), tmp_path, False, one)
    assert sorted(seen) == ["fedavg-seed3", "fedavg-seed4", "local-seed3", "local-seed4"]
    for seed in (3, 4):
        first, second = seen[f"fedavg-seed{seed}"], seen[f"local-seed{seed}"]
        for of in ("train", "test"):
            assert torch.equal(getattr(first, of).index, getattr(second, of).index)
            assert torch.equal(getattr(first, of).offsets, getattr(second, of).offsets)
        assert torch.equal(first.x, second.x)
        assert torch.equal(first.test_part_id, second.test_part_id)
    assert not torch.equal(seen["fedavg-seed3"].train.index, seen["fedavg-seed4"].train.index)


def test_the_rows_are_means_over_seeds_with_their_spread(tmp_path: Path) -> None:
    rows = execute(
        runs(plan(TABLES, ["fedavg", "local"], []), 3), tmp_path, False, run_in(tmp_path)
    )
    assert [(row["method"], row["seeds"]) for row in rows] == [("fedavg", 3), ("local", 3)]
    for row in rows:
        summaries = [fc.load(tmp_path / f"{row['method']}-seed{seed}").summary for seed in range(3)]
        for name in (
            "accuracy",
            "accuracy_stderr",
            "accuracy_variance",
            "accuracy_worst10",
            "ari",
            "bytes_up",
            "bytes_down",
            "seconds",
        ):
            assert row[name] == pytest.approx(
                statistics.fmean(summary[name] for summary in summaries)
            ), name
        assert row["accuracy_std"] == pytest.approx(
            statistics.stdev(summary["accuracy"] for summary in summaries)
        )
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert written["rows"] == rows
    assert [summary["seed"] for summary in written["runs"]["local"]] == [0, 1, 2]


def test_one_seed_has_no_spread(tmp_path: Path) -> None:
    (row,) = execute(runs(plan(TABLES, ["fedavg"], []), 1), tmp_path, False, run_in(tmp_path))
    assert (row["seeds"], row["accuracy_std"]) == (1, None)
    assert row["accuracy"] == fc.load(tmp_path / "fedavg-seed0").summary["accuracy"]
