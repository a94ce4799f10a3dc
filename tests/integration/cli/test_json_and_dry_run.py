"""`--json`: one document on stdout. `--dry-run`: what would run, and nothing on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., tuple[int, str, str]]
SMALL = (
    *("--set", "partition.clients=6", "--set", "partition.clusters=2"),
    *("--set", "partition.samples=12", "--set", "run.clients_per_round=4", "--rounds", "2"),
)


def document(outcome: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = outcome
    assert code == 0, err
    content: dict[str, Any] = json.loads(out)
    return content


def test_run(command: Call) -> None:
    outcome = command("run", "quickstart", *SMALL, "--out", "run", "--json")
    content = document(outcome)
    assert content["folder"] == "run"
    assert Path(content["report"]).exists()
    assert content["summary"] == json.loads(Path("run/summary.json").read_text())
    assert sum(map(len, content["groups"].values())) == 6
    assert "fedavg: round 2/2" in outcome[2]
    # The next command prints on stdout again.
    assert "fedavg: round 2/2" in command("run", "quickstart", *SMALL, "--out", "again")[1]
    again = document(command("run", "quickstart", *SMALL, "--out", "run", "--resume", "--json"))
    assert again == content


def test_compare_and_a_sweep(command: Call) -> None:
    methods = ("--methods", "fedavg,local")
    content = document(
        command("compare", "quickstart", *methods, *SMALL, "--out", "both", "--json", "-q")
    )
    written = json.loads(Path("both/comparison.json").read_text())
    assert content == {"folder": "both", "report": "both/report.html"} | written
    assert [row["method"] for row in content["rows"]] == ["fedavg", "local"]
    content = document(
        command(
            *("run", "quickstart", *SMALL, "--lr", "0.1,0.2", "--out", "sweep", "--json"),
            "--no-report",
        )
    )
    assert content["report"] is None
    assert [row["method"] for row in content["rows"]] == ["fedavg lr=0.1", "fedavg lr=0.2"]


def test_report(command: Call) -> None:
    assert command("run", "quickstart", *SMALL, "--out", "run", "-q", "--no-report")[0] == 0
    content = document(command("report", "run", "--out", "page.html", "--json"))
    assert content == {"report": "page.html", "figures": []}


def test_an_error_leaves_stdout_empty(command: Call) -> None:
    code, out, err = command("run", "quickstart", "--lr", "0", "--json")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_dry_run_writes_nothing(more: tuple[str, ...], command: Call) -> None:
    code, out, err = command(
        *("compare", "quickstart", "--methods", "fedavg,local", "--seeds", "5,7", *SMALL),
        *("--dry-run", *more),
    )
    assert code == 0, err
    assert list(Path().iterdir()) == []
    assert "Nothing was written. The folder would be runs/quickstart-compare." in (
        err if more else out
    )


def test_a_dry_run_counts_the_bytes_of_the_run(command: Call) -> None:
    arguments = ("run", "quickstart", *SMALL[:-1], "40", "--set", "run.eval_every=7")
    content = document(command(*arguments, "--out", "run", "--dry-run", "--json"))
    (estimate,) = content["runs"]
    summary = document(command(*arguments, "--out", "run", "--json", "--no-report"))["summary"]
    assert (estimate["clients"], estimate["cohort"], estimate["rounds"]) == (6, 4, 40)
    assert estimate["bytes_up"] == summary["bytes_up"]
    assert estimate["bytes_down"] == summary["bytes_down"]
    assert estimate["seconds"] > 0
    assert 3 <= estimate["timed_rounds"] <= 20
    # The folder now holds a run: the command itself would be refused, too.
    code, _, err = command(*arguments, "--out", "run", "--dry-run")
    assert code == 2
    assert "it already holds a run" in err


def test_a_dry_run_is_of_the_simulator(command: Call) -> None:
    code, _, err = command("run", "quickstart", "--engine", "flower", "--dry-run")
    assert code == 2
    assert "--dry-run" in err
