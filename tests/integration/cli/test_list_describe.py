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
    """The command in a folder with mine.py: exit code, stdout, stderr."""
    Path("mine.py").write_text(OWN)
    return command


NAMES = {
    "methods": {"fedavg", "local"},
    "datasets": {"digits"},
    "partitions": {
        *("iid", "dirichlet", "pathological", "natural_id", "label_clusters", "power_law_clusters"),
        *("label_swap", "label_permutation", "rotation", "quantity_skew"),
    },
    "models": {"mlp", "leaf_cnn", "small_cnn", "lenet5", "logistic", "conv_autoencoder"},
    "presets": {"quickstart", "mnist_iid"},
}


@pytest.mark.parametrize("kind", sorted(NAMES))
def test_list_shows_names_and_descriptions_as_a_table_and_as_json(kind: str, call: Call) -> None:
    code, out, err = call("list", kind)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    code, text, _ = call("list", kind, "--json")
    assert code == 0
    entries = json.loads(text)
    assert {entry["name"] for entry in entries} >= NAMES[kind]
    for entry in entries:
        assert entry.keys() == {"name", "about"}
        assert len(entry["about"]) > 8
        assert "\n" not in entry["about"]
        assert entry["name"] in [line.split()[0] for line in out.splitlines() if line.strip()]


def test_imported_names_are_listed(call: Call) -> None:
    entries = {
        kind: json.loads(call("list", kind, "--json", "--import", "mine.py")[1])
        for kind in ("methods", "datasets")
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


@pytest.mark.parametrize("name", sorted(NAMES["methods"]))
def test_describe_shows_disclosure_parameters_and_paper(name: str, call: Call) -> None:
    code, out, err = call("describe", name)
    assert (code, err) == (0, "")
    method = REGISTRY["method"][name]
    assert out.startswith(method.title)
    assert f"What leaves a client: {method.client_disclosure}." in out
    assert f"Paper: {method.paper}." in out
    assert "Parameters" in out
    assert "The server needs: " in out


def test_describe_a_published_data_set(call: Call) -> None:
    code, out, _ = call("describe", "cifar10")
    assert code == 0
    assert "50,000 + 10,000 samples of 3 × 32 × 32" in out
    assert "fedclade data get cifar10" in out
    assert "LEAF" in call("describe", "femnist")[1]


def test_describe_a_custom_method(call: Call) -> None:
    code, out, _ = call("describe", "mine", "--import", "mine.py")
    assert code == 0
    assert out.startswith("A method of mine\n")
    assert "It does what FedAvg does." in out
    assert "With one setting." in out
    assert "k = 3" in out
    assert "bound" not in out
    assert "next to nothing" in out
    assert "my thesis" in out


def test_a_method_without_declarations_gives_no_traceback(
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
    ("arguments", "parts"),
    [
        (["list", "method"], ["method", "'methods'"]),
        (["list", "zoo"], ["zoo", "methods", "presets"]),
        (["list"], ["methods|datasets"]),
        (["describe", "fedvag"], ["'fedvag'", "'fedavg'"]),
        (["describe", "zzz"], ["'zzz'", "fedavg", "local"]),
        (["describe"], ["NAME"]),
        (["describe", "mine"], ["'mine'"]),
        (["list", "methods", "--import", "nowhere.py"], ["--import nowhere.py"]),
        (["lst", "methods"], ["lst", "list"]),
        (["list", "methods", "--jsn"], ["--jsn", "--json"]),
    ],
)
def test_unknown_names_give_one_line_and_exit_code_2(
    arguments: list[str], parts: list[str], call: Call
) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("fedclade: ")
    assert len(err.splitlines()) == 1
    for part in parts:
        assert part in err


def test_a_suggestion_is_given_once(call: Call) -> None:
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
