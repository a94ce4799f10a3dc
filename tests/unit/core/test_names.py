"""Names of clients, classes and features: what is allowed, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from fedclade.core.names import (
    MAX_LENGTH,
    Names,
    checked_client_names,
    checked_names,
    client_number,
)
from fedclade.errors import InvalidInputError


def test_lists_and_arrays_of_text_are_names() -> None:
    expected = ("north", "Süd", "a, b", 'say "x"', "<script>", "../x", "x" * MAX_LENGTH)
    assert checked_client_names(list(expected), "client") == expected
    assert checked_client_names(np.array(expected), "client") == expected
    assert all(type(name) is str for name in checked_client_names(np.array(expected), "client"))


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ([""], "1 to 200"),
        (["x" * (MAX_LENGTH + 1)], "has 201"),
        (["two\nlines"], r"two\\nlines"),
        (["tab\there"], r"tab\\there"),
        (["right\u202eleft"], "u202e"),
        (["half \ud800"], "ud800"),
        ([" north"], "' north'"),
        (["north", "south", "north"], "'north'.*twice"),
        ([1, 2], "= 1:"),
        ("north", "str"),
        (7, "int"),
    ],
)
def test_other_names_are_refused(names: object, shown: str) -> None:
    with pytest.raises(InvalidInputError, match=shown) as caught:
        checked_names(names, "class_names")
    assert caught.value.field == "class_names"


@pytest.mark.parametrize("name", ["=1+1", "+49", "-x", "@home"])
def test_a_client_s_name_is_no_formula(name: str) -> None:
    """clients.csv may be opened in a spreadsheet. Names of classes are in no cell."""
    assert checked_names([name], "class_names") == (name,)
    with pytest.raises(InvalidInputError, match="formula") as caught:
        checked_client_names(["north", name], "client")
    assert caught.value.field == "client"


def test_a_client_is_found_by_name_or_number() -> None:
    assert client_number("south", ["north", "south"]) == 1
    assert client_number(1, ["north", "south"]) == 1
    assert client_number(np.int64(1), [0, 1]) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("client", "clients", "shown"),
    [
        ("nroth", ["north", "south"], "'north'"),
        ("x", ["north", "south"], "north, south"),
        ("1", [0, 1], "0 to 1"),
        (2, ["north", "south"], "0 to 1"),
        (-1, [0, 1], "0 to 1"),
    ],
)
def test_an_unknown_client_is_an_error(
    client: int | str, clients: list[int | str], shown: str
) -> None:
    with pytest.raises(InvalidInputError, match=shown) as caught:
        client_number(client, clients)
    assert caught.value.field == "client"
    assert repr(client) in str(caught.value)


def test_a_message_lists_some_of_many_names() -> None:
    with pytest.raises(InvalidInputError, match=r"4,000 in all") as caught:
        client_number("?", [f"site {number}" for number in range(4000)])
    assert len(str(caught.value)) < 1000


def test_numbers_stand_for_missing_names() -> None:
    names = Names(classes=("cat", "dog"))
    assert (names.client(3), names.class_name(1), names.class_name(2)) == ("3", "dog", "2")
    assert names.only([1]) is names
    assert Names(clients=("a", "b", "c")).only([2, 0]).clients == ("c", "a")
