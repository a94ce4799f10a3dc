"""What a user of a notebook meets: `_repr_html_`, `progress`, `plot`, `report`, `export`."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedclade as fc
from fedclade.analysis import report as report_package
from fedclade.training.result import Result

MODEL = fc.models.MLP(8)


@pytest.fixture(scope="module")
def result(small_digits: fc.data.Clients, tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("run")
    return fc.run(fc.FedAvg(), small_digits, MODEL, rounds=2, out=folder)


def test_fc_run_writes_the_report_unless_it_is_switched_off(
    result: Result, small_digits: fc.data.Clients, tmp_path: Path
) -> None:
    assert result.folder is not None
    page = result.folder / "report.html"
    assert "<html" in page.read_text()
    fc.run(fc.FedAvg(), small_digits, MODEL, rounds=1, out=tmp_path, report=False)
    assert not (tmp_path / "report.html").exists()
    page.write_text("mine")
    again = fc.run(fc.FedAvg(), small_digits, MODEL, rounds=2, out=result.folder, resume=True)
    assert again.already_finished
    assert page.read_text() == "mine"


def test_a_report_that_fails_costs_no_run(
    small_digits: fc.data.Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(runs: object, out: object) -> None:
        raise fc.WriteError("report.html: the disk is full.", "report.html")

    monkeypatch.setattr(report_package, "write_report", full)
    with pytest.warns(fc.FedcladeWarning, match="disk is full"):
        run = fc.run(fc.FedAvg(), small_digits, MODEL, rounds=1, out=tmp_path)
    assert run.summary["rounds"] == 1


def test_plot_draws_the_figures_of_the_report(result: Result, tmp_path: Path) -> None:
    with pytest.raises(fc.InvalidInputError, match="figure = 'zzz': unknown") as caught:
        result.plot("zzz")
    figure = result.plot()
    assert figure.axes
    figure.savefig(tmp_path / "figure.png")
    # What a notebook shows, whether or not pyplot was imported.
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    names = str(caught.value).partition("Known: ")[2].rstrip(".").split(", ")
    assert len(names) > 1
    for name in names:
        assert result.plot(name).axes


def test_export_is_that_of_fc_export(result: Result, tmp_path: Path) -> None:
    exported = result.export(tmp_path / "models", formats=["safetensors"])
    assert [card["name"] for card in exported.cards] == ["group-0"]
    assert list(exported.folder.rglob("*.safetensors"))


def test_results_clients_diagnoses_and_methods_are_small_escaped_html(
    result: Result, small_digits: fc.data.Clients
) -> None:
    evil = "<script>alert(1)</script>"
    clients = replace(small_digits, dataset=evil)
    summary = result.summary | {"dataset": evil}
    diagnosis = fc.diagnose(clients, MODEL, probe_rounds=0)
    diagnosis = replace(diagnosis, advice=replace(diagnosis.advice, why=evil))
    shown: list[Any] = [
        replace(result, summary=summary),  # type: ignore[arg-type]
        clients,
        diagnosis,
        fc.IFCA(clusters=3),
    ]
    for thing in shown:
        html = thing._repr_html_()
        assert "<script" not in html
        assert len(html) < 6000
    accuracy = result.summary["accuracy"]
    assert f"{accuracy:.2f}" in result._repr_html_()
    assert "&lt;script&gt;" in shown[0]._repr_html_()
    assert "<td" in clients._repr_html_()
    assert diagnosis.sentences()[0][:20] in diagnosis._repr_html_()
    assert ">3</td>" in shown[3]._repr_html_()


@pytest.mark.parametrize("name", sorted({"clade", "fedavg", "ifca", "ditto", "oracle"}))
def test_every_kind_of_method_has_html(name: str) -> None:
    from fedclade.registry import REGISTRY

    method = REGISTRY["method"][name]
    made = method(clusters=2) if name == "ifca" else method()
    assert method.title.split()[0] in made._repr_html_()


def test_progress_is_lines_on_stderr(
    small_digits: fc.data.Clients, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    fc.run(
        *(fc.FedAvg(), small_digits, MODEL),
        rounds=2,
        eval_every=1,
        progress=True,
        on_round=lambda row: rows.append(row["round"]),
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition("  ")[0] for line in err.splitlines()] == [
        "fedavg: round 1/2",
        "fedavg: round 2/2",
    ]
    assert rows == [1, 2]


def test_on_round_still_stops_a_run_with_progress(small_digits: fc.data.Clients) -> None:
    run = fc.run(
        fc.FedAvg(), small_digits, MODEL, rounds=5, progress=True, on_round=lambda row: True
    )
    assert run.summary["rounds"] == 1


def test_progress_in_a_notebook_is_one_output_that_changes(
    small_digits: fc.data.Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, html: str) -> None:
            shown.append(html)

    def display(html: str, display_id: bool) -> Handle:
        shown.append(html)
        return Handle()

    ipython = types.ModuleType("IPython")
    ipython.get_ipython = type("ZMQInteractiveShell", (), {})  # type: ignore[attr-defined]
    ipython.display = types.ModuleType("IPython.display")  # type: ignore[attr-defined]
    ipython.display.HTML, ipython.display.display = str, display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    fc.run(fc.FedAvg(), small_digits, MODEL, rounds=3, progress=True)
    assert len(shown) == 4
    assert '<progress value="3" max="3">' in shown[-1]
    assert "accuracy" in shown[-1]
