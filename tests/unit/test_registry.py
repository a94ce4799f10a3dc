"""Names of one's own: what may be registered, what a file may do, and what is said about a file
that is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedclade as fc
from fedclade.errors import InvalidInputError
from fedclade.registry import REGISTRY, find, import_file
from fedclade.training.experiment_file import apply, experiment, read

OWN = '''
"""Things of a user's own."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import nn

import fedclade as fc


@fc.register("method", "eager")
@dataclass(frozen=True)
class Eager(fc.FedAvg):
    """FedAvg under another name."""

    title: ClassVar[str] = "FedAvg, eagerly"
    paper: ClassVar[str] = "none"
    mood: Literal["calm", "wild"] = "calm"
    weights: tuple[float, ...] = (1.0, 2.0)
    limit: int | None = None


@fc.register("dataset", "spots")
def spots() -> fc.data.Dataset:
    """Three spots in the plane."""
    y = torch.arange(90) % 3
    noise = torch.randn(90, 2, generator=torch.Generator().manual_seed(0))
    x = torch.stack([y.float(), -y.float()], 1) + 0.1 * noise
    return fc.data.dataset(x[:60], y[:60], x[60:], y[60:], name="spots")


@fc.register("partition", "in_rows")
@dataclass(frozen=True)
class InRows:
    """As they come."""

    gap: int = 0

    def split(self, data: fc.data.Dataset, clients: int, rng: np.random.Generator) -> fc.data.Split:
        train = np.array_split(np.arange(len(data.y_train)), clients)
        return fc.data.Split(train, groups=np.arange(clients) % 2)


@fc.register("model", "thin")
@dataclass(frozen=True)
class Thin:
    """One linear layer."""

    outputs: int | None = None

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Linear(shape[0], self.outputs or classes)
'''


@pytest.fixture(autouse=True)
def _leave_no_trace(tmp_path: Path) -> Iterator[None]:
    modules = dict(sys.modules)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
            sys.modules |= {name: modules[name]} if name in modules else {}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own things.py"
    file.write_text(OWN)
    return file


SETS = [
    "data.name=spots",
    "partition.name=in_rows",
    "partition.clients=6",
    "model.name=thin",
    "method.name=eager",
    "run.rounds=2",
]


def test_a_file_brings_a_method_a_data_set_a_partition_and_a_model_of_ones_own(
    own: Path, tmp_path: Path
) -> None:
    import_file(str(own))
    made = experiment(
        apply(
            read("quickstart"),
            [*SETS, "method.mood=wild", "method.weights=[3.0]", "partition.gap=2"],
        )
    )
    result = made.to_run(made.clients(), "cpu").run(tmp_path / "run")
    named = [result.summary[kind] for kind in ("method", "dataset", "partition", "model")]
    assert named == ["eager", "spots", "in_rows", "thin"]
    assert result.summary["ari"] == 0
    loaded = fc.load(tmp_path / "run")
    assert isinstance(loaded.model_of(0), nn.Linear)
    again = experiment(read(tmp_path / "run" / "experiment.toml"))
    assert (again.method, again.scheme, again.model) == (made.method, made.scheme, made.model)
    again.to_run(again.clients(), "cpu").run(tmp_path / "again")
    assert (tmp_path / "run/models/models.safetensors").read_bytes() == (
        tmp_path / "again/models/models.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("method.moods=calm", ["method.moods", "'mood'"]),
        ("method.mood=angry", ["method.mood", "'angry'", "'calm' or 'wild'"]),
        ("method.weights=3", ["method.weights", "list"]),
        ("method.limit=x", ["method.limit", "whole number"]),
        ("partition.gab=1", ["partition.gab", "'gap'"]),
        ("model.outputs=a", ["model.outputs", "whole number"]),
        ("model.name=thinn", ["model.name", "'thin'"]),
    ],
)
def test_the_fields_of_ones_own_things_are_checked_as_ours_are(
    given: str, says: list[str], own: Path
) -> None:
    import_file(str(own))
    with pytest.raises(InvalidInputError) as refused:
        experiment(apply(read("quickstart"), [*SETS, given]))
    for part in says:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("method", "fedavg"), ("method", "local"), ("dataset", "digits"), ("model", "mlp")],
)
def test_our_own_names_are_not_to_be_replaced(kind: Any, name: str) -> None:
    before = REGISTRY[kind][name]
    with pytest.raises(
        InvalidInputError, match=rf"the {kind} '{name}' is fedclade's own; choose another name"
    ):
        fc.register(kind, name)(type("Mine", (), {"__module__": "mine"}))
    assert REGISTRY[kind][name] is before


def test_a_partition_of_ours_is_not_to_be_replaced() -> None:
    for name in list(REGISTRY["partition"]):
        with pytest.raises(InvalidInputError, match="fedclade's own"):
            fc.register("partition", name)(type("Mine", (), {}))


def test_ones_own_name_may_be_registered_again(own: Path) -> None:
    import_file(str(own))
    import_file(str(own))
    assert find("method", "eager", "method.name").mood == "calm"


def test_registering_gives_back_what_was_registered_under_its_name() -> None:
    @dataclass(frozen=True)
    class Mine(fc.FedAvg):
        pass

    assert fc.register("method", "mine")(Mine) is Mine
    assert Mine.name == "mine"
    assert fc.FedAvg.name == "fedavg"


def test_an_unknown_kind_and_an_unknown_name_are_refused_with_what_there_is() -> None:
    with pytest.raises(InvalidInputError, match=r"unknown kind 'methods'.*'method'"):
        fc.register("methods", "x")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"here: no such method.*'fedavg'"):
        find("method", "fedav", "here")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(:\n    pass\n", "SyntaxError"),
        ("import no_such_module\n", "no_such_module"),
        ("1 / 0\n", "ZeroDivisionError"),
        (
            'import fedclade as fc\n@fc.register("method", "fedavg")\nclass A(fc.FedAvg): pass\n',
            "fedclade's own",
        ),
        (
            'import fedclade as fc\n@fc.register("metod", "a")\nclass A(fc.FedAvg): pass\n',
            "'method'",
        ),
    ],
)
def test_an_error_in_the_file_is_one_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(fc.FedcladeError, match=says) as refused:
        import_file(str(tmp_path / "bad.py"))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_or_no_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"--import .*nowhere\.py: there is no such file"):
        import_file(str(tmp_path / "nowhere.py"))
    (tmp_path / "mine.txt").write_text("x = 1")
    with pytest.raises(InvalidInputError, match=r"--import .*mine\.txt: not a Python file"):
        import_file(str(tmp_path / "mine.txt"))


def test_an_error_whose_message_has_two_lines_is_one_line_too(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text('raise ValueError("one\\ntwo")')
    with pytest.raises(InvalidInputError) as refused:
        import_file(str(tmp_path / "bad.py"))
    assert "\n" not in str(refused.value)


def test_a_file_named_like_a_module_does_not_replace_it(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("x = 1")
    import json

    import_file(str(tmp_path / "json.py"))
    assert sys.modules["json"] is json


def test_two_files_of_one_name_in_two_folders_can_both_be_imported(
    own: Path, tmp_path: Path
) -> None:
    import_file(str(own))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / own.name).write_text("x = 1")
    import_file(str(tmp_path / "other" / own.name))
    assert experiment(apply(read("quickstart"), SETS)).method.name == "eager"


# --- things that are not of the form we want

PLAIN = """
import numpy as np
from torch import nn
import fedclade as fc

@fc.register("partition", "plain")
class Plain:
    def split(self, data, clients, rng):
        return fc.data.Split(train=np.array_split(np.arange(len(data.y_train)), clients))

@fc.register("model", "plain")
class PlainModel:
    def build(self, shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.mark.parametrize("table", ["partition", "model"])
def test_a_plain_class_without_fields_will_do(table: str, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    import_file(str(tmp_path / "plain.py"))
    made = experiment(apply(read("quickstart"), [f"{table}.name=plain", "run.rounds=1"]))
    made.to_run(made.clients(), "cpu").run(tmp_path / "run")
    with pytest.raises(InvalidInputError, match=f"{table}.x: unknown key"):
        experiment(apply(read("quickstart"), [f"{table}.name=plain", f"{table}.x=1"]))


@pytest.mark.parametrize("name", ["module", "function"])
def test_a_module_or_function_registered_as_a_model_is_refused_in_words(name: str) -> None:
    class Module(nn.Module):
        pass

    def function(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Linear(shape[0], classes)

    with pytest.raises(InvalidInputError, match=f"the model '{name}' must be a class"):
        fc.register("model", name)(Module if name == "module" else function)


def test_a_required_field_that_is_not_given_is_named() -> None:
    @fc.register("method", "needy")
    @dataclass(frozen=True, kw_only=True)
    class Needy(fc.FedAvg):
        amount: int

    with pytest.raises(InvalidInputError, match=r"method\.amount: missing"):
        experiment(apply(read("quickstart"), ["method.name=needy"]))


def test_a_data_set_without_a_name_of_its_own_goes_by_the_one_it_was_registered_under(
    tmp_path: Path,
) -> None:
    data = fc.data.load("digits")
    fc.register("dataset", "mine")(
        lambda: fc.data.dataset(data.x_train, data.y_train, data.x_test, data.y_test)
    )
    made = experiment(apply(read("quickstart"), ["data.name=mine", "run.rounds=1"]))
    result = made.to_run(made.clients(), "cpu").run(tmp_path / "run")
    assert result.summary["dataset"] == "mine"
    experiment(read(tmp_path / "run" / "experiment.toml")).clients()
