"""A table: its runs, their execution, and the comparison with the paper."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from typer.testing import CliRunner

import fedclade as fc
from fedclade.cli.main import app
from fedclade.errors import InvalidInputError
from fedclade.reproduce import spec as definitions
from fedclade.reproduce.compare_to_paper import Checked, Outcome, in_words
from fedclade.reproduce.execute import Options, TableEntry, plan, thinned
from fedclade.reproduce.markdown import IMPORTED, claim_in_words, from_json, page
from fedclade.reproduce.paper_metrics import measure
from fedclade.reproduce.parallel import execute_in_processes
from fedclade.reproduce.spec import Claim, Row, Table

Done = Callable[..., tuple[Outcome, list[TableEntry]]]

SMALL: dict[str, Any] = {
    "name": "small",
    "title": "A small table",
    "paper": "nobody",
    "tolerance": 5.0,
    "seeds": 2,
    "experiment": {
        "partition": {"name": "label_clusters", "clients": 6, "clusters": 2, "classes": 5},
        "model": {"name": "mlp", "hidden": 8},
        "run": {"rounds": 2, "clients_per_round": 1.0},
    },
    "quick": {"set": ["run.rounds=1"]},
    "columns": [
        {"name": "digits", "data": ["not_here", "digits"], "set": ["local.lr=0.1"]},
        {"name": "variance", "like": "digits", "metric": "accuracy_variance"},
        {"name": "nowhere", "data": ["not_here"]},
    ],
    "rows": [
        {
            "name": "FedAvg",
            "method": "fedavg",
            "paper": {"digits": 10.0, "variance": 1e6},
            "why": "It is another data set.",
        },
        {
            "name": "FedProx, strong",
            "method": "fedprox",
            "set": ["method.mu=1.0"],
            "sets": {"digits": ["local.epochs=2"]},
        },
        {"name": "True groups", "method": "oracle", "skip": ["variance"]},
    ],
    "claims": [{"rising": ["FedAvg", "True groups"], "columns": ["digits"], "slack": 100.0}],
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Table:
    table = TypeAdapter(Table).validate_python(SMALL)
    monkeypatch.setattr(definitions, "tables", lambda: {"small": table})
    index = {"tables": {"small": table.title}}
    monkeypatch.setattr("fedclade.cli.reproduce.read_index", lambda: index)
    return table


def test_several_processes_give_the_same_cells(small: Table, tmp_path: Path, done: Done) -> None:
    planned = plan(small, Options(seeds=1, device="cpu"))
    finished: list[tuple[str, int, int]] = []
    execute_in_processes(
        planned,
        tmp_path / "parallel",
        2,
        lambda entry, number, total: finished.append((entry.row.name, number, total)),
    )
    assert sorted(name for name, *_ in finished) == ["FedAvg", "FedProx, strong", "True groups"]
    assert [counts for _, *counts in finished] == [[1, 3], [2, 3], [3, 3]]
    result, started = done(small, tmp_path / "parallel", seeds=1)
    assert started == []  # all runs were read
    alone, _ = done(small, tmp_path / "alone", seeds=1)
    assert result.cells == alone.cells


def test_an_error_in_a_process_reaches_the_caller(small: Table, tmp_path: Path) -> None:
    row = replace(small.rows[0], set=("partition.classes=77",))
    planned = plan(replace(small, rows=(row,)), Options(seeds=1, device="cpu"))
    with pytest.raises(InvalidInputError) as caught:
        execute_in_processes(planned, tmp_path, 2, lambda *_: None)
    assert caught.value.field == "partition.clusters"


def test_cells_have_their_settings_and_columns_share_runs(
    small: Table, tmp_path: Path, done: Done
) -> None:
    planned = plan(small, Options())
    assert planned.data == {"digits": "digits", "variance": "digits", "nowhere": None}
    assert len(planned.entries) == 3 * 2  # rows and seeds; the variance is read from the same runs
    experiment = planned.entries["FedProx, strong", "digits", 1].experiment(None)
    assert (
        experiment.run.seed,
        experiment.local.lr,
        experiment.local.epochs,
        experiment.method,
    ) == (1, 0.1, 2, fc.FedProx(mu=1.0))
    result, started = done(small, tmp_path, seeds=1)
    assert len(started) == 3
    assert [(cell.row, cell.column) for cell in result.cells] == [
        *(("FedAvg", "digits"), ("FedProx, strong", "digits"), ("True groups", "digits")),
        *(("FedAvg", "variance"), ("FedProx, strong", "variance")),
    ]


def test_columns_of_the_accuracy_show_how_clients_fare(
    small: Table, tmp_path: Path, done: Done
) -> None:
    result, _ = done(small, tmp_path, seeds=2)
    cells = {(cell.row, cell.column): cell for cell in result.cells}
    folders = plan(small, Options(seeds=2)).entries
    runs = {
        (row, seed): fc.load(tmp_path / entry.label) for (row, _, seed), entry in folders.items()
    }
    fedavg, groups = ([runs[row, seed] for seed in (0, 1)] for row in ("FedAvg", "True groups"))
    numbers = cells["True groups", "digits"].fairness
    for name in ("accuracy_worst10", "accuracy_variance"):
        expected = [run.summary[name] for run in groups]
        assert numbers[name] == pytest.approx(sum(expected) / 2)
    worse = [
        sum(own < other for own, other in zip(*pair, strict=True)) / len(pair[0])
        for run, base in zip(groups, fedavg, strict=True)
        for pair in [(run.clients["accuracy"], base.clients["accuracy"])]
    ]
    assert numbers["hurt_against_fedavg"] == pytest.approx(100 * sum(worse) / 2)
    # No row is Local, and FedAvg is not compared with itself. A variance has no such numbers.
    assert set(cells["FedAvg", "digits"].fairness) == {"accuracy_worst10", "accuracy_variance"}
    assert cells["FedAvg", "variance"].fairness == {}
    assert from_json(json.loads(json.dumps(result.as_json()))).cells == result.cells
    first, second = page(result).split("**variance**")
    assert "| worst tenth, % | variance, %² | worse than FedAvg, % |" in first
    assert "worst tenth" not in second


def test_finished_runs_are_not_repeated(small: Table, tmp_path: Path, done: Done) -> None:
    first, _ = done(small, tmp_path, seeds=1)
    again, started = done(small, tmp_path, seeds=1)
    assert started == []
    assert again.cells == first.cells
    _, started = done(small, tmp_path, seeds=2)
    assert {entry.seed for entry in started} == {1}


def test_a_table_records_the_environment_of_its_runs(
    small: Table, tmp_path: Path, done: Done
) -> None:
    first, _ = done(small, tmp_path, seeds=1)
    made = next(tmp_path.glob("fedavg-*/about.json"))
    made.write_text(json.dumps({**json.loads(made.read_text()), "machine": "another one"}))
    again, _ = done(small, tmp_path, seeds=1)
    assert again.about["machine"] == f"another one, {first.about['machine']}"
    assert again.about["torch"] == first.about["torch"]


def test_a_truncated_file_is_reported(small: Table, tmp_path: Path, done: Done) -> None:
    done(small, tmp_path, seeds=1)
    made = next(tmp_path.glob("fedavg-*/about.json"))
    made.write_text(made.read_text()[:20])
    with pytest.raises(InvalidInputError, match=r"about\.json: "):
        done(small, tmp_path, seeds=1)


def test_numbers_are_compared_with_the_paper(small: Table, tmp_path: Path, done: Done) -> None:
    result, _ = done(small, tmp_path)
    cells = {(cell.row, cell.column): cell for cell in result.cells}
    fedavg = cells["FedAvg", "digits"]
    assert len(fedavg.values) == 2
    assert fedavg.mean == pytest.approx(sum(fedavg.values) / 2)  # type: ignore[arg-type]
    assert fedavg.difference == pytest.approx(fedavg.mean - 10.0)  # type: ignore[operator]
    assert (fedavg.mark, in_words(fedavg)) == ("above", "better")
    variance = cells["FedAvg", "variance"]
    assert (variance.mark, in_words(variance)) == (
        "below",
        "better",
    )  # the less it varies, the better
    assert cells["True groups", "digits"].mark == ""
    assert [(claim.place, claim.holds) for claim in result.claims] == [("digits", True)]


def test_a_claim_that_does_not_hold(small: Table, tmp_path: Path, done: Done) -> None:
    false = replace(small, claims=(replace(small.claims[0], slack=-100.0),))
    result, _ = done(false, tmp_path, seeds=1)
    assert [claim.holds for claim in result.claims] == [False]
    assert "(slack -100): **does not hold**" in page(result)


def test_a_claim_is_printed_with_its_slack() -> None:
    claim = Checked("MNIST", ("A", "B"), (1.0, 0.8), holds=True, slack=0.5)
    assert claim_in_words(claim) == ("MNIST: A 1.00 ≤ B 0.80 (slack 0.5)", "holds")
    exact = Checked("MNIST", ("A", "B"), (1.0, 0.8), holds=False)
    assert claim_in_words(exact) == ("MNIST: A 1.00 ≤ B 0.80", "does not hold")


def test_an_imported_number_is_printed_and_not_judged(
    small: Table, tmp_path: Path, done: Done
) -> None:
    rows = (replace(small.rows[0], imported=True), *small.rows[1:])
    result, _ = done(replace(small, rows=rows), tmp_path, seeds=1)
    fedavg = next(cell for cell in result.cells if cell.row == "FedAvg")
    assert (fedavg.mark, fedavg.imported) == ("", True)
    assert fedavg.difference is not None
    assert "| FedAvg\\* | 10.00 |" in page(result)
    assert IMPORTED in page(result)


def test_a_claim_may_be_about_one_row_and_several_columns(
    small: Table, tmp_path: Path, done: Done
) -> None:
    claims = (
        Claim(rising=("digits", "variance"), row="FedAvg"),
        Claim(rising=("variance", "digits"), row="FedAvg"),
    )
    result, _ = done(replace(small, claims=claims), tmp_path, seeds=1)
    accuracy, variance = (cell.mean for cell in result.cells if cell.row == "FedAvg")
    assert accuracy is not None
    assert variance is not None
    assert [(claim.place, claim.holds) for claim in result.claims] == [
        ("FedAvg", accuracy <= variance),
        ("FedAvg", variance <= accuracy),
    ]


def test_the_page_lists_substitutes_missing_data_and_reasons(
    small: Table, tmp_path: Path, done: Done
) -> None:
    result, _ = done(small, tmp_path, seeds=1)
    text = page(result)
    assert "digits: digits in place of not_here." in text
    assert "nowhere: not measured, because not_here" in text
    assert "1. It is another data set." in text
    assert "| *True groups* | – |" in text
    assert from_json(json.loads(json.dumps(result.as_json()))) == result


def test_a_quick_version_is_not_compared_with_the_paper(
    small: Table, tmp_path: Path, done: Done
) -> None:
    result, started = done(small, tmp_path, quick=True)
    assert {entry.experiment(None).run.rounds for entry in started} == {1}
    assert all(cell.difference is None and cell.mark == "" for cell in result.cells)
    assert result.claims == ()
    assert "--quick" in page(result)


def test_only_some_methods_and_columns(small: Table) -> None:
    planned = plan(small, Options(methods=("oracle",), columns=("digits",)))
    assert {(row, column) for row, column, _ in planned.entries} == {("True groups", "digits")}
    assert {row for row, _, _ in plan(small, Options(methods=("FedAvg", "oracle"))).entries} == {
        "FedAvg",
        "True groups",
    }
    with pytest.raises(fc.InvalidInputError, match=r"fedavgg.*'fedavg'") as caught:
        plan(small, Options(methods=("fedavgg",)))
    assert caught.value.field == "--methods"
    with pytest.raises(fc.InvalidInputError, match=r"digit.*'digits'") as caught:
        plan(small, Options(columns=("digit",)))
    assert caught.value.field == "--column"


def test_probe_samples_are_set_apart_if_a_row_of_the_column_needs_them(
    small: Table, tmp_path: Path, done: Done
) -> None:
    flis = replace(small.rows[0], name="FLIS", method="flis_dc", paper={})
    for rows, skip, probe in (
        ((), (), 0),
        ((flis,), (), 143),
        ((flis,), ("digits", "variance"), 0),
    ):
        table = replace(
            small, rows=(*small.rows, *(replace(row, skip=skip) for row in rows)), claims=()
        )
        folder = tmp_path / f"{len(rows)}-{len(skip)}"
        result, started = done(table, folder, seeds=1, methods=("fedavg",))
        assert {entry.row.name for entry in started} == {"FedAvg"}
        least, most = result.sizes["digits"]
        assert (least.clients, least.probe, most.probe) == (6, probe, probe)
        assert least.samples == pytest.approx((1438 - probe) / 6, abs=3)
        apart = "143 probe samples set apart" if probe else "no probe samples"
        words = (
            f"digits: 6 clients, {least.samples:,.0f} training samples per client (median), {apart}"
        )
        assert words in page(result)


def test_measures_from_a_history() -> None:
    history = [
        {"round": 1, "bytes_up": 1_000_000, "bytes_down": 500_000, "clusters": 1},
        {"round": 2, "bytes_up": 1_000_000, "bytes_down": 500_000, "clusters": 3, "accuracy": 70.0},
        {"round": 3, "bytes_up": 1_000_000, "bytes_down": 500_000, "clusters": 2, "accuracy": 80.0},
    ]
    assert measure("rounds_to 75", {}, history) == 3
    assert measure("megabits_to 70", {}, history) == pytest.approx(2 * 1.5 * 8)
    assert measure("rounds_to 90", {}, history) is None
    assert measure("megabits_to 90", {}, history) is None
    tuned = [*history, {**history[0], "round": 4, "accuracy": 85.0, "accuracy_shared": 60.0}]
    assert measure("rounds_to_tuned 75", {}, tuned) == 4
    assert measure("megabits_to_tuned 75", {}, tuned) == pytest.approx(4 * 1.5 * 8)
    assert measure("rounds_to_tuned 75", {}, history) is None
    assert measure("rounds_to 82", {}, tuned) is None
    assert measure("accuracy", tuned[-1], tuned) == 60.0
    assert measure("accuracy_tuned", tuned[-1], tuned) == 85.0
    assert measure("accuracy", history[-1], history) == 80.0
    assert measure("accuracy_tuned", history[-1], history) is None
    assert measure("accuracy_at 2", {}, history) == 70.0
    assert measure("best_accuracy", {}, history) == 80.0
    assert measure("accuracy_of_last 2", {}, history) == 75.0
    assert measure("most clusters", {}, history) == 3
    assert measure("ari", {"ari": None}, history) is None


def test_an_unknown_key_of_a_table_is_rejected() -> None:
    with pytest.raises(ValidationError, match="toleranse"):
        TypeAdapter(Table).validate_python({**SMALL, "toleranse": 1.0})


def test_the_command(small: Table, tmp_path: Path) -> None:
    runner, folder = CliRunner(), tmp_path / "out"
    outcome = runner.invoke(
        app, ["reproduce", "small", "--seeds", "1", "--out", str(folder), "--device", "cpu"]
    )
    assert outcome.exit_code == 0, outcome.output
    assert "FedAvg" in outcome.output
    assert "better" in outcome.output
    assert json.loads((folder / "table.json").read_text())["table"] == "small"
    assert (folder / "table.md").read_text().startswith("# A small table")
    # One of the two seeds is finished.
    so_far = runner.invoke(app, ["reproduce", "small", "--so-far", "--out", str(folder)])
    assert so_far.exit_code == 0, so_far.output
    assert {
        len(cell["values"]) for cell in json.loads((folder / "table.json").read_text())["cells"]
    } == {1}
    nothing = runner.invoke(
        app, ["reproduce", "small", "--so-far", "--out", str(tmp_path / "nothing")]
    )
    assert isinstance(nothing.exception, fc.InvalidInputError)
    assert nothing.exception.field == "--so-far"
    assert str(tmp_path / "nothing") in str(nothing.exception)
    again = runner.invoke(app, ["reproduce", "small", "--out", str(folder)])
    assert isinstance(again.exception, fc.InvalidInputError)
    assert again.exception.field == "--out"
    assert "--resume" in str(again.exception)


def test_all_tables(small: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(small, name="broken", study="cfl_directions", rows=(Row("x"),), claims=())
    nowhere = replace(small, name="nowhere", columns=small.columns[2:])
    again = replace(small, name="small_again", columns=small.columns[:1], rows=small.rows[:1])
    found = {table.name: table for table in (broken, nowhere, again, small)}
    monkeypatch.setattr(definitions, "tables", lambda: found)
    runner, folder = CliRunner(), tmp_path / "out"
    command = ["reproduce", "all", "--quick", "--quiet", "--device", "cpu", "--out", str(folder)]
    first = runner.invoke(app, command)
    assert first.exit_code == 1, first.output
    for line in (
        "broken +failed: ",
        "nowhere +not run: ",
        "small_again +1 cells",
        "small +5 cells",
    ):
        assert re.search(line, first.output), first.output
    for name in ("small", "small_again"):
        assert json.loads((folder / f"{name}.json").read_text())["table"] == name
        assert (folder / f"{name}.md").exists()
    assert not (folder / "nowhere.md").exists()
    assert len(list((folder / "runs").glob("fedavg-*"))) == 1  # two tables share it
    resumed = runner.invoke(app, [*command, "--resume"])
    assert resumed.exit_code == 1
    found.pop("broken")
    assert runner.invoke(app, [*command, "--so-far"]).exit_code == 0
    for option in ("--methods", "--column"):
        wrong = runner.invoke(app, ["reproduce", "all", option, "fedavg"])
        assert isinstance(wrong.exception, fc.InvalidInputError)
        assert wrong.exception.field == option


@pytest.mark.usefixtures("small")
def test_tables_are_listed_and_an_unknown_one_is_rejected() -> None:
    runner = CliRunner()
    assert "A small table" in runner.invoke(app, ["reproduce"]).output
    unknown = runner.invoke(app, ["reproduce", "smal"])
    assert isinstance(unknown.exception, fc.InvalidInputError)
    assert unknown.exception.field == "TABLE"
    assert "'small'" in str(unknown.exception)


@pytest.mark.usefixtures("small")
def test_without_data_nothing_is_run(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(
        app, ["reproduce", "small", "--column", "nowhere", "--out", str(tmp_path / "out")]
    )
    assert isinstance(outcome.exception, fc.InvalidInputError)
    assert outcome.exception.field == "TABLE"
    assert "not_here" in str(outcome.exception)
    assert not (tmp_path / "out").exists()


def test_a_quick_version_takes_samples_evenly() -> None:
    x = torch.arange(100.0).view(100, 1)
    data = fc.data.dataset(
        x,
        torch.arange(100) % 10,
        x[:40],
        torch.arange(40) % 10,
        writer=(torch.arange(100), torch.arange(40)),
    )
    few = thinned(data, 30)
    # Every fourth sample: every third would be more than 30.
    assert few.x_train.flatten().tolist() == list(range(0, 100, 4))
    assert few.x_test.flatten().tolist() == list(range(0, 40, 3))
    train, test = few.keys["writer"]
    assert test is not None
    assert (train.tolist(), test.tolist()) == (list(range(0, 100, 4)), list(range(0, 40, 3)))


def test_a_row_with_a_comma_in_its_name_can_be_chosen(small: Table) -> None:
    pieces = ("FedProx", "strong", "oracle")  # --methods "FedProx, strong,oracle"
    planned = plan(small, Options(methods=pieces))
    assert {row for row, _, _ in planned.entries} == {"FedProx, strong", "True groups"}
