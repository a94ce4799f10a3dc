"""The user's metrics and validation data on the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedclade as fc
from fedclade.analysis import report
from fedclade.analysis.report.page_data import collect

from .conftest import cells, planted, train


def sure(outputs: Tensor, y: Tensor) -> Tensor:
    """The probability of the label."""
    return outputs.softmax(-1).gather(-1, y[:, None])[:, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with validation data and a metric; Clade returns to its best round."""
    folder = tmp_path_factory.mktemp("own")
    clients = planted(12).with_validation(0.25)
    for method in (fc.FedAvg(), fc.CladeGroups()):
        train(method, clients, folder / method.name, metrics={"sure": sure}, select="best")
    return folder


def test_a_page_has_the_users_metrics_and_validation_data(folder: Path) -> None:
    page = collect([folder])
    for run, compared in zip(page["runs"], page["compared"], strict=True):
        result = fc.load(folder / run["method"])
        summary: Any = result.summary
        (metric,) = run["ownMetrics"]
        assert metric["name"] == "sure"
        assert metric["value"] == pytest.approx(summary["sure"], rel=1e-4)
        assert [number for number, _ in metric["points"]] == [2, 4]
        assert run["rounds"]["validation"][0] is None
        assert run["rounds"]["validation"][3] == pytest.approx(
            result.history[3]["validation_accuracy"], rel=1e-4
        )
        assert run["clients"]["own"]["sure"] == pytest.approx(result.clients["sure"], rel=1e-3)
        validation = result.clients["validation_accuracy"]
        assert run["clients"]["validation"] == pytest.approx(validation, rel=1e-3)
        assert compared["own"]["sure"] == pytest.approx(summary["sure"], rel=1e-4)
        assert compared["validation"] == pytest.approx(summary["validation_accuracy"], rel=1e-4)


def test_a_run_without_them_has_none(one: Path) -> None:
    (run,) = collect([one])["runs"]
    assert run["ownMetrics"] == []
    assert set(run["rounds"]["validation"]) == {None}
    assert run["clients"]["own"] == {}
    assert "validation" not in run["clients"]


def test_the_browser_shows_them(folder: Path, opened: Callable[..., Any], tmp_path: Path) -> None:
    path = report.write_report([folder], tmp_path / "report.html")
    tab = opened(path.as_uri())
    headings = [text.strip() for text in tab.locator("#compare-table thead th").all_inner_texts()]
    assert "Accuracy, validation data" in headings
    means = [float(text) for text in cells(tab, "compare-table", headings.index("sure") + 1)]
    expected = []
    for name in tab.locator("#compare-table .setting").all_inner_texts():
        summary: Any = fc.load(folder / name).summary
        expected.append(summary["sure"])
    assert means == pytest.approx(expected, rel=1e-2)
    assert "sure" in tab.locator("#tiles").inner_text()
    assert "validation data" in tab.locator("#tiles").inner_text()
    assert tab.locator("#learning-metrics-svg g[data-series]").count() == 1
    assert "mean client, validation data" in tab.locator("#learning-all-legend").inner_text()
    tab.locator("#clients-details summary").click()
    columns = [text.strip() for text in tab.locator("#clients-table thead th").all_inner_texts()]
    assert {"sure", "Accuracy, validation data"} <= set(columns)


def test_the_model_card_has_them(folder: Path, tmp_path: Path) -> None:
    from fedclade.analysis import export

    (card,) = export.export(folder / "fedavg", tmp_path / "export", ["safetensors"]).cards
    text = (tmp_path / "export" / card["name"] / "card.md").read_text()
    values = torch.tensor(fc.load(folder / "fedavg").clients["sure"])
    assert f"| sure | mean {float(values.mean()):.4f}, 12 clients" in text
