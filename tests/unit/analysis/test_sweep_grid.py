"""Sweeps: the values of a --set, the experiments that they give, and the command that runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedclade.analysis.comparison_runs import plan, runs
from fedclade.analysis.sweep_grid import expand, is_sweep, values_of
from fedclade.cli import main
from fedclade.errors import InvalidInputError
from fedclade.training.experiment_file import Experiment, read, value_of

TABLES = {**read("quickstart"), "run": {"rounds": 1, "clients_per_round": 0.2}}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.1", ["0.1"]),
        ("0.1,0.3, 0.5", ["0.1", "0.3", "0.5"]),
        ("[9, 8]", ["[9, 8]"]),
        ("[9, 8],[16]", ["[9, 8]", "[16]"]),
        ("[[1, 2], [3]],4", ["[[1, 2], [3]]", "4"]),
        ("9,8", ["9", "8"]),
        ('"a,b"', ['"a,b"']),
        ("'a,b','c'", ["'a,b'", "'c'"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("{a = 1, b = 2}", ["{a = 1, b = 2}"]),
        ("mlp,logistic", ["mlp", "logistic"]),
        ("two words", ["two words"]),
        ("it's, one", ["it's, one"]),  # an unclosed quote includes everything after it
        ("true,false", ["true", "false"]),
        ("", [""]),
    ],
)
def test_values(text: str, values: list[str]) -> None:
    assert values_of(f"model.key={text}") == values


@given(
    st.lists(
        st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans()),
        min_size=2,
        unique_by=repr,
    )
)
def test_comma_separated_numbers_are_parsed(numbers: list[float]) -> None:
    written = [json.dumps(number) for number in numbers]
    assert [value_of(text) for text in values_of(f"run.key={','.join(written)}")] == numbers


@given(st.lists(st.text(alphabet="ab,[]{}' ", min_size=1), min_size=1, unique=True))
def test_quoted_text_keeps_its_commas(texts: list[str]) -> None:
    setting = "data.name=" + ",".join(json.dumps(text) for text in texts)
    assert [value_of(text) for text in values_of(setting)] == texts


@pytest.mark.parametrize(
    ("setting", "field", "hint"),
    [
        ("method.beta=0.1,", "method.beta", '"a,b"'),
        ("method.beta=,", "method.beta", '"a,b"'),
        ("method.beta=1,,2", "method.beta", '"a,b"'),
        ("method.beta=1,2,1", "method.beta", ": 1 is given twice"),
        ("rounds=1,2", "--set", "TABLE.KEY=VALUE"),
        ("run.rounds", "--set", "TABLE.KEY=VALUE"),
    ],
)
def test_invalid_lists_of_values(setting: str, field: str, hint: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        values_of(setting)
    assert caught.value.field == field
    assert f"--set {setting}" in str(caught.value)
    assert hint in str(caught.value)


def titles(variants: list[Experiment]) -> list[str]:
    return [variant.title for variant in variants]


def test_all_combinations_in_the_order_of_the_settings() -> None:
    experiments = expand(TABLES, ["local.lr=0.1,0.2", "run.rounds=3", "local.epochs=1,2"])
    assert titles(experiments) == [
        "fedavg lr=0.1 epochs=1",
        "fedavg lr=0.1 epochs=2",
        "fedavg lr=0.2 epochs=1",
        "fedavg lr=0.2 epochs=2",
    ]
    settings = [(entry.local.lr, entry.local.epochs, entry.run.rounds) for entry in experiments]
    assert settings == [
        (0.1, 1, 3),
        (0.1, 2, 3),
        (0.2, 1, 3),
        (0.2, 2, 3),
    ]


def test_a_toml_list_is_one_value() -> None:
    assert not is_sweep(["model.hidden=[9, 8]"])
    (experiment,) = expand(TABLES, ["model.hidden=[9, 8]"])
    assert experiment.model.hidden == (9, 8)  # type: ignore[attr-defined]
    assert titles(expand(TABLES, ["model.hidden=[9, 8],16"])) == [
        "fedavg hidden=[9, 8]",
        "fedavg hidden=16",
    ]


def test_titles_distinguish_equal_keys_of_two_tables() -> None:
    experiments = expand(TABLES, ["model.name=mlp,logistic", "partition.name=iid,label_clusters"])
    assert titles(experiments)[1] == "fedavg model.name=mlp partition.name=label_clusters"


def test_titles_omit_method_and_seed() -> None:
    experiments = expand(TABLES, ["method.name=fedavg,local", "run.seed=4,7"])
    assert titles(experiments) == ["fedavg", "fedavg", "local", "local"]
    assert [run.label for run in runs(experiments, 1)] == [
        "fedavg-seed4",
        "fedavg-seed7",
        "local-seed4",
        "local-seed7",
    ]
    with pytest.raises(InvalidInputError, match=r"--seeds 2: run\.seed") as caught:
        runs(experiments, 2)
    assert caught.value.field == "--seeds"


def test_the_last_of_two_equal_keys_counts() -> None:
    assert not is_sweep(["local.lr=0.1,0.2", "local.lr=0.3"])
    (experiment,) = expand(TABLES, ["local.lr=0.1,0.2", "local.lr=0.3"])
    assert (experiment.local.lr, experiment.title) == (0.3, "fedavg")


def test_a_comparison_accepts_lists_for_all_methods_or_for_one() -> None:
    assert titles(plan(TABLES, ["fedavg", "ifca"], ["ifca.clusters=2,3", "local.lr=0.1,0.2"])) == [
        *("fedavg lr=0.1", "fedavg lr=0.2"),
        *(
            "ifca lr=0.1 clusters=2",
            "ifca lr=0.1 clusters=3",
            "ifca lr=0.2 clusters=2",
            "ifca lr=0.2 clusters=3",
        ),
    ]


def test_an_invalid_value_is_rejected_before_any_run() -> None:
    with pytest.raises(InvalidInputError, match=r"local\.lr = -1") as caught:
        expand(TABLES, ["local.lr=0.1,-1"])
    assert caught.value.field == "local.lr"


def test_folder_names_are_safe_and_unique() -> None:
    first, second = runs(expand(TABLES, ["data.name=a b/c.npz,digits"]), 1)
    assert first.label == "fedavg-name=a-b-c.npz-seed0"
    assert second.label == "fedavg-name=digits-seed0"
    with pytest.raises(InvalidInputError, match="fedavg-name=a-b-seed0") as caught:
        runs(expand(TABLES, ["data.name=a/b,a b"]), 1)
    assert caught.value.field == "--set"


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str) -> str:
    outcome = CliRunner().invoke(main.app, list(arguments))
    if outcome.exception is not None:
        raise outcome.exception
    return outcome.stdout


SWEEP = [
    "run",
    "quickstart",
    "--set",
    "run.rounds=1",
    "--set",
    "local.lr=0.1,0.2",
    "--set",
    "run.seed=0,1",
    "--no-report",
]


@pytest.mark.usefixtures("work_dir")
def test_a_sweep_runs_compares_and_resumes() -> None:
    out = call(*SWEEP, "--out", "out")
    assert out.startswith("4 runs: 2 settings, 2 seeds each\n")
    assert "over 2 seeds" in out
    assert "test data" in out
    written = json.loads(Path("out/comparison.json").read_text())
    assert [(row["method"], row["seeds"]) for row in written["rows"]] == [
        ("fedavg lr=0.1", 2),
        ("fedavg lr=0.2", 2),
    ]
    assert written["folders"]["fedavg lr=0.2"] == ["fedavg-lr=0.2-seed0", "fedavg-lr=0.2-seed1"]
    assert "lr = 0.2" in Path("out/fedavg-lr=0.2-seed1/experiment.toml").read_text()
    # A single run gives the same models.
    call(
        "run",
        "quickstart",
        "--set",
        "run.rounds=1",
        "--set",
        "local.lr=0.2",
        "--out",
        "alone",
        "--no-report",
        "-q",
    )
    models = [
        Path(folder) / "models" / "models.safetensors"
        for folder in ("alone", "out/fedavg-lr=0.2-seed0")
    ]
    assert models[0].read_bytes() == models[1].read_bytes()
    # Resuming repeats only the run that was lost.
    for file in Path("out/fedavg-lr=0.1-seed1").rglob("*.*"):
        file.unlink()
    again = call(*SWEEP, "--out", "out", "--resume")
    assert again.count(": round 1/1") == 1
    assert (
        json.loads(Path("out/comparison.json").read_text())["rows"][0]["accuracy"]
        == written["rows"][0]["accuracy"]
    )


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--profile"], "--profile"),
        (["--engine", "flower"], "--engine"),
        (["--resume"], "--resume"),
    ],
)
def test_options_that_a_sweep_does_not_support(
    work_dir: Path, arguments: list[str], field: str
) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
        call(*SWEEP, *arguments)
    assert list(work_dir.iterdir()) == []


def test_a_sweep_over_an_unknown_key(work_dir: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"^method\.beta: "):
        call(*SWEEP, "--set", "method.beta=1,2")
    assert list(work_dir.iterdir()) == []


@pytest.mark.usefixtures("work_dir")
def test_a_folder_with_a_single_run_is_rejected() -> None:
    call("run", "quickstart", "--set", "run.rounds=1", "--out", "out", "--no-report", "-q")
    with pytest.raises(InvalidInputError, match="'out'") as caught:
        call(*SWEEP, "--out", "out")
    assert caught.value.field == "out"
