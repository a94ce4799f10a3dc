"""The registry: what may be registered, what a file may do, and the errors of a wrong file."""

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
"""Things of a user."""
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


def test_a_file_registers_a_method_a_data_set_a_partition_and_a_model(
    own: Path, tmp_path: Path
) -> None:
    import_file(str(own))
    parsed = experiment(
        apply(
            read("quickstart"),
            [*SETS, "method.mood=wild", "method.weights=[3.0]", "partition.gap=2"],
        )
    )
    result = parsed.to_run(parsed.clients(), "cpu").run(tmp_path / "run")
    named = [result.summary[kind] for kind in ("method", "dataset", "partition", "model")]
    assert named == ["eager", "spots", "in_rows", "thin"]
    assert result.summary["ari"] == 0
    loaded = fc.load(tmp_path / "run")
    assert isinstance(loaded.model_of(0), nn.Linear)
    again = experiment(read(tmp_path / "run" / "experiment.toml"))
    assert (again.method, again.scheme, again.model) == (parsed.method, parsed.scheme, parsed.model)
    again.to_run(again.clients(), "cpu").run(tmp_path / "again")
    assert (tmp_path / "run/models/models.safetensors").read_bytes() == (
        tmp_path / "again/models/models.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("assignment", "values"),
    [
        ("method.moods=calm", ["'mood'"]),
        ("method.mood=angry", ["'angry'", "'calm' or 'wild'"]),
        ("method.weights=3", ["3", "list"]),
        ("method.limit=x", ["'x'"]),
        ("partition.gab=1", ["'gap'"]),
        ("model.outputs=a", ["'a'"]),
        ("model.name=thinn", ["'thinn'", "'thin'"]),
    ],
)
def test_the_fields_of_registered_classes_are_checked(
    assignment: str, values: list[str], own: Path
) -> None:
    import_file(str(own))
    with pytest.raises(InvalidInputError) as caught:
        experiment(apply(read("quickstart"), [*SETS, assignment]))
    assert caught.value.field == assignment.partition("=")[0]
    for value in values:
        assert value in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("method", "fedavg"), ("method", "local"), ("dataset", "digits"), ("model", "mlp")],
)
def test_names_of_fedclade_cannot_be_replaced(kind: Any, name: str) -> None:
    before = REGISTRY[kind][name]
    with pytest.raises(
        InvalidInputError, match=f"{kind} '{name}'", check=lambda error: error.field == "name"
    ):
        fc.register(kind, name)(type("Mine", (), {"__module__": "mine"}))
    assert REGISTRY[kind][name] is before


def test_partitions_of_fedclade_cannot_be_replaced() -> None:
    for name in list(REGISTRY["partition"]):
        with pytest.raises(InvalidInputError, check=lambda error: error.field == "name"):
            fc.register("partition", name)(type("Mine", (), {}))


def test_a_name_of_the_user_may_be_registered_again(own: Path) -> None:
    import_file(str(own))
    import_file(str(own))
    assert find("method", "eager", "method.name").mood == "calm"


def test_register_returns_the_class_with_its_name() -> None:
    @dataclass(frozen=True)
    class Mine(fc.FedAvg):
        pass

    assert fc.register("method", "mine")(Mine) is Mine
    assert Mine.name == "mine"
    assert fc.FedAvg.name == "fedavg"


def test_the_errors_of_an_unknown_kind_and_an_unknown_name_have_the_nearest() -> None:
    with pytest.raises(InvalidInputError, match=r"'methods'.*'method'") as caught:
        fc.register("methods", "x")  # type: ignore[arg-type]
    assert caught.value.field == "kind"
    with pytest.raises(InvalidInputError, match=r"'fedav'.*'fedavg'") as caught:
        find("method", "fedav", "method.name")
    assert caught.value.field == "method.name"


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("def f(:\n    pass\n", "--import", "SyntaxError"),
        ("import no_such_module\n", "--import", "no_such_module"),
        ("1 / 0\n", "--import", "ZeroDivisionError"),
        (
            'import fedclade as fc\n@fc.register("method", "fedavg")\nclass A(fc.FedAvg): pass\n',
            "name",
            "'fedavg'",
        ),
        (
            'import fedclade as fc\n@fc.register("metod", "a")\nclass A(fc.FedAvg): pass\n',
            "kind",
            "'method'",
        ),
    ],
)
def test_an_error_in_the_file_is_one_line(
    text: str, field: str, value: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(fc.FedcladeError, match=value) as caught:
        import_file(str(tmp_path / "bad.py"))
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_file_that_is_not_python_are_errors(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x = 1")
    for name in ("nowhere.py", "mine.txt"):
        path = str(tmp_path / name)
        with pytest.raises(
            InvalidInputError, match=path, check=lambda error: error.field == "--import"
        ):
            import_file(path)


def test_an_error_whose_message_has_two_lines_is_one_line_too(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text('raise ValueError("one\\ntwo")')
    with pytest.raises(InvalidInputError) as caught:
        import_file(str(tmp_path / "bad.py"))
    assert "\n" not in str(caught.value)


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


# --- classes of other forms

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
def test_a_plain_class_without_fields_is_enough(table: str, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    import_file(str(tmp_path / "plain.py"))
    parsed = experiment(apply(read("quickstart"), [f"{table}.name=plain", "run.rounds=1"]))
    parsed.to_run(parsed.clients(), "cpu").run(tmp_path / "run")
    with pytest.raises(InvalidInputError, check=lambda error: error.field == f"{table}.x"):
        experiment(apply(read("quickstart"), [f"{table}.name=plain", f"{table}.x=1"]))


@pytest.mark.parametrize("name", ["module", "function"])
def test_a_module_or_function_cannot_be_registered_as_a_model(name: str) -> None:
    class Module(nn.Module):
        pass

    def function(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Linear(shape[0], classes)

    with pytest.raises(InvalidInputError, match="class", check=lambda e: e.field == name):
        fc.register("model", name)(Module if name == "module" else function)


def test_the_error_of_a_missing_required_field_names_it() -> None:
    @fc.register("method", "needy")
    @dataclass(frozen=True, kw_only=True)
    class Needy(fc.FedAvg):
        amount: int

    with pytest.raises(InvalidInputError, check=lambda error: error.field == "method.amount"):
        experiment(apply(read("quickstart"), ["method.name=needy"]))


def test_a_data_set_without_a_name_has_the_name_of_its_registration(
    tmp_path: Path,
) -> None:
    data = fc.data.load("digits")
    fc.register("dataset", "mine")(
        lambda: fc.data.dataset(data.x_train, data.y_train, data.x_test, data.y_test)
    )
    parsed = experiment(apply(read("quickstart"), ["data.name=mine", "run.rounds=1"]))
    result = parsed.to_run(parsed.clients(), "cpu").run(tmp_path / "run")
    assert result.summary["dataset"] == "mine"
    experiment(read(tmp_path / "run" / "experiment.toml")).clients()
