"""`fedclade list`, `fedclade describe`, the help and the version."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fedclade as fc
from fedclade.registry import REGISTRY

Call = Callable[..., tuple[int, str, str]]
OWN = '''
from dataclasses import dataclass
from typing import ClassVar
import torch
import fedclade as fc

@fc.register("method", "mine")
@dataclass(frozen=True)
class Mine(fc.FedAvg):
    """It does what FedAvg does.

    With one setting.
    """
    title: ClassVar[str] = "A method of mine"
    paper: ClassVar[str] = "my thesis"
    client_disclosure: ClassVar[str] = "next to nothing"
    k: int = 3

@fc.register("dataset", "spots")
def spots() -> fc.data.Dataset:
    """Two spots. In the plane."""
    return fc.data.dataset(torch.rand(9, 2), torch.arange(9) % 2)
'''


@pytest.fixture
def call(command: Call) -> Call:
    """The command in this process, in a folder with mine.py: exit code, what it printed, what it
    complained about.
    """
    Path("mine.py").write_text(OWN)
    return command


HAS = {
    "methods": {"fedavg", "local"},
    "datasets": {"digits"},
    "partitions": {
        *("iid", "dirichlet", "pathological", "natural_id", "label_clusters", "power_law_clusters"),
        *("label_swap", "label_permutation", "rotation", "quantity_skew"),
    },
    "models": {"mlp", "leaf_cnn", "small_cnn", "lenet5", "logistic", "conv_autoencoder"},
    "presets": {"quickstart", "mnist_iid"},
}


@pytest.mark.parametrize("what", sorted(HAS))
def test_list_gives_names_with_a_line_on_each_as_a_table_and_as_json(what: str, call: Call) -> None:
    code, out, err = call("list", what)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    code, text, _ = call("list", what, "--json")
    assert code == 0
    entries = json.loads(text)
    assert {entry["name"] for entry in entries} >= HAS[what]
    for entry in entries:
        assert entry.keys() == {"name", "about"}
        assert len(entry["about"]) > 8
        assert "\n" not in entry["about"]
        assert entry["name"] in [line.split()[0] for line in out.splitlines() if line.strip()]


def test_things_of_ones_own_are_listed_with_ours(call: Call) -> None:
    entries = {
        what: json.loads(call("list", what, "--json", "--import", "mine.py")[1])
        for what in ("methods", "datasets")
    }
    assert {"name": "mine", "about": "A method of mine"} in entries["methods"]
    assert any(
        entry["name"] == "spots" and entry["about"].startswith("Two spots")
        for entry in entries["datasets"]
    )


def test_a_data_set_without_docstring_is_listed(call: Call) -> None:
    Path("bare.py").write_text(
        'import fedclade as fc\n@fc.register("dataset", "bare")\ndef bare():\n    return None\n'
    )
    try:
        code, out, _ = call("list", "datasets", "--import", "bare.py")
    finally:
        sys.modules.pop("bare", None)
    assert code == 0
    assert "bare" in out


def test_brackets_in_a_title_are_shown(call: Call) -> None:
    Path("mine.py").write_text(OWN.replace("A method of mine", "A method [draft] of mine"))
    assert "A method [draft] of mine" in call("list", "methods", "--import", "mine.py")[1]


@pytest.mark.parametrize("name", sorted(HAS["methods"]))
def test_describe_says_what_it_does_what_leaves_a_client_and_where_it_is_from(
    name: str, call: Call
) -> None:
    code, out, err = call("describe", name)
    assert (code, err) == (0, "")
    method = REGISTRY["method"][name]
    assert out.startswith(method.title)
    assert f"What leaves a client: {method.client_disclosure}." in out
    assert f"Paper: {method.paper}." in out
    assert "Parameters" in out
    assert "The server needs: " in out


def test_describe_says_where_a_published_data_set_comes_from(call: Call) -> None:
    code, out, _ = call("describe", "cifar10")
    assert code == 0
    assert "50,000 + 10,000 samples of 3 × 32 × 32" in out
    assert "fedclade data get cifar10" in out
    assert "made by LEAF's own script" in call("describe", "femnist")[1]


def test_describe_shows_the_parameters_of_a_method_of_ones_own(call: Call) -> None:
    code, out, _ = call("describe", "mine", "--import", "mine.py")
    assert code == 0
    assert out.startswith("A method of mine\n")
    assert "It does what FedAvg does." in out
    assert "With one setting." in out
    assert "k = 3" in out
    assert "bound" not in out
    assert "next to nothing" in out
    assert "my thesis" in out


def test_a_method_that_says_nothing_about_itself_is_described_or_refused_in_words(
    call: Call,
) -> None:
    Path("mine.py").write_text(
        'import fedclade as fc\n@fc.register("method", "mine")\nclass Mine(fc.Method):\n    init ='
        " round = admit = fc.FedAvg.round\n"
    )
    code, _, err = call("describe", "mine", "--import", "mine.py")
    assert (code, err) == (0, "") or (
        code == 2 and err.startswith("fedclade: ") and len(err.splitlines()) == 1
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list", "method"], ["method", "'methods'"]),
        (["list", "things"], ["things", "methods", "presets"]),
        (["list"], ["Missing argument"]),
        (["describe", "fedvag"], ["'fedvag'", "'fedavg'"]),
        (["describe", "zzz"], ["'zzz'", "fedavg", "local"]),
        (["describe"], ["Missing argument"]),
        (["describe", "mine"], ["'mine'"]),
        (["list", "methods", "--import", "nowhere.py"], ["--import nowhere.py", "no such file"]),
        (["lst", "methods"], ["lst", "list"]),
        (["list", "methods", "--jsn"], ["--jsn", "--json"]),
    ],
)
def test_what_is_not_there_is_one_line_and_exit_code_2(
    arguments: list[str], says: list[str], call: Call
) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("fedclade: ")
    assert len(err.splitlines()) == 1
    for part in says:
        assert part in err


def test_a_hint_on_a_command_is_given_once(call: Call) -> None:
    assert call("rum")[2].count("Did you mean") == 1


def test_version_and_help(call: Call) -> None:
    assert call("--version") == (0, f"fedclade {fc.__version__}\n", "")
    for arguments in ([], ["--help"]):
        code, out, err = call(*arguments)
        assert (code, err) == (0, "")
        for command in ("run", "compare", "list", "describe"):
            assert command in out
    for command in ("run", "compare"):
        out = call(command, "--help")[1]
        for option in (
            "--set",
            "--device",
            "--out",
            "--resume",
            "--quiet",
            "--data-root",
            "--import",
        ):
            assert option in out
