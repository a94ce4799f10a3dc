"""What of the papers is reproduced: the list of tables and figures is complete, and cells are
counted once.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from fedclade.reproduce import coverage
from fedclade.reproduce.compare_to_paper import Cell, Outcome
from fedclade.reproduce.coverage import CellCount, cells_with_number, count, paper_items, total
from fedclade.reproduce.spec import Table, tables

IN_THE_PAPERS = {  # figures and tables
    "flt": (12, 10),
    "flt_w": (4, 3),
    "flis": (2, 3),
    "fedgmcc": (3, 3),
    "cfl": (12, 0),
}

SMALL: dict[str, Any] = {
    "name": "small",
    "title": "t",
    "paper": "p",
    "experiment": {},
    "columns": [
        {"name": "a", "data": ["digits"]},
        {"name": "b", "like": "a", "metric": "train_accuracy"},
        {"name": "c", "like": "a", "metric": "bytes"},
    ],
    "rows": [
        {"name": "one", "method": "fedavg", "paper": {"a": 1.0, "b": 2.0}},
        {"name": "two", "method": "local", "paper": {"a": 1.0}, "skip": ["a"]},
        {"name": "three", "method": "ifca", "formula": "2*W"},
        {"name": "ours", "method": "clade"},
    ],
}


def cell(row: str, column: str) -> Cell:
    return Cell(row, column, "m", "accuracy", 1.0, (None,), None, None, None, "not reached", "")


def outcome(name: str, *cells: Cell) -> Outcome:
    return Outcome(name, "t", "p", (), False, {}, {}, cells, (), {}, 0.0)


def test_every_table_and_figure_of_the_papers_is_listed() -> None:
    items = Counter((item.paper, item.name) for item in paper_items())
    assert set(items.values()) == {1}
    assert set(items) == {
        (paper, f"{kind} {number}")
        for paper, numbers in IN_THE_PAPERS.items()
        for kind, most in zip(("Figure", "Table"), numbers, strict=True)
        for number in range(1, most + 1)
    }


def test_every_item_has_a_table_or_a_reason() -> None:
    for item in paper_items():
        has_table = bool(item.found())
        assert not (has_table and item.reason), item
        assert has_table or item.reason, item


def test_every_table_on_disk_is_listed() -> None:
    listed = {name for item in paper_items() for name in item.found()}
    assert {name for name, table in tables().items() if not table.benchmark} == listed


def test_repeated_tables_exist() -> None:
    for name, table in tables().items():
        assert table.repeats in ("", *tables()), name
        assert table.repeats != name


def test_cells_are_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    small = TypeAdapter(Table).validate_python(SMALL)
    assert cells_with_number(small) == {("one", "a"), ("one", "b"), ("three", "c")}
    assert count(small, None) == CellCount(3, 0)
    # A run that never reached its target is measured; a row of ours has no number of the paper.
    measured = outcome("small", cell("one", "a"), cell("ours", "a"))
    assert count(small, measured) == CellCount(3, 1)
    assert count(small, measured, "^(?!train_)") == CellCount(2, 1)
    found = {
        "small": small,
        "again": replace(small, repeats="small"),
        "benchmark": replace(small, benchmark="LEAF"),
        "other": small,
    }
    monkeypatch.setattr(coverage, "tables", lambda: found)
    others = [outcome(name, cell("one", "b")) for name in ("other", "benchmark")]
    assert total([measured, *others]) == CellCount(6, 2)
    assert str(total([measured])) == "1 of 6"
