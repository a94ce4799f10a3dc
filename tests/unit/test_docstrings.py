"""`help()` on every public name: a summary, every argument, and an example that runs."""

from __future__ import annotations

import doctest
import inspect
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedclade as fc
from fedclade.methods.base import hyperparameters

NAMES = [name for name in fc.__all__ if not isinstance(getattr(fc, name), ModuleType)]
# What `fc.run` and `fc.load` fill; a user reads other fields.
INTERNAL = {"Result": {"module", "models", "report_inputs"}}


def arguments(value: Any) -> list[str]:
    """The arguments that a user gives, or the attributes that a user reads."""
    if not inspect.isclass(value):
        return list(inspect.signature(value).parameters)
    if issubclass(value, fc.Method):
        return [] if value is fc.Method else [field.name for field in hyperparameters(value)]
    if is_dataclass(value):
        return [field.name for field in fields(value)]
    if issubclass(value, Exception | Warning):
        return []
    return [name for name in inspect.signature(value).parameters if name != "self"]


@pytest.mark.parametrize("name", NAMES)
def test_help_has_a_summary_and_every_argument(name: str) -> None:
    value = getattr(fc, name)
    text = (value.__doc__ if not inspect.isclass(value) else vars(value).get("__doc__")) or ""
    summary = inspect.cleandoc(text).split("\n\n")[0]
    assert len(summary) > 15, f"fc.{name} has no summary"
    missing = [
        argument
        for argument in arguments(value)
        if f"{argument}:" not in text and argument not in INTERNAL.get(name, ())
    ]
    listed = inspect.getdoc(value) or ""
    missing = [argument for argument in missing if f" {argument}," not in listed]
    assert not missing, f"fc.{name} does not document {missing}"


# Classes that readers make, and one of a description; a user reads what they print.
MADE = {"Description", "RaggedIndex", "ColumnEncoding", "ImageEncoding", "TextEncoding"}
IN_MODULES = [
    (module, name)
    for module in (fc.data, fc.models)
    for name in module.__all__
    if callable(getattr(module, name))
    and name not in MADE
    and not getattr(getattr(module, name), "_is_protocol", False)
]


@pytest.mark.parametrize(
    ("module", "name"), IN_MODULES, ids=[f"{module.__name__}-{name}" for module, name in IN_MODULES]
)
def test_data_and_models_document_every_argument(module: ModuleType, name: str) -> None:
    value = getattr(module, name)
    text = inspect.getdoc(value) or ""
    own = text if not inspect.isclass(value) else vars(value).get("__doc__") or ""
    assert len(own) > 15, f"{module.__name__}.{name} has no summary"
    missing = [
        argument
        for argument in arguments(value)
        if f"{argument}:" not in text
        and f"`{argument}`" not in text
        and f" {argument}," not in text
    ]
    assert not missing, f"{module.__name__}.{name} does not document {missing}"


def test_the_example_of_clients_runs() -> None:
    example = doctest.DocTestParser().get_doctest(
        fc.data.Clients.__doc__ or "", {}, "fc.data.Clients", None, 0
    )
    assert example.examples
    assert doctest.DocTestRunner(verbose=False).run(example).failed == 0


def needs_example(value: Any) -> bool:
    """All but errors."""
    return not inspect.isclass(value) or not issubclass(value, Exception | Warning)


@pytest.mark.parametrize("name", [name for name in NAMES if needs_example(getattr(fc, name))])
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = getattr(fc, name).__doc__ or ""
    example = doctest.DocTestParser().get_doctest(text, {}, f"fc.{name}", None, 0)
    assert example.examples, f"fc.{name} has no example"
    problems: list[str] = []
    outcome = doctest.DocTestRunner(verbose=False).run(example, out=problems.append)
    assert outcome.failed == 0, "".join(problems)
