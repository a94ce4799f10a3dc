"""Options that several commands share: shortcuts for --set, seeds, suggestions, -h, completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedclade.cli import main
from fedclade.cli.options import parse_seeds, with_shortcuts
from fedclade.errors import InvalidInputError

Call = Callable[..., tuple[int, str, str]]
SHORT = ("--set", "partition.clients=6", "--set", "partition.clusters=2", "--set", "run.rounds=1")


def tables(folder: str) -> dict[str, dict[str, object]]:
    return tomllib.loads(Path(folder, "experiment.toml").read_text())


def test_shortcuts_are_settings(command: Call) -> None:
    chosen = ("--method", "local", "--lr", "0.03", "--rounds", "2", "--epochs", "3")
    outcome = command("run", "quickstart", *SHORT[:4], *chosen, "--out", "run", "-q", "--no-report")
    assert outcome == (0, "", "")
    written = tables("run")
    assert written["method"]["name"] == "local"
    assert (written["local"]["lr"], written["local"]["epochs"]) == (0.03, 3)
    assert written["run"]["rounds"] == 2


def test_several_values_of_a_shortcut_are_a_sweep(command: Call) -> None:
    code, out, err = command(
        *("run", "quickstart", *SHORT, "--lr", "0.1,0.03", "--out", "sweep", "-q", "--no-report")
    )
    assert (code, err) == (0, "")
    assert "lr=0.03" in out
    assert {path.name for path in Path("sweep").iterdir() if path.is_dir()} == {
        "fedavg-lr=0.1-seed0",
        "fedavg-lr=0.03-seed0",
    }


def test_diagnose_takes_the_shortcuts_that_matter_to_it(command: Call) -> None:
    code, _, err = command("diagnose", "quickstart", "--lr", "fast")
    assert code == 2
    assert "local.lr = 'fast'" in err
    assert command("diagnose", "quickstart", "--rounds", "3")[0] == 2


@pytest.mark.parametrize(
    ("option", "value", "setting"),
    [
        ("--lr", "0.1", "local.lr=0.2"),
        ("--rounds", "3", "run.rounds = 3"),
        ("--epochs", "1", "local.epochs=2"),
        ("--method", "fedavg", "method.name=local"),
    ],
)
def test_a_shortcut_and_the_same_setting_are_refused(
    option: str, value: str, setting: str, command: Call
) -> None:
    code, out, err = command("run", "quickstart", option, value, "--set", setting)
    assert (code, out) == (2, "")
    assert err == (
        f"fedclade: {option} {value}: --set {setting} is the same setting. Use one of the two.\n"
    )


def test_other_settings_stay_in_their_order() -> None:
    sets = ["run.seed=3", "local.momentum=0.9"]
    assert with_shortcuts(sets, lr="0.1") == [*sets, "local.lr=0.1"]
    assert with_shortcuts(None) == []


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("1", 1),
        ("3", 3),
        ("101,102", (101, 102)),
        ("0-4", (0, 1, 2, 3, 4)),
        ("7-7", (7,)),
        ("0-1, 5", (0, 1, 5)),
    ],
)
def test_seeds(text: str, seeds: int | tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["0", "-1", "", "1,", "4-2", "1,1", "a", "0-9999999999", "1.5"])
def test_seeds_that_are_none(text: str, command: Call) -> None:
    with pytest.raises(InvalidInputError, match="--seeds"):
        parse_seeds(text)
    code, out, err = command("compare", "quickstart", "--methods", "fedavg", f"--seeds={text}")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1


def test_compare_runs_the_listed_seeds(command: Call) -> None:
    code, _, err = command(
        *("compare", "quickstart", "--methods", "fedavg,local", "--seeds", "101,103", *SHORT),
        *("--out", "both", "-q", "--no-report"),
    )
    assert (code, err) == (0, "")
    comparison = json.loads(Path("both/comparison.json").read_text())
    seeds = {name: [run["seed"] for run in runs] for name, runs in comparison["runs"].items()}
    assert seeds == {"fedavg": [101, 103], "local": [101, 103]}
    assert tables("both/local-seed103")["run"]["seed"] == 103


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("--round", "--rounds"),
        ("--methods", "--method"),
        ("--momentum", "--set local.momentum=…"),
        ("--batch_size", "--set local.batch_size=…"),
        ("--batchsize", "--set local.batch_size=…"),
        ("--seed", "--set run.seed=…"),
        ("--clients", "--set partition.clients=…"),
        ("--hidden", "--set model.hidden=…"),
    ],
)
def test_an_unknown_option_suggests_the_setting(given: str, suggested: str, command: Call) -> None:
    code, out, err = command("run", "quickstart", given, "3")
    assert (code, out) == (2, "")
    assert err == f"fedclade: No such option '{given}'. Did you mean '{suggested}'?\n"


def test_an_option_like_no_other_names_the_help(command: Call) -> None:
    assert command("run", "quickstart", "--qqq")[2].endswith("See fedclade run --help.\n")
    # A command without --set suggests no setting.
    assert "--set" not in command("report", "runs/a", "--momentum", "1")[2]


@pytest.mark.parametrize("words", [(), ("run",), ("data", "get"), ("flower", "up")])
def test_h_is_help(words: tuple[str, ...], command: Call) -> None:
    code, out, err = command(*words, "-h")
    assert (code, err) == (0, "")
    assert out == command(*words, "--help")[1]
    assert out.startswith(" ".join(("Usage: fedclade", *words)))


def test_help_of_export_names_its_own_folder(command: Call) -> None:
    out = command("export", "--help")[1]
    assert "(default: export in DIR)" in out
    assert "runs/" not in out


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("fedclade comp", ["compare"]),
        ("fedclade run qu", ["quickstart"]),
        ("fedclade run mi", ["mine.toml"]),
        ("fedclade run sub/", ["sub/other.toml"]),
        ("fedclade list pre", ["presets"]),
        ("fedclade describe scaf", ["scaffold"]),
        ("fedclade compare quickstart --methods local,sca", ["local,scaffold"]),
        ("fedclade run quickstart --rou", ["--rounds"]),
    ],
)
def test_the_shell_completes(line: str, completed: list[str], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("mine.toml", "sub/other.toml", "sub/data.csv"):
        (tmp_path / name).touch()
    done = subprocess.run(
        [sys.executable, "-m", "fedclade"],
        cwd=tmp_path,
        env={
            **os.environ,
            "_FEDCLADE_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split()) - 1),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == completed, done.stderr


def test_the_list_of_commands_is_not_cut_off_on_80_columns() -> None:
    done = CliRunner().invoke(main.app, ["--help"], terminal_width=80)
    lines = done.output.partition("Commands:")[2].splitlines()
    assert len(lines) > 10
    assert not [line for line in lines if line.endswith("...")]
