"""`fedclade.core` is the one place where the author of a method finds the pieces."""

from __future__ import annotations

import inspect

import pytest

import fedclade as fc
from fedclade import core


@pytest.mark.parametrize("name", core.__all__)
def test_every_name_exists_and_is_documented(name: str) -> None:
    value = getattr(core, name)
    assert not inspect.ismodule(value)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert (value.__doc__ or "").strip(), f"core.{name} has no docstring"


def test_the_root_has_no_second_name_for_what_only_authors_of_methods_need() -> None:
    assert set(core.__all__) & set(fc.__all__) == {"accuracy", "cross_entropy"}
