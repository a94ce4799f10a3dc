"""Messages that name the field and what is allowed, and suggestions for names."""

from __future__ import annotations

import pytest

from fedclade.errors import FedcladeError, InvalidInputError, WriteError, nearest, require


def test_a_condition_that_holds_raises_nothing() -> None:
    require(True, "run.rounds", 3, "must be 1 or more")


def test_a_message_has_the_field_the_value_and_what_is_allowed() -> None:
    with pytest.raises(InvalidInputError, match=r"^run\.name = 'x': must be y\.$"):
        require(False, "run.name", "x", "must be y")


def test_errors_are_those_that_callers_of_python_expect() -> None:
    assert issubclass(InvalidInputError, ValueError)
    assert issubclass(WriteError, OSError)
    assert issubclass(InvalidInputError, FedcladeError)


def test_a_close_name_is_suggested_and_otherwise_all_are_listed() -> None:
    names = ["fedavg", "scaffold", "clade"]
    assert nearest("fedvag", names) == " Did you mean 'fedavg'?"
    assert nearest("zzz", names) == " Known: clade, fedavg, scaffold."
    assert nearest("zzz", []) == ""
