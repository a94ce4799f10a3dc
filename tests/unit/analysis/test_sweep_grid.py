"""Sweeps: which values a --set has, which experiments they make, and the command that runs them
all.
"""

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
        ("it's, one", ["it's, one"]),  # a quote that does not end hides all that follows
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
def test_numbers_with_commas_between_are_read_back(numbers: list[float]) -> None:
    written = [json.dumps(number) for number in numbers]
    assert [value_of(text) for text in values_of(f"run.key={','.join(written)}")] == numbers


@given(st.lists(st.text(alphabet="ab,[]{}' ", min_size=1), min_size=1, unique=True))
def test_text_in_quotes_keeps_its_commas(texts: list[str]) -> None:
    given = "data.name=" + ",".join(json.dumps(text) for text in texts)
    assert [value_of(text) for text in values_of(given)] == texts


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("method.beta=0.1,", ["method.beta=0.1,", "missing beside a comma", "quotes"]),
        ("method.beta=,", ["missing beside a comma"]),
        ("method.beta=1,,2", ["missing beside a comma"]),
        ("method.beta=1,2,1", ["1 is given twice"]),
        ("rounds=1,2", ["--set rounds=1,2", "table.key=value"]),
        ("run.rounds", ["--set run.rounds", "table.key=value"]),
    ],
)
def test_what_is_no_list_of_values_is_refused(given: str, says: list[str]) -> None:
    with pytest.raises(InvalidInputError) as refused:
        values_of(given)
    for part in says:
        assert part in str(refused.value)


def titles(variants: list[Experiment]) -> list[str]:
    return [variant.title for variant in variants]


def test_every_combination_in_the_order_given() -> None:
    found = expand(TABLES, ["local.lr=0.1,0.2", "run.rounds=3", "local.epochs=1,2"])
    assert titles(found) == [
        "fedavg lr=0.1 epochs=1",
        "fedavg lr=0.1 epochs=2",
        "fedavg lr=0.2 epochs=1",
        "fedavg lr=0.2 epochs=2",
    ]
    assert [(each.local.lr, each.local.epochs, each.run.rounds) for each in found] == [
        (0.1, 1, 3),
        (0.1, 2, 3),
        (0.2, 1, 3),
        (0.2, 2, 3),
    ]


def test_a_list_that_a_setting_may_be_is_one_value_and_can_be_one_of_several() -> None:
    assert not is_sweep(["model.hidden=[9, 8]"])
    (one,) = expand(TABLES, ["model.hidden=[9, 8]"])
    assert one.model.hidden == (9, 8)  # type: ignore[attr-defined]
    assert titles(expand(TABLES, ["model.hidden=[9, 8],16"])) == [
        "fedavg hidden=[9, 8]",
        "fedavg hidden=16",
    ]


def test_two_keys_that_end_alike_are_told_apart() -> None:
    found = expand(TABLES, ["model.name=mlp,logistic", "partition.name=iid,label_clusters"])
    assert titles(found)[1] == "fedavg model.name=mlp partition.name=label_clusters"


def test_methods_and_seeds_are_no_settings() -> None:
    found = expand(TABLES, ["method.name=fedavg,local", "run.seed=4,7"])
    assert titles(found) == ["fedavg", "fedavg", "local", "local"]
    assert [run.label for run in runs(found, 1)] == [
        "fedavg-seed4",
        "fedavg-seed7",
        "local-seed4",
        "local-seed7",
    ]
    with pytest.raises(
        InvalidInputError, match=r"--seeds 2: the seeds are listed already, in run\.seed"
    ):
        runs(found, 2)


def test_of_a_setting_given_twice_the_last_counts() -> None:
    assert not is_sweep(["local.lr=0.1,0.2", "local.lr=0.3"])
    (one,) = expand(TABLES, ["local.lr=0.1,0.2", "local.lr=0.3"])
    assert (one.local.lr, one.title) == (0.3, "fedavg")


def test_a_comparison_takes_lists_for_all_methods_or_for_one() -> None:
    assert titles(plan(TABLES, ["fedavg", "ifca"], ["ifca.clusters=2,3", "local.lr=0.1,0.2"])) == [
        *("fedavg lr=0.1", "fedavg lr=0.2"),
        *(
            "ifca lr=0.1 clusters=2",
            "ifca lr=0.1 clusters=3",
            "ifca lr=0.2 clusters=2",
            "ifca lr=0.2 clusters=3",
        ),
    ]


def test_a_wrong_value_is_refused_before_anything_runs() -> None:
    with pytest.raises(InvalidInputError, match=r"local\.lr = -1"):
        expand(TABLES, ["local.lr=0.1,-1"])


def test_folders_have_safe_names_and_none_twice() -> None:
    one, two = runs(expand(TABLES, ["data.name=a b/c.npz,digits"]), 1)
    assert (one.label, two.label) == ("fedavg-name=a-b-c.npz-seed0", "fedavg-name=digits-seed0")
    with pytest.raises(InvalidInputError, match="two runs would use the same folder"):
        runs(expand(TABLES, ["data.name=a/b,a b"]), 1)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str) -> str:
    done = CliRunner().invoke(main.app, list(arguments))
    if done.exception is not None:
        raise done.exception
    return done.stdout


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


def test_a_sweep_runs_all_compares_them_and_goes_on(here: Path) -> None:
    out = call(*SWEEP, "--out", "out")
    assert out.startswith("4 runs: 2 settings, 2 seeds each\n")
    assert "Which differences are real, over 2 seeds" in out
    assert "the best of many settings looks better than it is" in out
    written = json.loads(Path("out/comparison.json").read_text())
    assert [(row["method"], row["seeds"]) for row in written["rows"]] == [
        ("fedavg lr=0.1", 2),
        ("fedavg lr=0.2", 2),
    ]
    assert written["folders"]["fedavg lr=0.2"] == ["fedavg-lr=0.2-seed0", "fedavg-lr=0.2-seed1"]
    assert "lr = 0.2" in Path("out/fedavg-lr=0.2-seed1/experiment.toml").read_text()
    # Alone it has the same numbers.
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
    # One was lost: only that one is done again.
    for file in Path("out/fedavg-lr=0.1-seed1").rglob("*.*"):
        file.unlink()
    again = call(*SWEEP, "--out", "out", "--resume")
    assert again.count(": round 1/1") == 1
    assert (
        json.loads(Path("out/comparison.json").read_text())["rows"][0]["accuracy"]
        == written["rows"][0]["accuracy"]
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--profile"], "--profile: for one run"),
        (["--engine", "flower"], "--engine flower: for one run"),
        (["--resume"], "--resume: name the folder of the sweep with --out DIR"),
        (["--set", "method.beta=1,2"], "method.beta: unknown key"),
    ],
)
def test_what_a_sweep_cannot_do(here: Path, arguments: list[str], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        call(*SWEEP, *arguments)
    assert list(here.iterdir()) == []


def test_a_folder_that_holds_a_single_run_is_refused(here: Path) -> None:
    call("run", "quickstart", "--set", "run.rounds=1", "--out", "out", "--no-report", "-q")
    with pytest.raises(InvalidInputError, match="it holds a single run; give another folder"):
        call(*SWEEP, "--out", "out")
