"""`fedclade compare`: one table, one file, a folder for each run."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedclade.cli import result_tables

Call = Callable[..., tuple[int, str, str]]
SHORT = ["compare", "quickstart", "--set", "run.rounds=2"]
OWN = '''
from dataclasses import dataclass
from typing import ClassVar
import fedclade as fc

@fc.register("method", "mine")
@dataclass(frozen=True)
class Mine(fc.FedAvg):
    """FedAvg with a setting that does nothing."""
    title: ClassVar[str] = "Mine"
    k: int = 1
'''


@pytest.fixture
def call(command: Call) -> Call:
    """The command in a folder with mine.py: exit code, stdout, stderr."""
    Path("mine.py").write_text(OWN)
    return command


def rows_of(out: str) -> dict[str, list[str]]:
    """First cell of each row of the printed table -> its other cells."""
    lines = [line for line in out.splitlines() if re.match(r" ?\w+ {2,}", line)]
    cells = [re.split(r" {2,}", line.strip()) for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_a_process_prints_the_table_and_writes_comparison_and_runs(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fedclade",
        *SHORT,
        "--methods",
        "fedavg,local",
        "--seeds",
        "2",
        "--out",
        "out",
    ]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")
    }
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    table = rows_of(done.stdout)
    assert table["method"] == [
        "accuracy %",
        "seeds",
        "var.",
        "worst10",
        "groups",
        "ARI",
        "up",
        "down",
        "s",
    ]
    assert set(table) == {"method", "fedavg", "local"}
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    for row in written["rows"]:
        shown = table[row["method"]]
        assert shown[0] == f"{row['accuracy']:.2f} ± {row['accuracy_stderr']:.2f}"
        assert shown[1] == f"± {row['accuracy_std']:.2f}"
        assert shown[2] == f"{row['accuracy_variance']:.1f}"
        assert shown[3] == f"{row['accuracy_worst10']:.2f}"
        assert shown[4] == f"{row['clusters']:g}"
        assert shown[5] == f"{row['ari']:.2f}"
        assert shown[8] == f"{row['seconds']:.1f}"
    hurt = {row["method"]: row["hurt_against_fedavg"] for row in written["rows"]}
    assert hurt["fedavg"] is None
    assert f"worse off than with fedavg, %: local {hurt['local']:.1f}" in done.stdout
    assert table["local"][6:8] == ["0.0", "0.0"]
    assert table["fedavg"][6:8] == ["0.8", "0.8"]
    last = done.stdout.splitlines()[-1]
    assert last.endswith(": out")
    assert "comparison.json" in last
    labels = ["fedavg-seed0", "fedavg-seed1", "local-seed0", "local-seed1"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "comparison.json",
        *labels,
        "plan.json",
        "report.html",
    ]
    for label in labels:
        assert (tmp_path / "out" / label / "summary.json").exists()
        assert f"{label}: round 2/2" in done.stdout
    for seed in (0, 1):  # the same clients for both methods
        first, second = (
            _clients(tmp_path / "out" / f"{method}-seed{seed}") for method in ("fedavg", "local")
        )
        assert first == second
    assert written["runs"]["fedavg"][1]["seed"] == 1


def _clients(folder: Path) -> list[tuple[str, str]]:
    with (folder / "clients.csv").open(newline="") as file:
        return [(line["true_group"], line["examples"]) for line in csv.DictReader(file)]


def test_one_seed_has_no_column_for_the_spread_over_seeds(call: Call) -> None:
    code, out, _ = call(*SHORT, "--methods", "fedavg,local", "--out", "out", "--quiet")
    assert code == 0
    assert rows_of(out)["method"] == [
        "accuracy %",
        "var.",
        "worst10",
        "groups",
        "ARI",
        "up",
        "down",
        "s",
    ]
    assert "round 2/2" not in out  # --quiet hides the progress, not the table


def test_targets_that_are_numbers_have_a_loss_instead_of_an_accuracy(call: Call) -> None:
    x = np.random.default_rng(0).normal(size=(60, 3)).astype("float32")
    site = np.arange(60) % 6
    np.savez(
        "numbers.npz",
        **{f"x_{part}": x for part in ("train", "test")},
        **{f"y_{part}": x[:, 0] for part in ("train", "test")},
        **{f"site_{part}": site for part in ("train", "test")},
    )
    experiment = (
        '[data]\nname = "numbers.npz"\n[partition]\nname = "natural_id"\nkey = "site"\n'
        'clients = 6\n[model]\nname = "mlp"\nhidden = 4\n[method]\nname = "fedavg"\n'
        '[local]\nloss = "mse"\n[run]\nrounds = 2\n'
    )
    Path("numbers.toml").write_text(experiment)
    code, out, _ = call(
        *("compare", "numbers.toml", "--methods", "fedavg,local", "--seeds", "2"),
        *("--out", "out", "--quiet"),
    )
    assert code == 0
    table = rows_of(out)
    assert table["method"] == ["loss", "groups", "ARI", "up", "down", "s"]
    for row in json.loads(Path("out/comparison.json").read_text())["rows"]:
        assert table[row["method"]][0] == f"{row['loss']:.4f}"
    code, out, _ = call("run", "numbers.toml", "--out", "alone")
    loss = json.loads(Path("alone/summary.json").read_text())["loss"]
    assert code == 0
    assert f"{loss:.4f}" in next(line for line in out.splitlines() if line.startswith("loss"))


def test_a_comparison_gives_the_same_results_as_single_runs(call: Call) -> None:
    call(*SHORT, "--methods", "local,fedavg", "--out", "out", "-q")
    call("run", "quickstart", "--set", "run.rounds=2", "--out", "alone", "-q")
    models = [
        Path(folder) / "models" / "models.safetensors" for folder in ("out/fedavg-seed0", "alone")
    ]
    assert models[0].read_bytes() == models[1].read_bytes()
    local, fedavg = json.loads(Path("out/comparison.json").read_text())["rows"]
    assert (local["method"], fedavg["method"]) == ("local", "fedavg")
    assert fedavg["accuracy"] == json.loads(Path("alone/summary.json").read_text())["accuracy"]


def test_a_setting_of_a_custom_method_changes_only_that_method(call: Call) -> None:
    code, out, err = call(
        *SHORT,
        "--import",
        "mine.py",
        "--methods",
        "mine,fedavg",
        "--set",
        "mine.k=7",
        "--out",
        "out",
        "-q",
    )
    assert (code, err) == (0, "")
    assert {"mine", "fedavg"} <= rows_of(out).keys()
    assert "k = 7" in Path("out/mine-seed0/experiment.toml").read_text()
    assert "k =" not in Path("out/fedavg-seed0/experiment.toml").read_text()


def test_the_learning_rate_can_be_set_for_a_comparison(call: Call) -> None:
    call(*SHORT, "--methods", "fedavg", "--set", "local.lr=0.5", "--out", "out", "-q")
    assert "lr = 0.5" in Path("out/fedavg-seed0/experiment.toml").read_text()


@pytest.mark.parametrize("seeds", ["1", "2"])
def test_the_table_is_complete_on_a_terminal_of_80_columns(
    seeds: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_tables, "out_console", Console(highlight=False, width=80))
    _, out, _ = call(*SHORT, "--methods", "fedavg,local", "--seeds", seeds, "--out", "out", "-q")
    assert "…" not in out


def test_resume_executes_only_missing_runs(call: Call) -> None:
    call(*SHORT, "--methods", "fedavg", "--out", "out", "-q")
    before = Path("out/fedavg-seed0/summary.json").stat().st_mtime_ns
    code, out, _ = call(*SHORT, "--methods", "fedavg,local", "--out", "out", "--resume")
    assert code == 0
    assert {"fedavg", "local"} <= rows_of(out).keys()
    assert "fedavg-seed0: round" not in out
    assert "local-seed0: round 2/2" in out
    assert Path("out/fedavg-seed0/summary.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--methods", "fedavg,fedvag"], ["--methods", "'fedvag'", "'fedavg'"]),
        (["--methods", "fedavg,local,fedavg"], ["--methods fedavg,local,fedavg"]),
        (["--methods", ","], ["--methods"]),
        ([], ["--methods"]),
        (["--methods", "fedavg", "--seeds", "0"], ["--seeds", "0"]),
        (["--methods", "fedavg", "--seeds", "two"], ["--seeds", "two"]),
        (["--methods", "mine", "--import", "mine.py", "--set", "mine.kk=2"], ["method.kk", "'k'"]),
        (["--methods", "mine"], ["--methods", "'mine'"]),
        (["--methods", "fedavg", "--resume"], ["--resume", "--out"]),
        (["--methods", "fedavg", "--out", "mine.py"], ["mine.py"]),
        (
            ["--methods", "fedavg", "--set", "run.clients_per_round=41"],
            ["run.clients_per_round = 41", "40"],
        ),
    ],
)
def test_invalid_comparisons_give_one_line_and_exit_code_2(
    arguments: list[str], parts: list[str], call: Call
) -> None:
    code, out, err = call(*SHORT, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("fedclade: ")
    assert len(err.splitlines()) == 1
    for part in parts:
        assert part in err


def test_a_folder_with_this_comparison_is_rejected(call: Call) -> None:
    call(*SHORT, "--methods", "fedavg", "--out", "out", "-q")
    code, out, err = call(*SHORT, "--methods", "fedavg", "--out", "out", "-q")
    assert (code, out) == (2, "")
    assert "out = 'out/fedavg-seed0'" in err


def test_a_comparison_with_an_existing_run_is_rejected_before_training(call: Call) -> None:
    call(*SHORT, "--methods", "fedavg", "--out", "out", "-q")
    code, _, err = call(*SHORT, "--methods", "local,fedavg", "--out", "out", "-q")
    assert code == 2
    assert "out = 'out/fedavg-seed0'" in err
    assert not Path("out/local-seed0").exists()
