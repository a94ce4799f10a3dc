"""The scaling scripts run and write a number for each point."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def written_by(script: str, folder: Path) -> dict[str, Any]:
    out = folder / "results.json"
    subprocess.run(
        [sys.executable, BENCHMARKS / script, "--quick", "--out", out],
        check=True,
        capture_output=True,
    )
    results: dict[str, Any] = json.loads(out.read_text())
    assert {"machine", "commit", "python", "torch", "fedclade"} <= results["about"].keys()
    return results


def are_finite(row: dict[str, Any], *names: str) -> bool:
    return all(math.isfinite(row[name]) for name in names)


@pytest.mark.slow
def test_simulator_has_a_point_for_each_size(tmp_path: Path) -> None:
    results = written_by("simulator_scaling.py", tmp_path)
    assert [row["clients"] for row in results["clients"]] == [100, 1_000]
    assert [row["cohort"] for row in results["cohort"]] == [10, 30]
    assert [row["parameters"] for row in results["parameters"]] == [
        785 * 20 + 21 * 62,
        785 * 200 + 201 * 62,
    ]
    for row in (*results["clients"], *results["cohort"], *results["parameters"]):
        assert are_finite(row, "evaluation", "ms a client", "ns a parameter")
        assert 0 < row["fastest"] <= row["seconds"] == min(row["medians"])
        # 20 samples of 784 pixels, a label and a row number, and the start of the client's rows.
        assert row["data MB"] == pytest.approx(
            (row["clients"] * (20 * (784 + 8 + 8) + 8) + 8) / 1e6
        )
        assert row["peak MB"] > row["data MB"]
    assert [row["clients"] for row in results["empty map"]] == [100, 1_000]
    assert all(row["ms a call"] > 0 for row in results["empty map"])
    assert len(results["claims"]) == 4
    assert all(
        claim["holds"] == (claim["value"] <= claim["at most"])
        for claim in results["claims"].values()
    )


@pytest.mark.slow
def test_clustering_has_two_points_for_each_method(tmp_path: Path) -> None:
    points = written_by("clustering_scaling.py", tmp_path)["points"]
    first, second = points[::2], points[1::2]
    assert {row["what"].split(":")[0] for row in first} == {
        "FLT",
        "CFL",
        "Clade",
        "FLIS-DC",
        "FLIS-HC",
        "FedSEM",
        "FedGMCC",
    }
    for small, large in zip(first, second, strict=True):
        assert small["what"] == large["what"]
        assert 3 * small["clients"] == large["clients"]
        for row in (small, large):
            assert row["seconds"] > 0
            assert 0 <= row["more MB"] <= row["peak MB"] < math.inf
        # Three times the clients.
        assert large["seconds"] / small["seconds"] == pytest.approx(3 ** large["time exponent"])
        assert small["time exponent"] is None


@pytest.mark.slow
def test_many_clients_has_a_run_for_each_method_and_number(tmp_path: Path) -> None:
    results = written_by("many_clients.py", tmp_path)
    runs = [(row["method"], row["clients"]) for row in results["runs"]]
    assert runs == [
        (method, clients)
        for method in ("fedavg", "scaffold", "ifca", "clade")
        for clients in (50, 100)
    ]
    for row in results["runs"]:
        assert are_finite(row, "seconds a round", "processor seconds a round", "peak GB")
        assert 0 <= row["accuracy"] <= 100
    assert "fedavg: peak memory with 100 clients, GB" in results["claims"]
    of_clade = [row for row in results["runs"] if row["method"] == "clade"]
    for row in of_clade:
        before = row["processor seconds before the second round"]
        assert 0 < row["processor seconds of the server's clustering"] < before
    clustering = "clade: processor seconds of the server's clustering with 100 clients"
    assert results["claims"][clustering]["holds"]


@pytest.mark.slow
def test_sharded_overhead_has_a_row_for_each_engine(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedclade[ray]'")
    results = written_by("sharded_overhead.py", tmp_path)
    assert [row["engine"] for row in results["engines"]] == ["ray", "gloo", "simulator"]
    for row in results["engines"][:2]:
        assert are_finite(row, "ms a round", "overhead ms", "relative to the simulator")
        assert 0 < row["overhead ms"] < row["ms a round"]


@pytest.mark.slow
def test_sharded_throughput_compares_with_independent_processes(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedclade[ray]'")
    results = written_by("sharded_throughput.py", tmp_path)
    engines = results["engines"]
    assert list(engines) == ["independent", "gloo", "ray"]
    assert engines["independent"]["relative to independent"] == 1
    for row in engines.values():
        assert are_finite(row, "clients a second", "processor seconds a round")
        assert row["clients a second"] > 0
    assert all(
        claim["holds"] == (claim["value"] >= claim["at least"])
        for claim in results["claims"].values()
    )
