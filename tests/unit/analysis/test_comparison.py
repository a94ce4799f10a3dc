"""`fc.compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fedclade as fc

SETTINGS = {"rounds": 2, "clients_per_round": 4, "lr": 0.1}
MODEL = fc.models.MLP(8)


def test_the_runs_are_those_of_fc_run(small_digits: fc.data.Clients) -> None:
    comparison = fc.compare(["fedavg", fc.Local()], small_digits, MODEL, seeds=2, **SETTINGS)
    assert {title: len(results) for title, results in comparison.results.items()} == {
        "fedavg": 2,
        "local": 2,
    }
    again = fc.run(fc.FedAvg(), small_digits, MODEL, rounds=2, clients_per_round=4, lr=0.1, seed=1)
    accuracy = again.summary["accuracy"]
    assert comparison.results["fedavg"][1].summary["accuracy"] == accuracy
    accuracies = [result.summary["accuracy"] for result in comparison.results["fedavg"]]
    assert comparison.rows[0]["accuracy"] == pytest.approx(sum(a or 0 for a in accuracies) / 2)
    assert comparison.differences.seeds == (0, 1)
    assert comparison.folder is None


def test_titles_seeds_and_clients_of_each_seed(small_digits: fc.data.Clients) -> None:
    asked = []

    def clients(seed: int) -> fc.data.Clients:
        asked.append(seed)
        return small_digits

    methods = {"slow <b>": fc.FedProx(mu=1.0), "fast": fc.FedProx(mu=0.01)}
    comparison = fc.compare(methods, clients, MODEL, seeds=(7, 3), **SETTINGS)
    assert asked == [7, 3]
    assert [row["method"] for row in comparison.rows] == ["slow <b>", "fast"]
    assert "slow <b>" in str(comparison)
    html = comparison._repr_html_()
    assert "slow &lt;b&gt;" in html
    assert "<script" not in html
    for sentence in comparison.differences.in_words:
        assert sentence in str(comparison)


def test_progress_names_the_title_and_the_seed(
    small_digits: fc.data.Clients, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = {"near": fc.FedProx(mu=1.0), "far": fc.FedProx(mu=0.01)}
    fc.compare(methods, small_digits, MODEL, seeds=(4,), progress=True, **SETTINGS)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(": round 2/2")[0] for line in err.splitlines()] == [
        "near-seed4",
        "far-seed4",
    ]


def test_a_folder_is_that_of_the_command_line(
    small_digits: fc.data.Clients, tmp_path: Path
) -> None:
    out = tmp_path / "both"
    comparison = fc.compare(["fedavg", "local"], small_digits, MODEL, out=out, **SETTINGS)
    written = json.loads((out / "comparison.json").read_text())
    assert written["folders"] == {"fedavg": ["fedavg-seed0"], "local": ["local-seed0"]}
    assert [row["method"] for row in written["rows"]] == ["fedavg", "local"]
    assert (out / "report.html").exists()
    assert fc.load(out / "local-seed0").summary["method"] == "local"
    resumed = fc.compare(["fedavg", "local"], small_digits, MODEL, out=out, resume=True, **SETTINGS)
    assert all(result[0].already_finished for result in resumed.results.values())
    assert resumed.rows == comparison.rows
    with pytest.raises(fc.InvalidInputError, match="already holds a run"):
        fc.compare(["fedavg"], small_digits, MODEL, out=out, **SETTINGS)
    with pytest.raises(fc.InvalidInputError, match="single run"):
        fc.compare(["fedavg"], small_digits, MODEL, out=out / "local-seed0", **SETTINGS)


def test_report_and_figures_of_results_in_memory(
    small_digits: fc.data.Clients, tmp_path: Path
) -> None:
    comparison = fc.compare(["fedavg", "local"], small_digits, MODEL, **SETTINGS)
    assert comparison.report(tmp_path / "page.html").stat().st_size > 10_000
    assert comparison.plot().axes
    with pytest.raises(fc.InvalidInputError, match="figure = 'nonsense'"):
        comparison.plot("nonsense")


@pytest.mark.parametrize(
    ("methods", "more", "field"),
    [
        ("fedavg", {}, "methods"),
        ([], {}, "methods"),
        (["fedavg", fc.FedAvg()], {}, "methods"),
        (["fedvag"], {}, "methods"),
        ([fc.FedAvg], {}, "methods"),
        (["fedavg"], {"seeds": 0}, "seeds"),
        (["fedavg"], {"seeds": ()}, "seeds"),
        (["fedavg"], {"seeds": (1, 1)}, "seeds"),
        (["fedavg"], {"seed": 3}, "seed"),
    ],
)
def test_bad_arguments(
    methods: object, more: dict[str, object], field: str, small_digits: fc.data.Clients
) -> None:
    with pytest.raises(fc.InvalidInputError) as caught:
        fc.compare(methods, small_digits, MODEL, **more)  # type: ignore[arg-type]
    assert caught.value.field == field
