"""`fedclade diagnose`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from fedclade.analysis.diagnose import Diagnosis
from fedclade.cli.diagnose import diagnose
from fedclade.cli.progress import diagnosing
from fedclade.errors import InvalidInputError

app = typer.Typer()
app.command()(diagnose)
FAST = ("--device", "cpu", "--set", "partition.clients=10", "--set", "model.hidden=16")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_the_command_prints_sentences_and_tables_and_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("quickstart", *FAST, "--probe-rounds", "2")
    assert result.exit_code == 0
    assert result.stdout.startswith("Label skew: ")
    assert "5 groups of 2, 2, 2, 2, 2 clients" in result.stdout
    assert "inputs of one label, p(x | y)" in result.stdout
    assert "gain over FedAvg" in result.stdout
    file = tmp_path / "runs" / "quickstart-diagnosis" / "diagnosis.json"
    content = json.loads(file.read_text())
    assert Diagnosis.from_json(content).kind == "label skew"
    assert content["about"]["dataset"] == "digits"


def test_further_methods_are_named_on_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "diagnosis"
    result = call(
        "quickstart", *FAST, "--probe-rounds", "2", "--also", "ditto, fedper", "--out", str(out)
    )
    assert result.exit_code == 0
    content = json.loads((out / "diagnosis.json").read_text())
    assert [probe["method"] for probe in content["probes"]][-2:] == ["ditto", "fedper"]


def test_json(tmp_path: Path) -> None:
    result = call(
        "quickstart", *FAST, "--probe-rounds", "0", "--json", "--out", str(tmp_path / "out")
    )
    assert json.loads(result.stdout) == json.loads(
        (tmp_path / "out" / "diagnosis.json").read_text()
    )
    again = call("quickstart", *FAST, "--out", str(tmp_path / "out"))
    assert isinstance(again.exception, InvalidInputError)
    assert again.exception.field == "--out"
    assert str(tmp_path / "out") in str(again.exception)


def test_the_file_needs_no_method(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[data]\nname = "digits"\n[partition]\nname = "iid"\nclients = 4\n[model]\nname ='
        ' "logistic"\n'
    )
    result = call(
        str(file), "--probe-rounds", "0", "--device", "cpu", "--out", str(tmp_path / "out")
    )
    assert "(IID)" in result.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("nowhere",), "'nowhere'"),
        (("quickstart", "--set", "model.hiden=3"), "'hidden'"),
    ],
)
def test_bad_input_is_rejected(arguments: tuple[str, ...], name: str) -> None:
    error = call(*arguments).exception
    assert isinstance(error, InvalidInputError)
    assert name in str(error)


def test_the_progress_is_a_bar_on_a_terminal_and_silence_in_a_short_log() -> None:
    terminal, log = io.StringIO(), io.StringIO()
    for console in (Console(file=terminal, force_terminal=True, width=100), Console(file=log)):
        with diagnosing(console) as progress:
            progress("pilot run 2 of 8, clade", 1.5, 8)
    assert "comparing the clients" in terminal.getvalue()
    assert log.getvalue() == ""


def test_a_long_log_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    clock = iter([0.0, 10.0, 31.0, 31.0])
    monkeypatch.setattr("fedclade.cli.progress.time.perf_counter", lambda: next(clock))
    with diagnosing(Console(file=log)) as progress:
        progress("pilot run 1 of 8, fedavg", 0.5, 8)
        progress("pilot run 2 of 8, clade", 1.5, 8)
    assert log.getvalue() == "diagnose: pilot run 2 of 8, clade\n"
