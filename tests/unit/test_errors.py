"""Messages that name the field and what is allowed, and suggestions for names."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from fedclade.errors import (
    FedcladeError,
    FedcladeWarning,
    InvalidInputError,
    VectorizationError,
    WriteError,
    nearest,
    require,
    require_int,
)


def test_a_condition_that_holds_raises_nothing() -> None:
    require(True, "run.rounds", 3, "must be 1 or more")


def test_a_message_has_the_field_the_value_and_what_is_allowed() -> None:
    with pytest.raises(InvalidInputError) as refused:
        require(False, "run.name", "x", "must be y")
    assert refused.value.field == "run.name"
    assert str(refused.value) == "run.name = 'x': must be y."


@pytest.mark.parametrize(
    "kind", [FedcladeError, InvalidInputError, VectorizationError, WriteError, FedcladeWarning]
)
def test_every_error_keeps_its_message_and_its_field(kind: type[FedcladeError]) -> None:
    error = kind("model: too large.", "model")
    copy = pickle.loads(pickle.dumps(error))  # as another process would get it
    assert (str(error), error.field) == (str(copy), copy.field) == ("model: too large.", "model")
    assert kind("no single thing.").field == ""


def test_errors_are_those_that_callers_of_python_expect() -> None:
    assert issubclass(InvalidInputError, ValueError)
    assert issubclass(WriteError, OSError)
    assert issubclass(InvalidInputError, FedcladeError)


def test_a_close_name_is_suggested_and_otherwise_all_are_listed() -> None:
    names = ["fedavg", "scaffold", "clade"]
    assert nearest("fedvag", names) == " Did you mean 'fedavg'?"
    assert nearest("zzz", names) == " Known: clade, fedavg, scaffold."
    assert nearest("zzz", []) == ""


@pytest.mark.parametrize("value", [1, 3, np.int64(3), np.uint8(1)])
def test_python_and_numpy_integers_are_accepted(value: object) -> None:
    require_int("run.rounds", value, 1, 3)


@pytest.mark.parametrize("value", [0, 4, True, np.True_, 2.0, "2", None, np.int64(0)])
def test_all_else_is_refused(value: object) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "run.rounds"):
        require_int("run.rounds", value, 1, 3)


def test_the_message_has_the_limits_and_the_note() -> None:
    with pytest.raises(InvalidInputError) as refused:
        require_int("a", -1, 0, note="0 for never")
    assert str(refused.value) == "a = -1: must be a whole number of at least 0; 0 for never."
    with pytest.raises(InvalidInputError) as refused:
        require_int("a", 13, 1, 12)
    assert str(refused.value) == "a = 13: must be a whole number of at least 1 and at most 12."
