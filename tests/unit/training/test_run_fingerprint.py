"""Which changes make another run, and how the difference is described."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fedclade.data import Clients
from fedclade.training import run_fingerprint
from fedclade.training.run_fingerprint import Tables, difference, fingerprint


def tables() -> Tables:
    return {
        "run": {"rounds": 10, "eval_every": 5, "checkpoint_every": 5, "seed": 0},
        "engine": {"chunk": 4, "threads": 2, "device": "cpu"},
        "method": {"name": "fedavg", "layers": ("fc1", "fc2")},
    }


def stored() -> Tables:
    """The tables as a file gives them back: tuples are lists."""
    return json.loads(json.dumps(tables()))  # type: ignore[no-any-return]


def with_value(table: str, key: str, value: object) -> Tables:
    changed = tables()
    changed[table][key] = value
    return changed


DATA_OR_MODEL = "the data, the initial model or the augmentation differ"
FREE = [
    ("run", "rounds"),
    ("run", "eval_every"),
    ("run", "checkpoint_every"),
    ("run", "patience"),
    ("run", "metrics"),
    ("engine", "chunk"),
    ("engine", "threads"),
]


@pytest.mark.parametrize(("table", "key"), FREE)
def test_length_and_speed_may_change(table: str, key: str, ragged: Clients) -> None:
    changed = with_value(table, key, 99)
    assert fingerprint(changed, ragged, []) == fingerprint(tables(), ragged, [])
    assert difference(stored(), changed) == DATA_OR_MODEL


@pytest.mark.parametrize(("table", "key"), [("run", "seed"), ("method", "name"), ("method", "new")])
def test_any_other_value_makes_another_run(table: str, key: str, ragged: Clients) -> None:
    changed = with_value(table, key, 99)
    assert fingerprint(changed, ragged, []) != fingerprint(tables(), ragged, [])
    before = tables()[table].get(key)
    assert difference(stored(), changed) == f"{table}.{key} was {before!r}, now 99"


@pytest.mark.parametrize("field", ["x", "y", "x_test", "y_test", "test_part_id"])
def test_one_other_value_of_the_data_makes_another_run(field: str, small_digits: Clients) -> None:
    values = getattr(small_digits, field).clone()
    values.view(-1)[-1] += 1
    changed = replace(small_digits, **{field: values})
    assert fingerprint(tables(), changed, []) != fingerprint(tables(), small_digits, [])


def test_another_initial_model_makes_another_run() -> None:
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert fingerprint(tables(), None, [zeros]) != fingerprint(tables(), None, [ones])
    assert fingerprint(tables(), None, [zeros]) == fingerprint(tables(), None, [torch.zeros(3)])


def test_a_stored_list_is_the_tuple_that_was_written() -> None:
    assert difference(stored(), tables()) == DATA_OR_MODEL
    other = stored()
    other["method"]["layers"] = ["fc1"]
    assert difference(other, tables()) == "method.layers was ['fc1'], now ('fc1', 'fc2')"


def test_of_large_data_a_sample_of_rows_counts(
    monkeypatch: pytest.MonkeyPatch, ragged: Clients
) -> None:
    x = ragged.x
    assert isinstance(x, torch.Tensor)
    monkeypatch.setattr(run_fingerprint, "MOST_HASHED", x.nbytes - 1)
    monkeypatch.setattr(run_fingerprint, "_BLOCKS", 3)
    monkeypatch.setattr(run_fingerprint, "_SAMPLE", 3 * x[0].nbytes)
    before = fingerprint(tables(), ragged, [])
    counted = []
    for row in range(len(x)):
        changed = x.clone()
        changed[row] += 1
        counted.append(fingerprint(tables(), replace(ragged, x=changed), []) != before)
    assert [row for row in range(len(x)) if counted[row]] == [0, (len(x) - 1) // 2, len(x) - 1]
