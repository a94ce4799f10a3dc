"""`fedclade diagnose`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from fedclade.analysis.diagnose import Diagnosis
from fedclade.cli.diagnose import diagnose
from fedclade.errors import InvalidInputError

app = typer.Typer()
app.command()(diagnose)
FAST = ("--device", "cpu", "--set", "partition.clients=10", "--set", "model.hidden=16")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_words_first_and_a_file_for_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("quickstart", *FAST, "--probe-rounds", "2")
    assert result.exit_code == 0
    assert result.stdout.startswith("Label skew: the clients have different labels")
    assert "5 groups, of 2, 2, 2, 2, 2 clients" in result.stdout
    assert "inputs of one label, p(x | y)" in result.stdout
    assert "gain over FedAvg" in result.stdout
    told = json.loads((tmp_path / "runs" / "quickstart-diagnosis" / "diagnosis.json").read_text())
    assert Diagnosis.from_json(told).kind == "label skew"
    assert told["about"]["dataset"] == "digits"


def test_json(tmp_path: Path) -> None:
    result = call(
        "quickstart", *FAST, "--probe-rounds", "0", "--json", "--out", str(tmp_path / "told")
    )
    assert json.loads(result.stdout) == json.loads(
        (tmp_path / "told" / "diagnosis.json").read_text()
    )
    again = call("quickstart", *FAST, "--out", str(tmp_path / "told"))
    assert isinstance(again.exception, InvalidInputError)
    assert "it holds a diagnosis already" in str(again.exception)


def test_a_file_need_not_name_a_method_yet(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[data]\nname = "digits"\n[partition]\nname = "iid"\nclients = 4\n[model]\nname ='
        ' "logistic"\n'
    )
    result = call(
        str(file), "--probe-rounds", "0", "--device", "cpu", "--out", str(tmp_path / "told")
    )
    assert result.stdout.startswith("The clients are alike (IID)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "neither a file nor a preset"),
        (("quickstart", "--set", "model.hiden=3"), "hidden"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, ...], message: str) -> None:
    assert message in str(call(*arguments).exception)
