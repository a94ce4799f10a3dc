"""Add newly measured cells of a paper's table to results/papers/.

python tools/docs/merge_results.py table.json …

Each file is a table.json that `fedclade reproduce TABLE` wrote, perhaps with --so-far and a part of
the runs. Its cells, panels and lines replace those of the same name, cells of rows and columns that
the table no longer has are dropped, and the claims are checked again.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from fedclade.io.compact_json import read_results, write_results
from fedclade.reproduce.compare_to_paper import Outcome, check_claims
from fedclade.reproduce.execute import Sizes
from fedclade.reproduce.markdown import from_json
from fedclade.reproduce.panels import Panel, Picture
from fedclade.reproduce.spec import find

RESULTS = Path(__file__).resolve().parents[2] / "results" / "papers"


def merged(old: Outcome, new: Outcome) -> Outcome:
    """The cells of both outcomes of a table; those of `new` replace those of `old`."""
    table = find(new.table)
    cells = {(cell.row, cell.column): cell for cell in (*old.cells, *new.cells)}
    columns = [column for column in table.columns if column.name in old.data | new.data]
    kept = tuple(
        cells[row.name, column.name]
        for column in columns
        for row in table.rows
        if (row.name, column.name) in cells
    )
    return replace(
        new,
        data={column.name: (old.data | new.data)[column.name] for column in columns},
        wanted={column.name: (old.wanted | new.wanted)[column.name] for column in columns},
        cells=kept,
        claims=check_claims(table, columns, kept),
        about={
            name: ", ".join(dict.fromkeys([*old.about.get(name, text).split(", "), text]))
            for name, text in new.about.items()
        },
        seconds=round(old.seconds + new.seconds, 1),
        pictures=tuple(_merged_pictures(old.pictures, new.pictures)),
        sizes={
            column.name: _range([*old.sizes.get(column.name, ()), *new.sizes.get(column.name, ())])
            for column in columns
            if column.name in old.sizes | new.sizes
        },
    )


def _range(sizes: list[Sizes]) -> tuple[Sizes, Sizes]:
    return (
        Sizes(*map(min, zip(*sizes, strict=True))),
        Sizes(*map(max, zip(*sizes, strict=True))),
    )


def _merged_pictures(old: tuple[Picture, ...], new: tuple[Picture, ...]) -> list[Picture]:
    pictures = {picture.file: picture for picture in old}
    for picture in new:
        before = pictures.get(picture.file)
        panels = {panel.title: panel for panel in before.panels} if before is not None else {}
        for panel in picture.panels:
            panels[panel.title] = _merged_panel(panels.get(panel.title), panel)
        pictures[picture.file] = replace(picture, panels=tuple(panels.values()))
    return list(pictures.values())


def _merged_panel(old: Panel | None, new: Panel) -> Panel:
    if old is None or new.kind != "lines":
        return new
    lines = {line.name: line for line in (*old.series, *new.series)}
    return replace(new, series=tuple(lines.values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    for file in parser.parse_args().files:
        outcome = from_json(read_results(file))
        if outcome.quick:
            raise SystemExit(f"{file}: measured with --quick; its numbers are no results.")
        path = RESULTS / f"{outcome.table}.json"
        if path.exists():
            outcome = merged(from_json(read_results(path)), outcome)
        write_results(path, outcome.as_json())


if __name__ == "__main__":
    main()
