"""A comparison: the same clients for every method, settings of one method, and means over seeds."""

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
from fedclade.methods.required_context import need_probe_samples
from fedclade.registry import REGISTRY
from fedclade.training.experiment_file import Experiment, read

TABLES = {**read("quickstart"), "run": {"rounds": 1, "clients_per_round": 0.2}}


@pytest.fixture(autouse=True)
def _custom_methods() -> Iterator[None]:
    """Two methods with a setting, registered during a test."""
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


def test_one_experiment_per_method_in_order() -> None:
    methods = ["local", "fedavg", "warm"]
    assert [experiment.method.name for experiment in plan(TABLES, methods, [])] == methods


def test_experiments_differ_only_in_the_method() -> None:
    first, second = plan(TABLES, ["fedavg", "local"], ["run.rounds=5", "partition.clients=7"])
    assert (first.data, first.partition, first.scheme, first.model) == (
        second.data,
        second.partition,
        second.scheme,
        second.model,
    )
    assert (first.local, first.run, first.engine) == (second.local, second.run, second.engine)
    assert (first.run.rounds, first.partition.clients) == (5, 7)


def test_a_setting_of_one_method_changes_only_that_method() -> None:
    warm, fedavg, warmer = plan(TABLES, ["warm", "fedavg", "warmer"], ["warm.degree=7"])
    assert getattr(warm.method, "degree") == 7  # noqa: B009 (not a field of every method)
    assert getattr(warmer.method, "degree") == 2  # noqa: B009
    assert fedavg.method == fc.FedAvg()


def test_method_settings_of_the_file_apply_only_to_its_method() -> None:
    tables = {**TABLES, "method": {"name": "warm", "degree": 9}}
    warm, warmer = plan(tables, ["warm", "warmer"], [])
    assert (warm.method.degree, warmer.method.degree) == (
        9,
        2,
    )


@pytest.mark.parametrize("methods", [["fedavg"], ["fedavg", "local"]], ids=",".join)
def test_local_settings_can_be_set_for_all_methods(methods: list[str]) -> None:
    for experiment in plan(TABLES, methods, ["local.lr=0.5", "local.epochs=3"]):
        assert (experiment.local.lr, experiment.local.epochs) == (0.5, 3)


@pytest.mark.parametrize(
    ("methods", "sets", "parts"),
    [
        (["fedavg", "fedvag"], [], ["--methods", "'fedvag'", "'fedavg'"]),
        (["warm"], ["warm.degre=3"], ["method.degre", "'degree'"]),
        (["warm"], ["warm.degree=hot"], ["method.degree", "hot"]),
        (["warm"], ["wram.degree=3"], ["[wram]"]),
        (["fedavg"], ["run.round=3"], ["run.round", "'rounds'"]),
    ],
)
def test_unknown_methods_and_settings_are_rejected_before_any_run(
    methods: list[str], sets: list[str], parts: list[str]
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        plan(TABLES, methods, sets)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("methods", "sets", "field", "value"),
    [
        ([], [], "--methods", "fedavg,local"),
        (["fedavg", "local", "fedavg"], [], "--methods", "fedavg,local,fedavg"),
        (["fedavg"], ["warm.degree=3"], "warm.degree", "(fedavg)"),
    ],
)
def test_invalid_lists_of_methods(
    methods: list[str], sets: list[str], field: str, value: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        plan(TABLES, methods, sets)
    assert caught.value.field == field
    assert value in str(caught.value)


@pytest.mark.parametrize(
    ("methods", "probe"),
    [(["fedavg", "pca_hc"], 0), (["fedavg", "flis_dc"], 143), (["flis_dc", "local"], 143)],
)
def test_probe_samples_are_set_apart_for_all_methods_if_one_needs_them(
    methods: list[str], probe: int
) -> None:
    # 1,438 training samples of digits
    tables = read("quickstart")
    tables["data"]["name"] = "digits"
    for experiment in runs(plan(tables, methods, []), 2):
        clients = experiment.clients()
        assert clients.origin["probe"] == probe
        assert int(clients.sizes.sum()) == 1438 - probe


def test_the_method_says_whether_it_needs_probe_samples() -> None:
    needs = [fc.PCAHC(basis="shared"), fc.FLISHC()]
    given = [fc.FLISDC(probe=torch.zeros(3, 64)), fc.PCAHC(), fc.FedAvg()]
    assert [need_probe_samples([method]) for method in [*needs, *given]] == [True] * 2 + [False] * 3
    assert need_probe_samples([*given, needs[0]])


def test_a_given_number_of_probe_samples_stays() -> None:
    sets = ["partition.probe=7"]
    for methods in (["fedavg"], ["fedavg", "flis_dc"]):
        for experiment in runs(plan(read("quickstart"), methods, sets), 1):
            assert experiment.clients().origin["probe"] == 7


def run_in(folder: Path) -> Any:
    def run(planned: Experiment) -> fc.Result:
        return planned.to_run(planned.clients(), "cpu").run(folder / planned.label)

    return run


def test_methods_share_clients_and_seeds_do_not(tmp_path: Path) -> None:
    clients: dict[str, fc.data.Clients] = {}

    def run(planned: Experiment) -> fc.Result:
        training_run = planned.to_run(planned.clients(), "cpu")
        clients[planned.label] = training_run.clients
        return training_run.run(tmp_path / planned.label)

    execute(runs(plan(TABLES, ["fedavg", "local"], ["run.seed=3"]), 2), tmp_path, False, run)
    assert sorted(clients) == ["fedavg-seed3", "fedavg-seed4", "local-seed3", "local-seed4"]
    for seed in (3, 4):
        first, second = clients[f"fedavg-seed{seed}"], clients[f"local-seed{seed}"]
        for split in ("train", "test"):
            assert torch.equal(getattr(first, split).index, getattr(second, split).index)
            assert torch.equal(getattr(first, split).offsets, getattr(second, split).offsets)
        assert torch.equal(first.x, second.x)
        assert torch.equal(first.test_part_id, second.test_part_id)
    assert not torch.equal(clients["fedavg-seed3"].train.index, clients["fedavg-seed4"].train.index)


def test_rows_are_means_and_standard_deviations_over_seeds(tmp_path: Path) -> None:
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


def test_one_seed_has_no_standard_deviation(tmp_path: Path) -> None:
    (row,) = execute(runs(plan(TABLES, ["fedavg"], []), 1), tmp_path, False, run_in(tmp_path))
    assert (row["seeds"], row["accuracy_std"]) == (1, None)
    assert row["accuracy"] == fc.load(tmp_path / "fedavg-seed0").summary["accuracy"]


def test_a_row_has_the_users_metrics_and_validation_data(tmp_path: Path) -> None:
    def metric(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return outputs.softmax(-1).gather(-1, y[:, None])[:, 0]

    sets = ["partition.clients=6", "data.validation=0.2", "run.clients_per_round=1.0"]
    experiments = runs(plan(TABLES, ["fedavg", "local"], sets), 2)

    def run(experiment: Experiment) -> fc.Result:
        from dataclasses import replace

        chosen = experiment.to_run(experiment.clients(), "cpu")
        return replace(chosen, metrics={"sure": metric}).run(tmp_path / experiment.label)

    rows = execute(experiments, tmp_path, False, run)
    for row in rows:
        summaries = [fc.load(tmp_path / f"{row['method']}-seed{seed}").summary for seed in (0, 1)]
        for name in ("sure", "validation_loss", "validation_accuracy"):
            values: list[Any] = [dict(summary)[name] for summary in summaries]
            assert row[name] == pytest.approx(statistics.fmean(values))
