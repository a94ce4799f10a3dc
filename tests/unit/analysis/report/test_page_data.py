"""The data of the page: numbers, sentences, and complete, unfinished or damaged folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedclade as fc
from fedclade.analysis import report
from fedclade.analysis.report import headlines
from fedclade.analysis.report.load import StoredRun
from fedclade.analysis.report.metric import METRICS, evenly, short
from fedclade.analysis.report.run_progress import progress_of
from fedclade.analysis.report.run_section import MAX_FAILURES, MAX_MEMBERS
from fedclade.errors import InvalidInputError

from .conftest import planted, train

ACCURACY, PERPLEXITY, LOSS = METRICS


def stored(method: str = "clade", **changes: object) -> StoredRun:
    tables = {
        "data": {"name": "d"},
        "partition": {"name": "p"},
        "model": {},
        "local": {},
        "method": {"name": method},
        "run": {"rounds": 9},
    }
    summary = {
        "clusters": 5,
        "clients": 40,
        "accuracy": 81.0,
        "accuracy_worst10": 70.0,
        "loss": 0.5,
    }
    return replace(
        StoredRun(method, method, Path(method), tables, [], summary, None, None), **changes
    )  # type: ignore[arg-type]


def numbers(accuracy: float, worst: float, clusters: int = 1) -> dict[str, object]:
    return {"clusters": clusters, "clients": 40, "accuracy": accuracy, "accuracy_worst10": worst}


def test_a_headline_relative_to_fedavg() -> None:
    clade, fedavg = stored(), stored("fedavg", summary=numbers(69.6, 39.0))
    assert (
        headlines.headline(clade, ACCURACY, [clade, fedavg])
        == "5 groups found; the mean client gains 11.4 points over FedAvg, the worst tenth 31.0."
    )
    assert (
        headlines.headline(fedavg, ACCURACY, [clade, fedavg])
        == "One model for all clients; the mean client has an accuracy of 69.6 %, the worst tenth"
        " 39.0 %."
    )


@pytest.mark.parametrize(
    ("mean", "worst", "ending"),
    [
        (90.0, 80.0, "the mean client loses 9.0 points over FedAvg, the worst tenth 10.0."),
        (80.0, 71.0, "the mean client gains 1.0 points over FedAvg, the worst tenth loses 1.0."),
    ],
)
def test_a_headline_with_losses(mean: float, worst: float, ending: str) -> None:
    clade, fedavg = stored(), stored("fedavg", summary=numbers(mean, worst))
    assert headlines.headline(clade, ACCURACY, [clade, fedavg]).endswith(ending)


@pytest.mark.parametrize("table", ["data", "partition", "model", "local", "run"])
def test_no_gain_over_fedavg_with_other_settings(table: str) -> None:
    clade = stored()
    other = stored(
        "fedavg",
        summary=numbers(69.6, 39.0),
        tables=clade.tables | {"method": {"name": "fedavg"}, table: {"rounds": 9, "other": 1}},
    )
    assert "FedAvg" not in headlines.headline(clade, ACCURACY, [clade, other])


def test_the_evaluation_interval_does_not_matter() -> None:
    clade = stored()
    other = stored(
        "fedavg",
        tables=clade.tables | {"method": {"name": "fedavg"}, "run": {"rounds": 9, "eval_every": 1}},
    )
    assert "FedAvg" in headlines.headline(clade, ACCURACY, [clade, other])


def test_headlines_of_few_and_of_all_groups() -> None:
    own = stored("local", summary=numbers(50.0, 40.0, 40))
    assert headlines.headline(own, ACCURACY, [own]).startswith("A separate model for each client; ")
    started = stored(summary=None)
    assert (
        headlines.headline(started, ACCURACY, [started])
        == "No round is finished yet; nothing evaluated yet."
    )
    progress = progress_of([started], [])
    assert progress is not None
    assert progress.in_words() == "Round 0 of 9."
    loss_only = stored(
        summary={"clusters": 2, "clients": 40, "accuracy": None, "loss": 0.5, "perplexity": 1.7321}
    )
    assert (
        headlines.headline(loss_only, PERPLEXITY, [loss_only])
        == "2 groups found; the mean client has a perplexity of 1.73."
    )


def test_the_worst_tenth_is_the_lowest_accuracy_and_the_highest_loss() -> None:
    values = [float(value) for value in range(11)]
    assert ACCURACY.worst_tenth(values) == 0.5  # two of eleven, rounded up
    assert LOSS.worst_tenth([None, *values]) == 9.5
    assert LOSS.worst_tenth([None]) is None


def test_numbers_are_rounded_and_never_nan() -> None:
    assert short({"a": [1.23456789, float("nan"), float("-inf"), 2.0, True, "x", None]}) == {
        "a": [1.2346, None, None, 2, True, "x", None]
    }
    assert evenly(4, 9) == [0, 1, 2, 3]
    assert evenly(10, 4) == [0, 2, 5, 7]


def test_one_run(one: Path) -> None:
    data = report.collect([one])
    (run,) = data["runs"]
    json.dumps(data, allow_nan=False)
    assert data["compared"] is None
    accuracy = f"{run['summary']['accuracy']:.1f} %"
    assert data["title"].endswith(f", 24 clients: clade_groups, accuracy {accuracy}")
    assert data["headline"] == run["headline"]
    assert run["rounds"]["round"] == [1, 2, 3, 4]
    assert [value is None for value in run["rounds"]["value"]] == [True, False, True, False]
    assert run["summary"]["clusters"] == 4
    assert [row["clients"] for row in run["groups"]] == [6, 6, 6, 6]
    assert sorted(label for row in run["groups"] for label, _ in row["classes"]) == list(range(8))
    assert all(share == 50 for row in run["groups"] for _, share in row["classes"])
    assert run["rounds"]["up"][-1] == run["summary"]["bytes_up"]
    figures = run["figures"]
    assert figures["map"]["id"] == list(range(24))
    groups = [client % 4 for client in range(24)]
    assert figures["map"]["groups"] == run["clients"]["cluster"] == groups
    assert figures["dendrogram"]["agreement"] == 1
    assert len(figures["groups"]["series"]) == 4
    assert run["colors"] == {0: 0, 1: 1, 2: 2, 3: 3}
    assert data["mixes"][run["mix"]]["top"][0] == [[0, 50], [1, 50]]
    assert run["config"]["method"]["name"] == "clade_groups"


def test_a_comparison(several: Path) -> None:
    data = report.collect([several])
    assert [row["label"] for row in data["compared"]] == ["clade_groups", "fedavg"]
    by_name = {run["name"]: run for run in data["runs"]}
    for row in data["compared"]:
        scores = [by_name[name]["summary"]["accuracy"] for name in row["runs"]]
        assert row["score"] == pytest.approx(np.mean(scores), rel=1e-4)
        assert row["spread"] == pytest.approx(np.std(scores, ddof=1), rel=1e-3)
        assert [point[0] for point in row["curve"]] == [2, 4]
        assert row["curve"][-1][2:] == [
            pytest.approx(min(scores), rel=1e-4),
            pytest.approx(max(scores), rel=1e-4),
        ]
    assert "over FedAvg" in by_name["clade_groups-seed0"]["headline"]
    assert (
        by_name["clade_groups-seed0"]["cohort"]
        == by_name["fedavg-seed0"]["cohort"]
        != by_name["fedavg-seed1"]["cohort"]
    )
    assert len(data["mixes"]) == 1  # all runs have the same clients


def test_comparison_json_gives_titles(several: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(several, tmp_path / "several"))
    folders = {
        "fedavg": ["fedavg-seed1", "fedavg-seed0"],
        "clade_groups factor=2": ["clade_groups-seed0", "clade_groups-seed1"],
    }
    (folder / "comparison.json").write_text(json.dumps({"folders": folders}))
    data = report.collect([folder])
    assert {row["label"]: row["runs"] for row in data["compared"]} == folders
    scores = [row["score"] for row in data["compared"]]
    assert scores == sorted(scores, reverse=True)  # the best first, whatever the file's order
    assert [row["color"] for row in data["compared"]] == [0, 1]


def test_the_page_tests_the_differences_itself(several: Path) -> None:
    """A folder without comparison.json has a verdict too, and it is that of the test."""
    data = report.collect([several])
    (pair,) = data["pairs"]
    best = data["compared"][0]["label"]
    assert pair["first"] == best
    assert data["headline"].count("no difference") == (pair["verdict"] == "not shown")
    (row,) = data["figures"]["differences"]["rows"]
    assert row["value"] == pytest.approx(-pair["difference"], rel=1e-4)
    assert row["high"] - row["low"] == pytest.approx(2 * pair["half_width"], rel=1e-4)


def test_the_opened_run_is_the_typical_seed_of_the_best_setting(
    several: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(several, tmp_path / "several"))
    shutil.copytree(folder / "fedavg-seed0", folder / "fedavg-seed2")
    for seed, accuracy in enumerate((99.5, 98.0, 90.0)):
        path = folder / f"fedavg-seed{seed}" / "summary.json"
        changed = json.loads(path.read_text()) | {"accuracy": accuracy, "seed": seed}
        path.write_text(json.dumps(changed))
    for seed in (0, 1):
        path = folder / f"clade_groups-seed{seed}" / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"accuracy": 80.0}))
    data = report.collect([folder])
    assert data["compared"][0]["label"] == "fedavg"
    assert data["opened"] == "fedavg-seed1"  # the mean is 95.8; seed 0 is the luckiest


def test_the_same_folder_twice_is_one_run_and_names_are_unique(one: Path, copied: Path) -> None:
    assert len(report.collect([one, one])["runs"]) == 1
    twin = copied.parent / "twin" / one.name
    shutil.copytree(copied, twin)
    assert [run["name"] for run in report.collect([one, twin])["runs"]] == [
        f"{one.parent.name}/{one.name}",
        f"twin/{one.name}",
    ]


def test_an_unfinished_run(copied: Path) -> None:
    """A run in its third round: no summary, and a partly written line."""
    for name in ("summary.json", "client_features.safetensors"):
        (copied / name).unlink()
    lines = (copied / "rounds.jsonl").read_text().splitlines()
    (copied / "rounds.jsonl").write_text("\n".join(lines[:2]) + '\n{"round": 3, "cl')
    (run,) = report.collect([copied])["runs"]
    assert run["progress"].startswith("Round 2 of 4")
    assert run["headline"].startswith("4 groups so far; the mean client has an accuracy of ")
    assert run["clients"] is run["summary"] is None
    assert set(run["figures"]) == {"curves", "groups", "traffic", "seconds"}
    assert [row["clients"] for row in run["groups"]] == [6, 6, 6, 6]
    (copied / "rounds.jsonl").unlink()
    (run,) = report.collect([copied])["runs"]
    assert run["headline"] == "No round is finished yet; nothing evaluated yet."


def test_a_run_without_accuracy(tmp_path: Path) -> None:
    """Regression: the page shows the loss."""
    clients = fc.data.from_arrays(
        [
            (torch.randn(8, 3) + i, torch.randn(8), torch.randn(4, 3), torch.randn(4))
            for i in range(4)
        ]
    )
    out = tmp_path / "run"
    fc.run(
        fc.FedAvg(),
        clients,
        torch.nn.Linear(3, 1),
        rounds=2,
        out=out,
        loss=lambda outputs, y: (outputs[:, 0] - y) ** 2,
        eval_every=1,
    )
    data = report.collect([out])
    (run,) = data["runs"]
    assert data["metric"] == {"key": "loss", "label": "Loss", "unit": "", "higher": False}
    assert run["rounds"]["value"][-1] == pytest.approx(run["summary"]["loss"], rel=1e-4)
    assert "map" not in run["figures"]
    assert run["caption"]
    assert len(run["figures"]["distribution"]["rows"]) == 4  # few clients have a row each


def test_failures_are_listed_and_counted(copied: Path) -> None:
    lines = [json.loads(line) for line in (copied / "rounds.jsonl").read_text().splitlines()]
    lines[0]["failures"] = [{"client": 3, "reason": "not finite: weight"}]
    lines[2]["failures"] = [{"client": at, "reason": "no answer"} for at in range(600)]
    (copied / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    failures = report.collect([copied])["runs"][0]["failures"]
    assert failures["count"] == 601
    assert failures["reasons"] == [("no answer", 600), ("not finite: weight", 1)]
    assert failures["first"][:2] == [[1, 3, "not finite: weight"], [3, 0, "no answer"]]
    assert len(failures["first"]) == MAX_FAILURES


def test_a_diagnosis_alone_and_with_a_run(one: Path, tmp_path: Path) -> None:
    (tmp_path / "diagnosis.json").write_text(
        json.dumps({"sentences": ["Label skew.", "Use Clade."], "sure": 0.123456789})
    )
    data = report.collect([tmp_path])
    assert data["headline"] == "Label skew."
    (diagnosis,) = data["diagnoses"]
    assert diagnosis["sentences"] == ["Label skew.", "Use Clade."]
    assert diagnosis["figures"] == {}
    assert diagnosis["commands"] == diagnosis["groups"] == []
    assert len(report.collect([one, tmp_path])["runs"]) == 1


def test_invalid_folders_are_rejected(copied: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InvalidInputError, match="no folder", check=about("nowhere")):
        report.collect([Path("nowhere")])
    with pytest.raises(InvalidInputError, match="no run", check=about(str(empty))):
        report.collect([empty])
    with pytest.raises(InvalidInputError, check=about("runs")):
        report.collect([])
    (empty / "diagnosis.json").write_text("[1]")
    with pytest.raises(InvalidInputError, match=r"diagnosis\.json: "):
        report.collect([empty])
    (copied / "rounds.jsonl").write_text("not JSON\n")
    with pytest.raises(InvalidInputError, match=r"rounds\.jsonl: "):
        report.collect([copied])


def about(field: str) -> Callable[[InvalidInputError], bool]:
    return lambda error: error.field == field


def test_groups_list_their_members_by_name(tmp_path: Path) -> None:
    x, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    names = [f"site {number}" for number in range(2 * MAX_MEMBERS)]
    clients = replace(
        fc.data.from_arrays(dict.fromkeys(names, (x, y, x, y))),
        groups=torch.tensor([0, 1, *[1] * (len(names) - 2)]),
    )
    named, plain = tmp_path / "named", tmp_path / "plain"
    fc.run(fc.Oracle(), clients, fc.models.Logistic(), rounds=1, out=named, device="cpu")
    first, second = report.collect([named])["runs"][0]["groups"]
    assert first["members"] == ["site 0"]
    assert second["members"] == names[1 : MAX_MEMBERS + 1]
    assert second["clients"] == len(names) - 1
    unnamed = fc.data.from_arrays([(x, y, x, y)] * 3)
    fc.run(fc.FedAvg(), unnamed, fc.models.Logistic(), rounds=1, out=plain, device="cpu")
    assert "members" not in report.collect([plain])["runs"][0]["groups"][0]


def test_clients_without_features_are_not_plotted(tmp_path: Path) -> None:
    """CFL has only the updates of clients that have taken part."""
    out = train(fc.CFL(), planted(24), tmp_path / "cfl", rounds=1)
    (run,) = report.collect([out])["runs"]
    plotted = len(run["figures"]["map"]["id"])
    assert 3 <= plotted < 24
    assert f"{24 - plotted} clients" in run["caption"]


def small_run(method: fc.Method, seed: int = 0, out: Path | None = None) -> fc.Result:
    return fc.run(method, planted(8), fc.models.Logistic(), rounds=1, seed=seed, out=out)


def page_runs(page: Path) -> list[str]:
    """The names of the runs on a page."""
    content = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    return [run["name"] for run in json.loads(content)["runs"]]


def test_report_of_a_result_with_and_without_a_folder(tmp_path: Path) -> None:
    with_folder = small_run(fc.FedAvg(), out=tmp_path / "run")
    page = fc.report(with_folder, out=str(tmp_path / "folder.html"))
    assert page == tmp_path / "folder.html"
    assert page_runs(page) == ["run"]
    assert page_runs(fc.report(str(tmp_path / "run"), tmp_path / "path.html")) == ["run"]
    without_folder = small_run(fc.FedAvg())
    assert page_runs(fc.report(without_folder, out=tmp_path / "memory.html")) == ["fedavg"]
    assert page_runs(without_folder.report(tmp_path / "method.html")) == ["fedavg"]


def test_report_of_several_results_and_paths(tmp_path: Path) -> None:
    small_run(fc.FedAvg(), out=tmp_path / "run")
    results = [small_run(fc.Local(), seed) for seed in (0, 1, 1)]
    page = fc.report([tmp_path / "run", *results], out=tmp_path / "page.html")
    assert page_runs(page) == ["run", "local-seed0", "local-seed1", "local-seed1-2"]


def test_report_rejects_other_objects(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="7", check=about("runs")):
        fc.report([7], out=tmp_path / "page.html")  # type: ignore[list-item]
    assert not (tmp_path / "page.html").exists()
