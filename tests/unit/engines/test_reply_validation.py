"""Which replies are rejected, and the reasons."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from fedclade.core.pytree import Tree
from fedclade.engines.reply_validation import LARGEST, rejection_reason, rows_out_of_range

EXPECTED = {"w": ((2, 3), torch.float32), "n": ((), torch.int64), "examples": ((), torch.float64)}


def reply(**changed: Tensor) -> Tree:
    return {
        "w": torch.ones(2, 3),
        "n": torch.tensor(4),
        "examples": torch.tensor(5.0, dtype=torch.float64),
    } | changed


def examples(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


@pytest.mark.parametrize("number", [0, 1, 5, 8])
def test_a_good_reply_is_accepted(number: int) -> None:
    assert rejection_reason(reply(examples=examples(number)), EXPECTED, size=8) is None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (
            reply(extra=torch.zeros(1)),
            r"names: expected \['examples', 'n', 'w'\], got \['examples', 'extra', 'n', 'w'\]",
        ),
        ({"w": torch.ones(2, 3)}, r"names: expected .* got \['w'\]"),
        ({}, r"names: expected .* got \[\]"),
        (reply(w=torch.ones(3, 2)), r"shape of 'w': expected \(2, 3\), got \(3, 2\)"),
        (reply(w=torch.ones(1, 2, 3)), r"shape of 'w': expected \(2, 3\), got \(1, 2, 3\)"),
        (reply(n=torch.tensor([4])), r"shape of 'n': expected \(\), got \(1,\)"),
        (
            reply(w=torch.ones(2, 3, dtype=torch.float64)),
            r"dtype of 'w': expected torch.float32, got torch.float64",
        ),
        (
            reply(w=torch.ones(2, 3, dtype=torch.int64)),
            r"dtype of 'w': expected torch.float32, got torch.int64",
        ),
        (reply(n=torch.tensor(4.0)), r"dtype of 'n': expected torch.int64, got torch.float32"),
        (reply(w=torch.tensor([[1, 1, 1], [1, float("nan"), 1]])), r"'w' is not finite"),
        (reply(w=torch.tensor([[float("inf"), 1, 1], [1, 1, 1]])), r"'w' is not finite"),
        (reply(w=torch.tensor([[1, 1, 1], [1, 1, -float("inf")]])), r"'w' is not finite"),
        (
            reply(w=torch.tensor([[1, 1, 1], [1, -1e30, 1]])),
            r"'w' has a number of size 1e\+30, more than 1e\+12",
        ),
        (reply(examples=examples(float("nan"))), r"'examples' is not finite"),
        (reply(examples=examples(9)), r"claims 9 examples, holds 8"),
        (reply(examples=examples(-1)), r"claims -1 examples, holds 8"),
        (reply(examples=examples(8.5)), r"claims 8.5 examples, holds 8"),
    ],
)
def test_a_bad_reply_is_rejected_with_the_reason(bad: Tree, reason: str) -> None:
    actual = rejection_reason(bad, EXPECTED, size=8)
    assert actual is not None
    assert re.fullmatch(reason, actual)


def test_a_good_reply_with_names_in_another_order_is_accepted() -> None:
    assert rejection_reason(dict(reversed(reply().items())), EXPECTED, size=8) is None


def test_rows_that_are_not_finite_are_out_of_range() -> None:
    rows = {
        "w": torch.ones(5, 2, 2),
        "v": torch.ones(5, 3),
        "n": torch.arange(5),
        "loss": torch.ones(5, dtype=torch.float64),
    }
    rows["w"][1, 0, 1] = float("nan")
    rows["v"][3, 2] = -float("inf")
    rows["loss"][4] = float("inf")
    assert rows_out_of_range(rows) == [1, 3, 4]


def test_a_row_of_many_large_numbers_is_in_range() -> None:
    rows = torch.tensor(
        [[LARGEST, LARGEST], [1.0, 1.0], [1e30, -1e30], [2 * LARGEST, 0], [torch.inf, -torch.inf]]
    )
    assert rows_out_of_range({"w": rows}) == [2, 3, 4]
    assert rows_out_of_range({"w": rows.double(), "v": torch.ones(5, 1)}) == [2, 3, 4]


def test_whole_numbers_are_always_in_range() -> None:
    assert rows_out_of_range({"n": torch.arange(3)}) == []


def test_replies_of_one_number_per_client_can_be_out_of_range() -> None:
    assert rows_out_of_range({"loss": torch.tensor([1.0, float("nan"), 3.0])}) == [1]
